"""Values between the hosts of a run as bytes that hold data and no code: msgpack, our records by their class's name.

What pickle would run on arrival cannot be said here. A record (dataclass, NamedTuple, Enum) is rebuilt by calling its
class, which must be one of these packages', so that it is checked on arrival as on construction.
"""

import dataclasses
import enum
import functools
import importlib
import pathlib
from typing import Any

import msgpack
import numpy as np

PACKAGES = ("rti_jax", "envs", "models")
TUPLE, RECORD, ENUM, ARRAY, SCALAR, PATH, RANGE, INTEGER = range(8)


def encode(value: Any) -> bytes:
    """JSON's types, tuples, ranges, paths, numpy's arrays and numbers, and records of our packages, nested at will.

    Subclasses of JSON's types arrive as these.

    Raises:
      TypeError: for anything else.
    """
    return msgpack.packb(value, default=_tagged, strict_types=True, unicode_errors="surrogatepass")


def decode(data: bytes) -> Any:
    """What `encode` was given, of the same types.

    Raises:
      ValueError: the bytes are not `encode`'s, or name a class that is none of ours.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_untagged, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ValueError(f"not a value from another host: {type(error).__name__}: {error}") from error


def _tagged(value: Any) -> Any:
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return _ext(RECORD, [_name(kind), {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}])
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _ext(RECORD, [_name(kind), dict(zip(kind._fields, value, strict=True))])
    if isinstance(value, enum.Enum):
        return _ext(ENUM, [_name(kind), value.value])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _ext(ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _ext(SCALAR, [value.dtype.str, value.tobytes()])
    if kind is tuple:
        return _ext(TUPLE, list(value))
    if kind is range:
        return _ext(RANGE, [value.start, value.stop, value.step])
    if isinstance(value, pathlib.Path):
        return _ext(PATH, str(value))
    if kind is int:  # of more than 64 bits
        return _ext(INTEGER, hex(value))
    for plain in (dict, list, str, int, float):  # an environment's OrderedDict, say, which JSON takes as well
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be told to another host")


def _ext(code: int, value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, encode(value))


def _untagged(code: int, data: bytes) -> Any:
    value = decode(data)
    if code == RECORD:
        return _class(value[0])(**value[1])
    if code == ENUM:
        return _class(value[0])(value[1])
    if code == ARRAY:
        return np.frombuffer(value[2], np.dtype(value[0])).reshape(value[1]).copy()
    if code == SCALAR:
        return np.frombuffer(value[1], np.dtype(value[0]))[0]
    if code == INTEGER:
        return int(value, 16)
    plain = {TUPLE: tuple, PATH: pathlib.Path, RANGE: lambda parts: range(*parts)}
    if code not in plain:
        raise ValueError(f"not a value from another host: kind {code}")
    return plain[code](value)


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise TypeError(f"a {name} cannot be told to another host")
    return name


@functools.cache
def _class(name: str) -> type:
    """A record's class by its name."""
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] not in PACKAGES or not attribute.isidentifier():
        raise TypeError(f"{name} is no record of {', '.join(PACKAGES)}")
    kind = getattr(importlib.import_module(module), attribute)
    record = isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum) or (issubclass(kind, tuple) and kind is not tuple)
    )
    if not record:
        raise TypeError(f"{name} is no record")
    return kind
