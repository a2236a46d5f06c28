"""AMap's web service: place text search, around search and driving direction, v3 and v5.

https://lbs.amap.com/api/webservice/summary. Every answer has HTTP status 200; `status` "0" is an error and `infocode`
says which. Coordinates are "lon,lat" in GCJ-02, which is the datum of a whole episode; an empty field is [].
"""

import json
from collections.abc import Sequence
from typing import Any

from envs.navigation.config import AMapConfig
from envs.navigation.services.request import Found, Key, Request, Road, ServiceError, Transient, refusal, text
from envs.navigation.tools import ArgumentError, Point, Words

NAME = "AMap"
KEY = Key("key", "AMAP_KEY", required=True)
MAX_RADIUS_KM = 50.0
MAX_WAYPOINTS = 16
WORDS = Words(matches="the best matches", region="City or district to search in.")

# https://lbs.amap.com/api/webservice/guide/tools/info. Codes that are not here mean that key or request are not set up.
REFUSED = {
    "20000": "invalid parameters",
    "20001": "a parameter is missing",
    "20011": "there is no map of places abroad",
    "20012": "this cannot be searched for",
    "20800": "a point lies outside the map",
    "20801": "no road is near a point",
    "20802": "no route",
    "20803": "the route is too long",
}
QUOTA = {"10003", "10010", "10029", "10044", "10045", "40000", "40001", "40002", "40003"}
TOO_FAST = {"10004", "10014", "10019", "10020", "10021"}
BUSY = {"10015", "10016", "10017", "20003"}  # and 3xxxx, the engine's errors
KEY_CODES = {"10001", "10002", "10005", "10006", "10007", "10008", "10009", "10012", "10013", "10026", "10041"}


class AMap:
    """Requests to AMap."""

    words = WORDS

    def __init__(self, config: AMapConfig):
        self._url, self._v5 = f"{config.url}/{config.version}", config.version == "v5"

    def search(self, keyword: str, region: str | None, limit: int) -> Request:
        """Places of that name, within a city only if `region` names one."""
        city, only = ("region", "city_limit") if self._v5 else ("city", "citylimit")
        where = [] if region is None else [(city, region), (only, "true")]
        return self._places("text", [("keywords", keyword), *where], limit)

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> Request:
        """Places of that name around a point, the nearest first."""
        if radius_km > MAX_RADIUS_KM:
            raise ArgumentError(f"radius must be at most {MAX_RADIUS_KM:g} km on this map")
        radius = max(1, round(1000 * radius_km))
        around = [("location", _point((latitude, longitude))), ("radius", str(radius)), ("sortrule", "distance")]
        return self._places("around", [("keywords", keyword), *around], limit)

    def route(self, points: Sequence[Point]) -> Request:
        """The way to drive through the points."""
        origin, *stops, destination = map(_point, points)
        if len(stops) > MAX_WAYPOINTS:
            raise ArgumentError(f"waypoints must be at most {MAX_WAYPOINTS} on this map")
        params = [("origin", origin), ("destination", destination)]
        params += [("waypoints", ";".join(stops))] if stops else []
        params += [("show_fields", "cost")] if self._v5 else [("extensions", "base")]
        return Request(NAME, f"{self._url}/direction/driving", tuple(params), KEY, _read_road)

    def _places(self, what: str, params: list[tuple[str, str]], limit: int) -> Request:
        size = str(limit)
        paging = (
            [("page_size", size), ("page_num", "1")]
            if self._v5
            else [("offset", size), ("page", "1"), ("extensions", "base")]
        )
        return Request(NAME, f"{self._url}/place/{what}", (*params, *paging), KEY, _read_places)


def _point(point: Point) -> str:
    latitude, longitude = point
    return f"{longitude:.6f},{latitude:.6f}"


def _read_places(status: int, body: str) -> list[Found]:
    found = []
    for row in _checked(status, body).get("pois") or []:
        longitude, _, latitude = text(row.get("location")).partition(",")
        if latitude and text(row.get("name")):
            region = text(row.get("cityname")) or text(row.get("pname"))
            found.append(Found(text(row["name"]), region, float(latitude), float(longitude)))
    return found


def _read_road(status: int, body: str) -> Road:
    route = _checked(status, body).get("route") or {}
    if not (paths := route.get("paths")):
        raise refusal(REFUSED["20802"])
    cost = paths[0].get("cost") or paths[0]  # v5 has the duration there
    return Road(float(paths[0]["distance"]), float(cost["duration"]))


def _checked(status: int, body: str) -> dict[str, Any]:
    """The answer; otherwise the error that its infocode stands for."""
    answer = json.loads(body)
    code, said = text(answer["infocode"]), text(answer["info"])
    if status == 200 and answer["status"] == "1":
        return answer
    if code in REFUSED:
        raise refusal(REFUSED[code])
    if code in TOO_FAST:
        # AMap asks for no wait. 10004 ends with the minute, the others with the second: at the default backoff of 0.5 s
        # the first retry comes after 30 s, of the others after 1 s.
        backoffs = 60.0 if code == "10004" else 2.0
        raise Transient(f"{code} {said}; lower env.amap.rate", kind="quota", backoffs=backoffs)
    if code in BUSY or code.startswith("3"):
        raise Transient(f"{code} {said}")
    kind = "quota" if code in QUOTA else "key" if code in KEY_CODES else "setup"
    raise ServiceError(kind, f"{NAME}: {code} {said}")
