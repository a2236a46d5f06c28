"""Files of tasks: prompt and data, and what the reward side knows (evidence, gold calls)."""

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import pydantic
import yaml

from envs.base import Evidence


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class GoldCall(_Part):
    name: str
    arguments: dict[str, Any] = {}


class GivenEvidence(_Part):
    text: str
    values: tuple[str, ...] = ()


class Record(_Part):
    """One task of a file.

    Attributes:
      id: unique in its file. prompt: the user's message. kind: groups tasks in metrics. data: for the reward function.
      evidence: readable text for the roles, perhaps with the values that only it may hold.
      gold: calls that solve the task, one a turn; answer: the text that ends the episode after them.
      idle_wins: whether doing nothing is right, as in a task whose request must be refused.
    """

    id: str
    prompt: str
    kind: str = "task"
    data: dict[str, Any] = {}
    evidence: str | GivenEvidence = ""
    gold: tuple[GoldCall, ...] | None = None
    answer: str | None = None
    idle_wins: bool = False

    @property
    def has_gold(self) -> bool:
        return self.gold is not None or self.answer is not None

    def as_evidence(self) -> Evidence:
        """What is given, then the gold calls and the answer; the values are all that they hold, if none are given."""
        given = GivenEvidence(text=self.evidence) if isinstance(self.evidence, str) else self.evidence
        lines = [given.text] if given.text else []
        if self.gold:
            lines += ["Calls that solve the task, in order:"]
            lines += [
                f"{i}. {c.name} {json.dumps(c.arguments, ensure_ascii=False)}" for i, c in enumerate(self.gold, 1)
            ]
        if self.answer is not None:
            lines.append(f"Answer at the end: {self.answer}")
        found = [v for c in self.gold or () for v in _leaves(c.arguments)] + ([self.answer] if self.answer else [])
        return Evidence("\n".join(lines), tuple(dict.fromkeys(given.values or found)))


@functools.lru_cache(maxsize=32)
def load(path: str) -> dict[str, Record]:
    """Tasks of a file by id, in its order. Raises ValueError: one line that names file and place."""
    records: dict[str, Record] = {}
    for place, value in _values(path):
        try:
            record = Record.model_validate(value)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}: {place}: {where + ': ' if where else ''}{first['msg']}") from None
        if record.id in records:
            raise ValueError(f"{path}: {place}: the id {record.id} is there twice")
        records[record.id] = record
    return records


def _values(path: str) -> Iterable[tuple[str, Any]]:
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if pathlib.Path(path).suffix in (".yaml", ".yml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
        if not isinstance(values, list):
            raise ValueError(f"{path}: holds no list of tasks")
        yield from ((f"task {i}", value) for i, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: not JSON: {error}") from None


def _leaves(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool) and str(value).strip():
        yield str(value)
