"""The three tools: their schemas, the check of their arguments and their answers, in full and in short form."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.navigation.map import Map, Place, Roads, coordinates, distance_km

MAX_KEYWORD = 200  # characters
MAX_STOPS = 50
NUMBER = r"[+-]?[0-9]{1,3}(?:\.[0-9]{0,12})?"
COORDINATES = re.compile(rf"\s*\(?\s*({NUMBER})\s*,\s*({NUMBER})\s*\)?\s*", re.ASCII)

Point = tuple[float, float]  # latitude, longitude in degrees


class ArgumentError(Exception):
    """The policy called a tool wrongly; the text goes back to it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A tool's answer: its text, the places it shows and, for `direction`, the route that was asked for."""

    text: str
    shown: tuple[Place, ...] = ()
    route: tuple[Point, ...] | None = None


class Words(NamedTuple):
    """What the schemas say of the map at hand."""

    matches: str
    region: str


EMBEDDED = Words(matches="the most populous matches", region="State (US) or country to search in.")
_POINT = {"type": "string", "description": 'Exact coordinates as "lat,lon", as a search returned them.'}
_FULL = {
    "search_places": (
        "Search the map for places by name. Returns {matches} with their coordinates. "
        "A name may exist in several regions: give the region to search there only.",
        {
            "keyword": {"type": "string", "description": "Name of the place, without its region."},
            "region": {"type": "string"},  # described by `Words`
        },
        ["keyword"],
    ),
    "search_around": (
        "Search for places of a name within a radius of a location, the nearest first.",
        {
            "location": _POINT,
            "keyword": {"type": "string", "description": "Name of the place."},
            "radius": {"type": "number", "description": "Radius in kilometres."},
        },
        ["location", "keyword", "radius"],
    ),
    "direction": (
        "Get the driving route. This is the final answer and ends the task.",
        {
            "origin": _POINT,
            "waypoints": {"type": "array", "items": {"type": "string"}, "description": "Stops in order, as lat,lon."},
            "destination": _POINT,
        },
        ["origin", "destination"],
    ),
}


def schemas(style: str, words: Words = EMBEDDED) -> list[dict[str, Any]]:
    """Tools in OpenAI format; the short style has names and argument names only."""
    return [_full_schema(name, words) if style == "full" else _short_schema(name) for name in _FULL]


def _full_schema(name: str, words: Words) -> dict[str, Any]:
    description, properties, required = _FULL[name]
    description = description.format(matches=words.matches)
    if "region" in properties:
        properties = properties | {"region": {"type": "string", "description": words.region}}
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _short_schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {} for argument in _FULL[name][1]}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Toolbox:
    """Runs calls on a map; holds nothing that changes, so that any number of episodes can share it."""

    def __init__(self, map: Map, candidates: int, style: str):
        self.map, self._candidates, self._style = map, candidates, style

    def run(self, name: str, arguments: Any) -> Result:
        """The answer to a call.

        Raises:
          ArgumentError: with a text for the policy. On a map service also what its look-ups raise; else nothing.
        """
        if name not in _FULL:
            raise ArgumentError(f"unknown tool; the tools are {', '.join(_FULL)}")
        if not isinstance(arguments, Mapping):
            raise ArgumentError("arguments must be an object")
        _, properties, required = _FULL[name]
        if unknown := [str(a)[:40] for a in arguments if a not in properties]:
            raise ArgumentError(f"unknown argument {unknown[0]}; {name} takes {', '.join(properties)}")
        if missing := [a for a in required if a not in arguments]:
            raise ArgumentError(f"argument {missing[0]} is missing")
        return getattr(self, f"_{name}")(arguments)

    def _search_places(self, arguments: Mapping[str, Any]) -> Result:
        region = None if arguments.get("region") in (None, "") else _text(arguments, "region")
        return self._places(self.map.search(_text(arguments, "keyword"), region, self._candidates))

    def _search_around(self, arguments: Mapping[str, Any]) -> Result:
        radius = arguments["radius"]
        if isinstance(radius, bool) or not isinstance(radius, int | float) or not 0 < radius < math.inf:
            raise ArgumentError("radius must be a positive number of kilometres")
        lat, lon = point(arguments["location"], "location")
        keyword = _text(arguments, "keyword")
        return self._places(self.map.around(lat, lon, keyword, float(min(radius, 1e5)), self._candidates))

    def _direction(self, arguments: Mapping[str, Any]) -> Result:
        stops = arguments.get("waypoints")
        if stops is not None and not isinstance(stops, list | tuple):
            raise ArgumentError("waypoints must be a list of coordinates")
        if len(stops or ()) > MAX_STOPS:
            raise ArgumentError(f"waypoints has more than {MAX_STOPS} entries")
        named = [("origin", arguments["origin"]), *(("waypoints", s) for s in stops or ())]
        route = tuple(point(value, name) for name, value in [*named, ("destination", arguments["destination"])])
        return Result(self._route_text(route), route=route)

    def _places(self, places: Sequence[Place]) -> Result:
        if not places:
            return Result("No results." if self._style == "short" else "[]")
        rows = [(p.name, p.region, coordinates(p, self.map.decimals)) for p in places]
        if self._style == "short":
            text = "\n".join(" | ".join(row) for row in rows)
        else:
            text = json.dumps(
                [dict(zip(("name", "region", "location"), r, strict=True)) for r in rows], ensure_ascii=False
            )
        return Result(text, tuple(places))

    def _route_text(self, route: tuple[Point, ...]) -> str:
        if self._style == "short":
            return "Done."
        if isinstance(self.map, Roads):
            road = self.map.route(route)
            numbers = {"distance_km": round(road.distance / 1000, 1), "duration_min": round(road.duration / 60)}
            return json.dumps({"status": "ok"} | numbers)
        length = sum(distance_km(*a, *b) for a, b in zip(route, route[1:], strict=False))
        return json.dumps({"status": "ok", "straight_line_km": round(length, 1)})


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments[name]
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{name} must be a text")
    if len(value) > MAX_KEYWORD:
        raise ArgumentError(f"{name} is longer than {MAX_KEYWORD} characters")
    return value


def point(value: Any, name: str) -> Point:
    found = COORDINATES.fullmatch(value) if isinstance(value, str) else None
    lat, lon = map(float, found.groups()) if found else (math.inf, math.inf)
    if abs(lat) > 90 or abs(lon) > 180:
        raise ArgumentError(f'{name} must be coordinates "lat,lon"')
    return lat, lon
