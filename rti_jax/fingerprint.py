"""Digests that tell one policy, model folder or text from another."""

import hashlib
import json
import pathlib
from collections.abc import Sequence

BLOCK, BLOCKS = 1 << 16, 64  # how much of a large file stands for all of it
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def of_bytes(data: bytes) -> str:
    """A short digest."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_folder(folder: pathlib.Path) -> str:
    """Of the weights and of what turns text into ids; see `of_file`."""
    return of_files([p for p in sorted(folder.iterdir()) if p.suffix == ".safetensors" or p.name in SMALL])


def of_files(paths: Sequence[pathlib.Path]) -> str:
    """Of names and contents."""
    return of_bytes(json.dumps([(p.name, of_file(p)) for p in paths]).encode())


def of_file(path: pathlib.Path) -> str:
    """Of a file's bytes; of a large one's size and evenly spaced blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= BLOCK * BLOCKS:
            return of_bytes(file.read())
        parts = [size.to_bytes(8, "little")]
        for i in range(BLOCKS):
            file.seek(i * (size - BLOCK) // (BLOCKS - 1))
            parts.append(file.read(BLOCK))
    return of_bytes(b"".join(parts))
