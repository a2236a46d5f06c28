"""A Hugging Face model folder on disk: safetensors files read in parts, and a complete folder written at once."""

import contextlib
import fnmatch
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  numpy learns bfloat16
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

SHARD_BYTES = 5 * 1000**3
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ValueError that says what is missing."""
    if not path.is_dir():
        raise ValueError(f"model folder {path} does not exist")
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face model folder: it has no config.json")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


class Reader(contextlib.ExitStack):
    """The tensors of all safetensors files of a folder, by name; parts are read from disk when asked for."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        files = sorted(path.glob("*.safetensors"))
        if (path / INDEX).is_file():
            listed = set(json.loads((path / INDEX).read_text())["weight_map"].values())
            if absent := sorted(listed - {f.name for f in files}):
                raise ValueError(f"{path}: the weight index names files that are not there: {', '.join(absent)}")
            files = [path / name for name in sorted(listed)]
        if not files:
            raise ValueError(f"{path} has no *.safetensors weights")
        self._files = {}
        for file in files:
            handle = self.enter_context(_open(file))
            self._files.update((name, handle) for name in handle.keys())

    def shapes(self, ignore: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor whose name matches none of the `ignore` patterns."""
        kept = (n for n in self._files if not any(fnmatch.fnmatchcase(n, p) for p in ignore))
        return {n: tuple(self._files[n].get_slice(n).get_shape()) for n in kept}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in the dtype on disk."""
        return self._files[name].get_slice(name)[index]

    def matching(self, patterns: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Whole tensors whose name matches one of the patterns, in the dtype on disk."""
        for name, handle in self._files.items():
            if any(fnmatch.fnmatchcase(name, p) for p in patterns):
                yield name, handle.get_tensor(name)


def _open(file: Path):
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def write(
    out: Path,
    *,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    source: Path | None,
    copied: Sequence[str] = (),
) -> Path:
    """Writes a model folder beside `out` and renames it when complete. Only the first process writes.

    Args:
      shapes: of all `tensors`, in their order; decides the files before the first tensor arrives.
      copied: patterns of tensors of `source` that are copied as they are.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file())):
        raise ValueError(f"{out} exists and is not a model folder; choose another output folder")
    if jax.process_index() != 0:
        for _ in tensors:  # takes part in the gathers
            pass
        return out
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if source:
            _copy_companions(source, temporary)
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        extra = _untrained(source, copied)
        _write_tensors(temporary, shapes, tensors, np.dtype(dtype), extra)
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _copy_companions(source: Path, out: Path) -> None:
    """Everything of the source but its config and weights: tokenizer, templates, generation_config, licence, readme."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in ("config.json", INDEX):
            if not file.name.startswith(".") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name)


def _untrained(source: Path | None, patterns: Sequence[str]) -> dict[str, np.ndarray]:
    if not source or not patterns:
        return {}
    with Reader(source) as reader:
        return dict(reader.matching(patterns))


def _write_tensors(out, shapes, tensors, dtype: np.dtype, extra: Mapping[str, np.ndarray]) -> None:
    sizes = {n: int(np.prod(s)) * dtype.itemsize for n, s in shapes.items()}
    sizes |= {n: a.nbytes for n, a in extra.items()}
    files = _plan(sizes)
    stream = itertools.chain(((n, a.astype(dtype)) for n, a in tensors), extra.items())
    for name, members in files.items():
        shard = {n: np.ascontiguousarray(a) for n, a in (next(stream) for _ in members)}
        if list(shard) != members:
            raise ValueError(f"tensors arrived in another order than announced: {list(shard)}")
        save_file(shard, out / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {n: name for name, members in files.items() for n in members}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _plan(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """File name -> tensor names, in order, each file at most `SHARD_BYTES` unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _replace(temporary: Path, out: Path) -> None:
    """Puts `temporary` in the place of `out`, which may exist."""
    if not out.exists():
        temporary.rename(out)
        return
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old)
