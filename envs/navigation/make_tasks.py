"""Writes task files (task_file.py) to standard output.

    python -m envs.navigation.make_tasks write train_tasks=20 test_tasks=5 > tasks.jsonl
    python -m envs.navigation.make_tasks resolve tasks_file=tasks.jsonl map=osm osm.language=en > osm_tasks.jsonl

`write` gives the tasks that Navigation generates on the embedded map for these keys of `env:`. `resolve` looks the
places of a file up on another map: a place becomes the first result of its name within `NEAR_KM` of the location that
the file has, with that map's coordinates. A task is left out, and counted by reason, if a place is not found, or needs
its region where the request does not name it. It asks the service once or twice for each place.
"""

import argparse
import asyncio
import collections
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import yaml

from envs.base import EnvironmentError
from envs.navigation.config import NavigationConfig
from envs.navigation.environment import Navigation
from envs.navigation.map import Place, coordinates, distance_km, fold
from envs.navigation.services import ServiceMap
from envs.navigation.task_file import PlaceRow, TaskRow, dump, read
from envs.navigation.tasks import SPLITS
from envs.navigation.tools import ArgumentError, point

NEAR_KM = 25.0  # two maps that mean the same place put it this near


class _NotUsable(Exception):
    pass


def generated(config: NavigationConfig) -> Iterator[TaskRow]:
    """The generated tasks of all splits. Raises ValueError for keys that a file cannot stand for."""
    if config.map != "embedded" or config.tasks_file or config.random_coordinates or config.random_names:
        raise ValueError("write takes neither map, tasks_file, random_coordinates nor random_names")
    map = Navigation.make_map(config)
    for split in SPLITS:
        for task in Navigation.tasks(config, split):
            places = [map.place(i) for i in task.data["places"]]
            rows = tuple(_row(p, len(map.named(p.name)) > 1, map.decimals) for p in places)
            yield TaskRow(id=task.id, split=split, kind=task.kind, request=task.data["request"], places=rows)


async def resolved(config: NavigationConfig, dropped: collections.Counter[str]) -> list[TaskRow]:
    """The tasks of `config.tasks_file` with the service's coordinates; what is left out is counted in `dropped`."""
    if config.map == "embedded" or not config.tasks_file:
        raise ValueError("resolve needs tasks_file, and map=amap or map=osm")
    Navigation.check(config)
    map = Navigation.make_map(config)
    rows = []
    for row in read(pathlib.Path(config.tasks_file)):
        try:
            places = tuple([await _resolve(p, row.request, map, config.candidates) for p in row.places])
            rows.append(row.model_copy(update={"places": places}))
        except _NotUsable as reason:
            dropped[str(reason)] += 1
    return rows


async def _resolve(row: PlaceRow, request: str, map: ServiceMap, candidates: int) -> PlaceRow:
    """The place on the service; by name alone where that finds it."""
    near = point(row.location, row.name)
    for ambiguous in (False, True):
        if ambiguous and (not row.region or row.region not in request):
            raise _NotUsable("needs its region, which the request does not name")
        region = row.region if ambiguous else None
        try:
            found = await map.complete(lambda r=region: map.search(row.name, r, candidates))
        except ArgumentError:
            raise _NotUsable("the service refuses the search") from None
        for place in found:
            if fold(place.name) == fold(row.name) and distance_km(*near, place.latitude, place.longitude) <= NEAR_KM:
                return row.model_copy(update={"location": coordinates(place, map.decimals), "ambiguous": ambiguous})
    raise _NotUsable("a place is not found")


def _row(place: Place, ambiguous: bool, decimals: int) -> PlaceRow:
    return PlaceRow(name=place.name, region=place.region, location=coordinates(place, decimals), ambiguous=ambiguous)


def parse(keys: Sequence[str]) -> NavigationConfig:
    """Keys of `env:` as key=value with dots, values in YAML. Raises ValueError."""
    nested: dict[str, Any] = {}
    for pair in keys:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair}: give keys as key=value")
        section = nested
        for part in key.split(".")[:-1]:
            section = section.setdefault(part, {})
        section[key.split(".")[-1]] = yaml.safe_load(value)
    try:
        return NavigationConfig.model_validate_json(json.dumps(nested), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), said)))) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with one line where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m envs.navigation.make_tasks", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("write", "resolve"))
    parser.add_argument("keys", nargs="*", metavar="key=value", help="keys of env:")
    given = parser.parse_args(arguments)
    dropped: collections.Counter[str] = collections.Counter()
    try:
        config = parse(given.keys)
        rows = generated(config) if given.what == "write" else asyncio.run(resolved(config, dropped))
        for row in rows:
            print(dump(row))
    except (ValueError, yaml.YAMLError, EnvironmentError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    for reason, count in dropped.items():
        print(f"left out {count}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
