"""The map that Navigation plays on: an interface, its records and the little geometry they need.

The embedded map is gazetteer.py. A map service is another class with these methods; `RandomCoordinates` is a view of
any map whose coordinates belong to one episode only, so that a policy must copy what a search shows.
"""

import dataclasses
import functools
import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

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
