"""`rti score`: log-probabilities and perplexity of responses, by the learner's own code.

Reads JSON lines, `{"prompt_ids": [...], "response_ids": [...]}` or `{"prompt": "...", "response": "..."}`, and writes
one line for each, in the same order: `{"logprobs": [...], "perplexity": x, "tokens": n}`, or `{"error": "...",
"line": n}` for a row that cannot be read. The response's tokens are scored, under the prompt and the earlier ones.
Neither vLLM nor PyTorch is needed.
"""

import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rti_jax import config as config_lib
from rti_jax.logprobs import Row, Scorer

WINDOW = 4096  # lines that are in memory at a time
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")  # where there is no tokenizer.json


class BadRow(Exception):
    """A row that cannot be scored; the message says why."""


def score(
    model_dir: str | Path,
    input: str | Path,
    output: str | Path,
    *,
    temperature: float = 1.0,
    mesh: Mapping[str, int] | config_lib.MeshConfig | None = None,
    dtype: str = "float32",
    progress: bool = True,
) -> int:
    """Scores the rows of a file.

    Args:
      model_dir: Hugging Face folder. input, output: JSON lines files; the output appears when it is complete.
      temperature: of the distribution whose log-probabilities are wanted.
      mesh: devices by axis, e.g. {"fsdp": 4, "tensor": 2}; default all of them as fsdp.
      dtype: of the computation.
      progress: shows a bar on standard error if that is a terminal.

    Returns 0, or 1 if any row was malformed (each is named on standard error, the others are scored).

    Raises ConfigError if the model or the input cannot be read.
    """
    from models import hf
    from rti_jax.runtime import make_mesh

    input, output = Path(input), Path(output)
    if not input.is_file():
        raise config_lib.ConfigError(f"input file {input} does not exist")
    devices = mesh if isinstance(mesh, config_lib.MeshConfig) else config_lib.MeshConfig(**(mesh or {}))
    devices = make_mesh(devices)
    try:
        model, params = hf.load(model_dir, dtype=dtype, mesh=devices)
        scorer = Scorer(model, devices, temperature)
    except ValueError as error:
        raise config_lib.ConfigError(str(error)) from error
    read = _reader(Path(model_dir), model.config.vocab_size)
    with _lines(input) as (lines, total), _written(output) as out, _bar(progress, total) as advance:
        return _score_lines(lines, out, read, lambda rows: scorer.score(params, rows, advance(len(rows))))


def _score_lines(lines: Iterator[tuple[int, str]], out, read: Callable[[str], Row], scored: Callable) -> int:
    """Scores numbered lines window by window; 1 if any was malformed."""
    malformed = 0
    while window := list(itertools.islice(lines, WINDOW)):
        results: list[dict[str, Any]] = []
        rows: list[Row] = []
        for number, line in window:
            try:
                rows.append(read(line))
                results.append({})
            except BadRow as error:
                malformed += 1
                print(f"line {number}: {error}", file=sys.stderr)
                results.append({"error": str(error), "line": number})
        values = iter(scored(rows))
        for result in results:
            out.write(json.dumps(result or _result(next(values))) + "\n")
    if malformed:
        print(f"{malformed} malformed row(s); the others were scored", file=sys.stderr)
    return int(malformed > 0)


def _result(logprobs: Sequence[float]) -> dict[str, Any]:
    mean = -math.fsum(map(float, logprobs)) / len(logprobs)
    perplexity = math.exp(mean) if mean < 700 else None  # None: beyond what a float holds
    return {"logprobs": [float(x) for x in logprobs], "perplexity": perplexity, "tokens": len(logprobs)}


def _reader(folder: Path, vocab_size: int) -> Callable[[str], Row]:
    """A function from a line to a row. The tokenizer is read when the first text row comes."""
    encoder: list[Callable[[str, bool], list[int]]] = []

    def encode(text: str, special: bool) -> list[int]:
        if not encoder:
            encoder.append(_encoder(folder))
        return encoder[0](text, special)

    def read(line: str) -> Row:
        row = _parse(line)
        if "prompt_ids" in row or "response_ids" in row:
            prompt, response = (_ids(row, key, vocab_size) for key in ("prompt_ids", "response_ids"))
        else:
            prompt = encode(_text(row, "prompt"), True)
            response = encode(_text(row, "response"), False)
        if not prompt:
            raise BadRow("the prompt is empty, so the first response token has no log-probability")
        if not response:
            raise BadRow("the response is empty")
        return prompt, response

    return read


def _parse(line: str) -> dict[str, Any]:
    _check_utf8(line)
    try:
        row = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"a row is an object, not {type(row).__name__}")
    return row


def _ids(row: Mapping[str, Any], key: str, vocab_size: int) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadRow(f"{key} must be a list of token ids")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise BadRow(f"{key} holds {outside[0]}, outside the vocabulary of {vocab_size}")
    return ids


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise BadRow(f"needs prompt_ids and response_ids, or prompt and response as text; {key} is missing or no text")
    _check_utf8(row[key])
    return row[key]


def _check_utf8(text: str) -> None:
    """Bytes that are no UTF-8 and half characters, which no tokenizer takes, arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeError as error:
        raise BadRow("not valid UTF-8") from error


def _encoder(folder: Path) -> Callable[[str, bool], list[int]]:
    """(text, with special tokens) -> ids."""
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids
    if not any((folder / name).is_file() for name in SLOW_TOKENIZERS):
        raise config_lib.ConfigError(f"{folder} has no tokenizer files, which text rows need")
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return lambda text, special: slow.encode(text, add_special_tokens=special)


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[tuple[Iterator[tuple[int, str]], int]]:
    """Numbered lines (from 1) of a file and how many there are; blank lines at its end are none."""
    last = 0
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            last = number if line.strip() else last
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        yield itertools.islice(enumerate(file, 1), last), last


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """A text file that takes the name `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[int], Callable[[int, int], None] | None]]:
    """A progress bar over `total` rows; gives, for each window of rows, the callback that the scorer calls."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("scoring", total=total)
        before = 0

        def window(rows: int) -> Callable[[int, int], None]:
            nonlocal before
            start, before = before, before + rows
            return lambda done, _: bar.update(task, completed=start + done)

        yield window
