"""Local servers that answer as AMap, Nominatim and OSRM do, in those services' documented formats.

https://lbs.amap.com/api/webservice/guide/api/search, .../api-advanced/newpoisearch, .../api/direction,
https://nominatim.org/release-docs/latest/api/Output/, https://github.com/Project-OSRM/osrm-backend/blob/master/docs/http.md
"""

import http.server
import json
import threading
import urllib.parse

from envs.navigation.map import distance_km, fold

AMAP_KEY = "0123456789abcdef-secret"
# name, city or state, province or country, latitude and longitude as the service writes them; the best match first
AMAP_PLACES = (
    ("人民公园", "成都市", "四川省", "30.657424", "104.057137"),
    ("人民公园", "上海市", "上海市", "31.232781", "121.473301"),
    ("人民公园", "天津市", "天津市", "39.115070", "117.206050"),
    ("故宫博物院", "北京市", "北京市", "39.917840", "116.397029"),
    ("南京南站", "南京市", "江苏省", "31.968790", "118.797400"),
)
OSM_PLACES = (
    ("Springfield", "Illinois", "United States", "39.7990175", "-89.6439575"),
    ("Springfield", "Missouri", "United States", "37.2081729", "-93.2922715"),
    ("Springfield", "Ohio", "United States", "39.9242266", "-83.8088171"),
    ("Vandalia", "Illinois", "United States", "38.9605969", "-89.0936762"),
    ("Salem", "Ohio", "United States", "40.9008915", "-80.8567538"),
)


class Server:
    """A server on localhost.

    Attributes:
      requests: (path, parameters, headers) of every request. script: answers that the next requests get instead:
        (HTTP status, body, headers), where a body that is no string becomes JSON.
    """

    def __init__(self, places):
        self.places, self.requests, self.script, self.gate = places, [], [], None
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def named(self, keyword, region=None, near=None):
        rows = [r for r in self.places if fold(r[0]) == fold(keyword) and (region is None or region in r[1:3])]
        if near:
            latitude, longitude, radius = near
            away = {r: distance_km(latitude, longitude, float(r[3]), float(r[4])) for r in rows}
            rows = sorted((r for r in rows if away[r] <= radius), key=away.get)
        return rows


class AMapServer(Server):
    """AMap's web service: HTTP 200 always, errors as status "0", coordinates as "lon,lat", empty fields as []."""

    def __init__(self, places=AMAP_PLACES):
        super().__init__(places)

    def answer(self, path, query):
        if query.get("key") != AMAP_KEY:
            return 200, amap_error("10001", "INVALID_USER_KEY")
        version, service, kind = path.strip("/").split("/")
        v5 = version == "v5"
        if service == "place":
            size = int(query["page_size" if v5 else "offset"])
            if not 1 <= size <= 25:
                return 200, amap_error("20000", "INVALID_PARAMS")
            city, only = ("region", "city_limit") if v5 else ("city", "citylimit")
            region = query.get(city) if query.get(only) == "true" else None
            near = None
            if kind == "around":
                longitude, latitude = map(float, query["location"].split(","))
                near = latitude, longitude, int(query["radius"]) / 1000
            rows = self.named(query["keywords"], region, near)
            pois = [self._poi(i, row, v5) for i, row in enumerate(rows[:size])]
            return 200, _ok(pois=pois) if v5 else _ok(pois=pois, suggestion={"keywords": [], "cities": []})
        points = [query["origin"], *filter(None, query.get("waypoints", "").split(";")), query["destination"]]
        cost = {"duration": str(600 * len(points))}
        path = {"distance": str(10000 * len(points)), "steps": [], **({"cost": cost} if v5 else cost)}
        return 200, _ok(route={"origin": points[0], "destination": points[-1], "taxi_cost": "10", "paths": [path]})

    @staticmethod
    def _poi(number, row, v5):
        name, city, province, latitude, longitude = row
        poi = {"id": f"B00{number}", "name": name, "location": f"{longitude},{latitude}", "type": "风景名胜"}
        poi |= {"pname": province, "cityname": city, "adname": [], "address": []}
        return poi | ({"parent": ""} if v5 else {"tel": [], "distance": [], "biz_ext": {"rating": []}})


def _ok(**fields):
    return {"status": "1", "count": str(len(fields.get("pois", [1]))), "info": "OK", "infocode": "10000", **fields}


def amap_error(code, info):
    return {"status": "0", "info": info, "infocode": code}


class OSMServer(Server):
    """Nominatim (/search) and OSRM (/route/v1/driving/...)."""

    def __init__(self, places=OSM_PLACES):
        super().__init__(places)

    def answer(self, path, query):
        if path.startswith("/route/v1/"):
            return self._route(path)
        if not query.get("q", "").strip():
            return 400, {"error": {"code": 400, "message": "Nothing to search for."}}
        keyword, _, region = query["q"].partition(", ")
        rows = self.named(keyword, region or None)
        if query.get("bounded") == "1":
            west, south, east, north = map(float, query["viewbox"].split(","))
            rows = [r for r in rows if south <= float(r[3]) <= north and west <= float(r[4]) <= east]
        return 200, [self._place(i, row) for i, row in enumerate(rows[: int(query["limit"])])]

    @staticmethod
    def _place(number, row):
        name, state, country, latitude, longitude = row
        return {
            "place_id": 100 + number,
            "licence": "Data © OpenStreetMap contributors, ODbL 1.0. http://osm.org/copyright",
            "osm_type": "relation",
            "osm_id": 1000 + number,
            "lat": latitude,
            "lon": longitude,
            "category": "boundary",
            "type": "administrative",
            "place_rank": 16,
            "importance": 0.6,
            "addresstype": "city",
            "name": name,
            "display_name": f"{name}, {state}, {country}",
            "address": {"city": name, "state": state, "country": country, "country_code": "us"},
            "boundingbox": ["39.6", "39.9", "-89.8", "-89.5"],
        }

    @staticmethod
    def _route(path):
        points = path.rpartition("/")[2].split(";")
        if any(float(p.split(",")[0]) > 100 for p in points):
            return 400, {"code": "NoRoute", "message": "Impossible route between points"}
        leg = {"steps": [], "distance": 10000.0, "duration": 600.0, "summary": "", "weight": 600.0}
        route = {"legs": [leg] * (len(points) - 1), "distance": 10000.0 * len(points), "duration": 600.0 * len(points)}
        snapped = [{"hint": "", "distance": 1.0, "name": "", "location": [*map(float, p.split(","))]} for p in points]
        return 200, {"code": "Ok", "routes": [route | {"weight_name": "routability"}], "waypoints": snapped}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        path = urllib.parse.unquote(path)
        self.fake.requests.append((path, query, dict(self.headers)))
        if self.fake.gate:
            self.fake.gate.wait(30)
        if self.fake.script:
            status, answer, headers = (*self.fake.script.pop(0), {})[:3]
        else:
            status, answer, headers = *self.fake.answer(path, query), {}
        body = (answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass
