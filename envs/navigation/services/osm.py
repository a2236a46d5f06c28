"""OpenStreetMap: Nominatim's search and OSRM's route service.

https://nominatim.org/release-docs/latest/api/Search/ and
https://github.com/Project-OSRM/osrm-backend/blob/master/docs/http.md. Search around a point is Nominatim's search in a
bounded viewbox: the box holds the circle, what lies outside the circle is dropped, and the nearest comes first.
Nominatim ranks by importance, so among more than `AROUND` matches in the box the nearest may be missing.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from envs.navigation.config import MOST_RESULTS, OSMConfig
from envs.navigation.map import EARTH_RADIUS_KM
from envs.navigation.services.request import Found, Key, Request, Road, ServiceError, refusal, text
from envs.navigation.tools import Point, Words

AROUND = MOST_RESULTS["osm"]
WORDS = Words(matches="the best matches", region="State, county or country to search in.")
# OSRM's codes that depend on the points alone. The others mean a wrong URL or profile: the points are checked before.
REFUSED = {"NoRoute": "no route", "NoSegment": "no road is near a point", "TooBig": "too many points"}


class OSM:
    """Requests to Nominatim and OSRM.

    Args:
      countries: ISO codes that searches are limited to; none = the whole world.
    """

    words = WORDS

    def __init__(self, config: OSMConfig, countries: Sequence[str]):
        self._config = config
        self._search_key = Key(config.nominatim_key_parameter, "NOMINATIM_KEY", required=False)
        self._route_key = Key(config.osrm_key_parameter, "OSRM_KEY", required=False)
        self._one_country = len(countries) == 1
        self._always = [("format", "jsonv2"), ("addressdetails", "1"), ("accept-language", config.language)]
        self._always += [("countrycodes", ",".join(c.lower() for c in countries))] if countries else []
        self._always += [("featureType", config.feature_type)] if config.feature_type else []

    def search(self, keyword: str, region: str | None, limit: int) -> Request:
        """Places of that name, of a region if it is given."""
        return self._places([("q", f"{keyword}, {region}" if region else keyword)], limit)

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> Request:
        """Places of that name in the box around a circle; `limit` is not passed on, as the nearest are chosen later."""
        box = ",".join(f"{x:.6f}" for x in _box(latitude, longitude, radius_km))
        return self._places([("q", keyword), ("viewbox", box), ("bounded", "1")], AROUND)

    def route(self, points: Sequence[Point]) -> Request:
        """The way to drive through the points."""
        way = ";".join(f"{lon:.7f},{lat:.7f}" for lat, lon in points)
        url = f"{self._config.osrm_url}/route/v1/{self._config.profile}/{way}"
        return Request("OSRM", url, (("overview", "false"),), self._route_key, _read_road)

    def _places(self, params: list[tuple[str, str]], limit: int) -> Request:
        params += [("limit", str(limit)), *self._always]
        return Request(
            "Nominatim", f"{self._config.nominatim_url}/search", tuple(params), self._search_key, self._read_places
        )

    def _read_places(self, status: int, body: str) -> list[Found]:
        answer = json.loads(body)
        if status == 400:
            raise refusal(answer["error"]["message"][:200])
        return [
            Found(_name(row), self._region(row.get("address") or {}), float(row["lat"]), float(row["lon"]))
            for row in answer
            if _name(row)
        ]

    def _region(self, address: dict[str, Any]) -> str:
        """State, and country where there may be several."""
        state, country = text(address.get("state")), text(address.get("country"))
        return (state or country) if self._one_country else ", ".join(filter(None, (state, country)))


def _name(row: dict[str, Any]) -> str:
    return text(row.get("name")) or text(row.get("display_name")).partition(",")[0]


def _box(latitude: float, longitude: float, radius_km: float) -> tuple[float, float, float, float]:
    """(west, south, east, north) of a box that holds the circle; all longitudes if it meets a pole or the date line."""
    angle = math.degrees(radius_km / EARTH_RADIUS_KM)
    south, north = max(-90.0, latitude - angle), min(90.0, latitude + angle)
    if abs(latitude) + angle >= 90:
        return -180.0, south, 180.0, north
    half = math.degrees(math.asin(math.sin(math.radians(angle)) / math.cos(math.radians(latitude))))
    west, east = longitude - half, longitude + half
    return (west, south, east, north) if -180 <= west and east <= 180 else (-180.0, south, 180.0, north)


def _read_road(status: int, body: str) -> Road:
    answer = json.loads(body)
    code = answer["code"]
    if code == "Ok":
        return Road(float(answer["routes"][0]["distance"]), float(answer["routes"][0]["duration"]))
    if code in REFUSED:
        raise refusal(REFUSED[code])
    raise ServiceError("setup", f"OSRM: {code}: {text(answer.get('message'))[:200]}")
