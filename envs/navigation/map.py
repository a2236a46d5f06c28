"""The map that Navigation plays on: an interface, its records and the little geometry they need.

The embedded map is gazetteer.py. A map service is another class with these methods; `RandomCoordinates` and
`InventedNames` are views of any map whose coordinates and names belong to one episode only, so that a policy must copy
what it reads.
"""

import dataclasses
import functools
import hashlib
import math
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

EARTH_RADIUS_KM = 6371.0
ABBREVIATIONS = {"st": "saint", "ft": "fort", "mt": "mount"}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A populated place. Coordinates in degrees, already rounded to the map's decimals."""

    id: int
    name: str
    region: str
    latitude: float
    longitude: float
    population: int


class Map(Protocol):
    """What the environment and the task generator ask of a map. Names and regions match after `fold`."""

    decimals: int
    places: Sequence[Place]

    def place(self, place_id: int) -> Place:
        """The place of that id; KeyError if there is none."""

    def named(self, keyword: str) -> Sequence[Place]:
        """All places of that name, the most populous first."""

    def search(self, keyword: str, region: str | None, limit: int) -> list[Place]:
        """The first `limit` places of that name, of one region if it is given."""

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> list[Place]:
        """Places of that name within the radius, the nearest first."""

    def share_keyword(self, a: Place, b: Place) -> bool:
        """True if one keyword finds both places."""


class Road(Protocol):
    """A driving route: metres and seconds."""

    distance: float
    duration: float


@runtime_checkable
class Roads(Protocol):
    """What a map may have beside `Map`: `direction` then answers with the road, not with the straight line."""

    def route(self, points: Sequence[tuple[float, float]]) -> Road:
        """The driving route through points (latitude, longitude)."""


@functools.lru_cache(maxsize=1 << 16)
def fold(text: str) -> str:
    """The form in which names are compared: no case, accents or punctuation; "St." is "Saint"."""
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    letters = "".join(c for c in decomposed if not unicodedata.combining(c) and c not in "'’ʻ`")
    return " ".join(ABBREVIATIONS.get(w, w) for w in re.findall(r"[^\W_]+", letters))


def distance_km(a_lat: float, a_lon: float, b_lat: float, b_lon: float) -> float:
    """Great-circle distance by the haversine formula; degrees in, kilometres out."""
    phi, psi = math.radians(a_lat), math.radians(b_lat)
    half_lat, half_lon = (psi - phi) / 2, math.radians(b_lon - a_lon) / 2
    h = math.sin(half_lat) ** 2 + math.cos(phi) * math.cos(psi) * math.sin(half_lon) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(h)))


def nearest(places: Iterable[Place], latitude: float, longitude: float, radius_km: float, limit: int) -> list[Place]:
    """The `limit` places nearest to the point, none farther than the radius."""
    ranked = sorted((distance_km(latitude, longitude, p.latitude, p.longitude), p.id, p) for p in places)
    return [p for d, _, p in ranked[:limit] if d <= radius_km]


def coordinates(place: Place, decimals: int) -> str:
    """The one spelling of a place's coordinates in results, requests and evidence: "lat,lon"."""
    return f"{place.latitude:.{decimals}f},{place.longitude:.{decimals}f}"


class RandomCoordinates:
    """A view of `map` in which each place has coordinates that only `seed` determines.

    Latitude and longitude are those of two other places, so each number is as likely as on the real map and says
    nothing about the place. Copying can then be learned and memory is of no use; meant for warm-start data.
    """

    def __init__(self, map: Map, seed: int):
        self._map, self._seed = map, seed
        self.decimals = map.decimals

    @property
    def places(self) -> Sequence[Place]:
        return [self._moved(p) for p in self._map.places]

    def _moved(self, place: Place) -> Place:
        digest = hashlib.blake2b(f"{self._seed}/{place.id}".encode(), digest_size=16).digest()
        real = self._map.places
        lat = real[int.from_bytes(digest[:8], "big") % len(real)].latitude
        lon = real[int.from_bytes(digest[8:], "big") % len(real)].longitude
        return dataclasses.replace(place, latitude=lat, longitude=lon)

    def place(self, place_id: int) -> Place:
        return self._moved(self._map.place(place_id))

    def named(self, keyword: str) -> Sequence[Place]:
        return [self._moved(p) for p in self._map.named(keyword)]

    def search(self, keyword: str, region: str | None, limit: int) -> list[Place]:
        return [self._moved(p) for p in self._map.search(keyword, region, limit)]

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> list[Place]:
        return nearest(self.named(keyword), latitude, longitude, radius_km, limit)

    def share_keyword(self, a: Place, b: Place) -> bool:
        return self._map.share_keyword(a, b)


class InventedNames:
    """A view of `map` in which some names are others; meant for warm-start data, like `RandomCoordinates`.

    Args:
      names: the new name of each name that is replaced, wherever it occurs.
    """

    def __init__(self, map: Map, names: Mapping[str, str]):
        self._map, self.decimals = map, map.decimals
        self._new = {fold(old): new for old, new in names.items()}
        self._old = {fold(new): old for old, new in names.items()}

    @property
    def places(self) -> Sequence[Place]:
        return self._renamed(self._map.places)

    def _renamed(self, places: Iterable[Place]) -> list[Place]:
        return [dataclasses.replace(p, name=self._new.get(fold(p.name), p.name)) for p in places]

    def _keyword(self, keyword: str) -> str:
        return self._old.get(fold(keyword), keyword)

    def place(self, place_id: int) -> Place:
        return self._renamed([self._map.place(place_id)])[0]

    def named(self, keyword: str) -> Sequence[Place]:
        return self._renamed(self._map.named(self._keyword(keyword)))

    def search(self, keyword: str, region: str | None, limit: int) -> list[Place]:
        return self._renamed(self._map.search(self._keyword(keyword), region, limit))

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> list[Place]:
        return self._renamed(self._map.around(latitude, longitude, self._keyword(keyword), radius_km, limit))

    def share_keyword(self, a: Place, b: Place) -> bool:
        return self._map.share_keyword(a, b)


def invent_name(map: Map, rng: random.Random) -> str:
    """A name that no place of the map has, pieced together from two that places have."""
    while True:
        first, second = (rng.choice(map.places).name for _ in range(2))
        if rng.random() < 0.3:
            name = f"{first.split()[0]} {second.split()[-1]}"
        else:
            name = first[: rng.randint(2, max(2, len(first) - 1))] + second[-rng.randint(2, max(2, len(second) - 1)) :]
        if len(name) <= 20 and all(w.isalpha() and w[0].isupper() for w in name.split(" ")) and not map.named(name):
            return name
