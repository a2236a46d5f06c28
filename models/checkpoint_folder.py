"""A Hugging Face model folder on disk: safetensors files read in parts, and a complete folder written at once."""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

from models.safetensors_file import DTYPES, Entry, Layout, Writer

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


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, or all; [] if there are none.

    Raises ValueError that names files which the index has and the folder has not.
    """
    files = sorted(path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        listed = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        if absent := sorted(listed - {f.name for f in files}):
            raise ValueError(f"{path}: the weight index names files that are not there: {', '.join(absent)}")
        return [path / name for name in sorted(listed)]
    return files


def tensor_names(path: Path) -> list[str]:
    """Names of all tensors of a folder; [] if it has no weights."""
    return [name for file in weight_files(path) for name in Layout(file).entries]


class Reader(contextlib.ExitStack):
    """The tensors of all safetensors files of a folder, by name; parts are read from disk when asked for.

    Attributes:
      entries: dtype, shape and size of every tensor.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        if not (files := weight_files(path)):
            raise ValueError(f"{path} has no *.safetensors weights")
        self._files, self._layouts = {}, {}
        self.entries: dict[str, Entry] = {}
        for file in files:
            handle, layout = self.enter_context(_open(file)), Layout(file)
            for name, entry in layout.entries.items():
                self._files[name], self._layouts[name], self.entries[name] = handle, layout, entry

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in the dtype on disk."""
        return self._files[name].get_slice(name)[index]

    def data(self, name: str) -> np.ndarray:
        """The bytes of a whole tensor, mapped, not read."""
        return self._layouts[name].data(name)


def _open(file: Path):
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def write(
    out: Path,
    *,
    config: Mapping[str, Any],
    entries: Mapping[str, Entry],
    tensors: Iterable[tuple[str, np.ndarray]],
    source: Path | None,
    passed: Callable[[str], bool] | None = None,
) -> Path:
    """Writes a model folder beside `out` and renames it when complete. Only the first process writes.

    Args:
      entries: of all `tensors`, in their order; decides the files before the first tensor arrives.
      passed: says of a name whether that tensor of `source` is copied as it is; None copies none.
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
        encoded = ((n, a.astype(DTYPES[entries[n].dtype])) for n, a in tensors)
        with contextlib.ExitStack() as stack:
            extra: dict[str, Entry] = {}
            if passed and source and weight_files(source):
                reader = stack.enter_context(Reader(source))
                extra = {n: e for n, e in reader.entries.items() if passed(n)}
                encoded = itertools.chain(encoded, ((n, reader.data(n)) for n in extra))
            _write_tensors(temporary, {**entries, **extra}, encoded)
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


def _write_tensors(out: Path, entries: Mapping[str, Entry], tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Files of the announced tensors, one tensor in memory at a time."""
    files = _plan({n: e.size for n, e in entries.items()})
    for file, members in files.items():
        with open(out / file, "wb") as stream:
            writer = Writer(stream, {n: entries[n] for n in members})
            for expected in members:
                name, array = next(tensors)
                if name != expected or array.nbytes != entries[name].size:
                    raise ValueError(f"{name} arrived where {expected} of {entries[expected].size} bytes was announced")
                writer.write(name, array)
    if len(files) > 1:
        weight_map = {n: file for file, members in files.items() for n in members}
        index = {"metadata": {"total_size": sum(e.size for e in entries.values())}, "weight_map": weight_map}
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
