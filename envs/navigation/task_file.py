"""Tasks with their gold places from a JSONL file, one task a line:

    {"id": "test/0", "split": "test", "kind": "hard", "request": "Drive from Salem, Ohio to Vandalia.",
     "places": [{"name": "Salem", "region": "Ohio", "location": "40.90089,-80.85675", "ambiguous": true},
                {"name": "Vandalia", "region": "Illinois", "location": "38.96060,-89.09368", "ambiguous": false}]}

The places are those of the request in its order. `location` is what a search on the map at hand shows, as "lat,lon";
`ambiguous` is whether the gold search names the region because the name alone does not find the place. Of a task only
the request and the numbers of its places are known to the run: coordinates stay here, on the reward's side.
"""

import collections
import functools
import json
import pathlib
from collections.abc import Sequence

import pydantic

from envs.base import Task
from envs.navigation.map import Place, fold
from envs.navigation.tools import ArgumentError, point


class PlaceRow(pydantic.BaseModel):
    """A place of a task."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field(min_length=1, pattern=r"^[^|\n]*$")  # the evidence has a place in a line, fields by |
    region: str = pydantic.Field("", pattern=r"^[^|\n]*$")
    location: str  # "lat,lon"
    ambiguous: bool = True


class TaskRow(pydantic.BaseModel):
    """A line of the file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    id: str = pydantic.Field(min_length=1)
    split: str
    kind: str = "task"
    request: str = pydantic.Field(min_length=1)
    places: tuple[PlaceRow, ...] = pydantic.Field(min_length=2)

    @pydantic.model_validator(mode="after")
    def _check(self):
        names = collections.Counter(fold(p.name) for p in self.places)
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"two places are named {twice[0]}")
        if without := [p.name for p in self.places if p.ambiguous and not p.region]:
            raise ValueError(f"{without[0]} is ambiguous and has no region")
        return self


class TaskFile:
    """The tasks of a file and their places, coordinates rounded to `decimals`.

    Attributes:
      places: every place, at the index that is its id. ambiguous: ids of those whose search names the region.
      longest: number of places of the longest task.
    """

    def __init__(self, rows: Sequence[TaskRow], decimals: int):
        known: dict[PlaceRow, Place] = {}
        self._tasks: dict[str, list[Task]] = {}
        for row in rows:
            for p in row.places:
                known.setdefault(p, _place(len(known), p, decimals))
            data = {"request": row.request, "family": "file", "places": tuple(known[p].id for p in row.places)}
            self._tasks.setdefault(row.split, []).append(Task(row.id, row.kind, data))
        self.places = tuple(known.values())
        self.ambiguous = frozenset(place.id for p, place in known.items() if p.ambiguous)
        self.longest = max(len(row.places) for row in rows)

    def place(self, place_id: int) -> Place:
        return self.places[place_id]

    def split(self, name: str) -> Sequence[Task]:
        """Raises ValueError for a split that the file does not have."""
        if name not in self._tasks:
            raise ValueError(f"unknown split {name!r}; env.tasks_file has {', '.join(self._tasks)}")
        return self._tasks[name]


def load(path: str, decimals: int) -> TaskFile:
    """The tasks of a file, one object per process for equal arguments. Raises ValueError, in one line."""
    file = pathlib.Path(path)
    try:
        return _load(file, decimals, file.stat().st_mtime_ns)
    except OSError as error:
        raise ValueError(f"env.tasks_file={path}: {error.strerror}") from None


@functools.lru_cache(maxsize=8)
def _load(path: pathlib.Path, decimals: int, _changed: int) -> TaskFile:
    return TaskFile(read(path), decimals)


def read(path: pathlib.Path) -> list[TaskRow]:
    """The rows of a file. Raises ValueError that names the line."""
    rows, seen = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = TaskRow.model_validate_json(line, strict=True)
            for p in row.places:
                point(p.location, f"location of {p.name}")
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            where, said = ".".join(map(str, first["loc"])) or "task", first["msg"].removeprefix("Value error, ")
            raise ValueError(f"env.tasks_file={path}, line {number}: {where}: {said}") from None
        except ArgumentError as error:
            raise ValueError(f"env.tasks_file={path}, line {number}: {error}") from None
        if row.id in seen:
            raise ValueError(f"env.tasks_file={path}, line {number}: the id {row.id!r} occurs twice")
        seen.add(row.id)
        rows.append(row)
    if not rows:
        raise ValueError(f"env.tasks_file={path} has no tasks")
    return rows


def dump(row: TaskRow) -> str:
    """A line of a file."""
    return json.dumps(row.model_dump(), ensure_ascii=False)


def _place(number: int, row: PlaceRow, decimals: int) -> Place:
    latitude, longitude = (round(degrees, decimals) + 0.0 for degrees in point(row.location, "location"))
    return Place(number, row.name, row.region, latitude, longitude, 0)
