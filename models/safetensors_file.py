"""safetensors files as they stand on disk: where each tensor lies, and a writer that needs one tensor at a time.

The library reads and writes whole files; here tensors that arrive one by one are written without holding the others,
and the bytes of a tensor can be copied without knowing its dtype. Format: 8 bytes of header length, a JSON header,
the data (https://huggingface.co/docs/safetensors).
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
TAGS = {str(dtype): tag for tag, dtype in DTYPES.items()}  # "float32" -> "F32"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: the format's name of its dtype, its shape and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> "Entry":
        """Entry of a tensor whose dtype is one of `DTYPES`."""
        return cls(dtype, tuple(shape), int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize)


class Layout:
    """Where the tensors of a file lie: `entries` and their `starts`, in bytes from the beginning of the file."""

    def __init__(self, file: Path):
        """Reads the header of `file`. Raises ValueError if it has none."""
        with open(file, "rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, 10**9)))
                header.pop("__metadata__", None)
                rows = {n: (h["dtype"], tuple(h["shape"]), h["data_offsets"]) for n, h in header.items()}
            except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
        self.file = file
        self.entries = {n: Entry(dtype, shape, end - start) for n, (dtype, shape, (start, end)) in rows.items()}
        self.starts = {n: 8 + length + start for n, (_, _, (start, _)) in rows.items()}

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor, mapped, not read."""
        if not self.entries[name].size:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", self.starts[name], (self.entries[name].size,))


class Writer:
    """Writes a file whose tensors are announced at once and arrive in any order."""

    def __init__(self, stream: IO[bytes], entries: Mapping[str, Entry]):
        self._stream, self._starts = stream, {}
        position, header = 0, {"__metadata__": {"format": "pt"}}
        # Wide elements first, so that each tensor is aligned to its elements.
        for name, entry in sorted(entries.items(), key=lambda e: -e[1].size / max(1, np.prod(e[1].shape))):
            end = position + entry.size
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
            self._starts[name], position = position, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        stream.write(struct.pack("<Q", len(text)) + text)
        self._base = stream.tell()

    def write(self, name: str, array: np.ndarray) -> None:
        """The data of an announced tensor, in its announced dtype."""
        self._stream.seek(self._base + self._starts[name])
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
