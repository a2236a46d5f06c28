"""Navigation on map services, against local servers that answer in the services' formats, errors included."""

import asyncio
import json
import logging
import pathlib
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from map_services import AMAP_KEY, AMAP_PLACES, OSM_PLACES, AMapServer, OSMServer, amap_error
from typer.testing import CliRunner

from envs.base import AssistantTurn, EnvironmentError, ToolCall
from envs.navigation import Navigation, NavigationConfig, make_tasks
from envs.navigation.expert import play_expert
from envs.navigation.services import amap as amap_lib
from envs.navigation.services import client as client_lib
from envs.navigation.services.osm import _box
from envs.navigation.services.request import Key, Request, ServiceError
from envs.navigation.services.store import Store
from rti_jax import cli, doctor_setup, environments, replay, sft, validate
from rti_jax.config import Config, ConfigError, load_config
from rti_jax.doctor_records import Subject
from rti_jax.environments import EnvironmentSource
from rti_jax.rollout import Player
from rti_jax.types import Status
from tests.fakes import FakeEngine, call, small_config, tiny_chat

ROOT = pathlib.Path(__file__).parents[1]
FAST = {"rate": 1000.0, "backoff": 0.001, "backoff_limit": 0.01, "retries": 2, "timeout": 20.0}
SERVICES = ("amap v3", "amap v5", "osm")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("AMAP_KEY", AMAP_KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def amap():
    yield (server := AMapServer())
    server.close()


@pytest.fixture
def osm():
    yield (server := OSMServer())
    server.close()


def written(path, places, tasks):
    """A task file; a task is (number of a place, whether its name is ambiguous), ..."""
    lines = []
    for i, task in enumerate(tasks):
        rows = [
            {"name": n, "region": r, "location": f"{lat},{lon}", "ambiguous": ambiguous}
            for (n, r, _, lat, lon), ambiguous in ((places[j], ambiguous) for j, ambiguous in task)
        ]
        named = " -> ".join(f"{p['name']}, {p['region']}" if p["ambiguous"] else p["name"] for p in rows)
        split = "test" if i == len(tasks) - 1 else "train"
        lines.append(json.dumps({"id": f"t{i}", "split": split, "request": f"Drive {named}.", "places": rows}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def amap_config(server, tmp_path, version="v3", **keys):
    chosen = (((1, True), (3, False)), ((3, False), (2, True), (4, False)))
    tasks = written(tmp_path / "amap.jsonl", AMAP_PLACES, chosen)
    own = {"url": server.url, "version": version, "cache": str(tmp_path / "answers.sqlite"), **FAST}
    return NavigationConfig(map="amap", tasks_file=tasks, candidates=1, decimals=6, amap=own | keys)


def osm_config(server, tmp_path, **keys):
    chosen = (((2, True), (3, False)), ((3, False), (1, True), (4, False)))
    tasks = written(tmp_path / "osm.jsonl", OSM_PLACES, chosen)
    own = {"nominatim_url": server.url, "osrm_url": server.url, "cache": str(tmp_path / "answers.sqlite"), **FAST}
    return NavigationConfig(map="osm", tasks_file=tasks, candidates=1, decimals=7, osm=own | keys)


@pytest.fixture(params=SERVICES)
def service(request, tmp_path):
    """A server and the config that plays on it."""
    server = OSMServer() if request.param == "osm" else AMapServer()
    make = osm_config if request.param == "osm" else amap_config
    extra = {} if request.param == "osm" else {"version": request.param.split()[1]}
    yield server, lambda **keys: make(server, tmp_path, **extra, **keys)
    server.close()


def source(config, max_turns=6):
    return EnvironmentSource(Navigation, config, max_turns)


def start(config, split="train", number=0):
    env = Navigation(config, 6)
    asyncio.run(env.reset(Navigation.tasks(config, split)[number]))
    return env


def step(env, name, **arguments):
    """The text that a call is answered with."""
    result = asyncio.run(env.step(AssistantTurn("", (ToolCall(name, arguments),))))
    return result.messages[0]["content"]


def transcripts(config):
    """All episodes of the expert, and one of a policy that asks for other things, as text."""
    played = []
    for split in ("train", "test"):
        for task in Navigation.tasks(config, split):
            played.append(repr(asyncio.run(play_expert(Navigation(config, 6), task))))
    env = start(config)
    played.append(step(env, "search_places", keyword="Nowhere"))
    where = env.gold_coordinates[0]
    played.append(step(env, "search_around", location=where, keyword=env.places[0].name, radius=20))
    played.append(step(env, "direction", origin="10.5,20.25", destination="0,120"))
    return played


class TestGoldPlay:
    def test_validate_finds_nothing_wrong(self, service):
        server, config = service
        for split in ("train", "test"):
            report = asyncio.run(validate.check(source(config()), split, Navigation.tasks(config(), split)))
            assert not report.findings and report.gold == report.tasks == 1 and not report.idle
        # Each question once, although every episode was played several times: four places, two routes.
        names = [(path, tuple(sorted(query.items()))) for path, query, _ in server.requests]
        assert len(names) == len(set(names)) == 6

    def test_validate_command(self, tmp_path, osm):
        own = osm_config(osm, tmp_path).model_dump()
        kept = {k: own[k] for k in ("map", "tasks_file", "osm", "candidates", "decimals")}
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps({"env": {"name": "navigation", **kept}}))
        done = CliRunner().invoke(cli.app, ["validate", str(file)])
        assert done.exit_code == 0 and "gold play wins 2, doing nothing wins 0" in done.output

    def test_a_false_location_is_found(self, tmp_path, osm):
        config = osm_config(osm, tmp_path)
        file = pathlib.Path(config.tasks_file)
        file.write_text(file.read_text().replace("38.9605969", "38.9605968"))
        report = asyncio.run(validate.check(source(config), "train", Navigation.tasks(config, "train")))
        assert {f.check for f in report.findings} >= {"gold", "evidence"} and report.gold == 0
        assert any("does not show 38.9605968" in f.text for f in report.findings)

    def test_coordinates_are_the_services_to_the_decimals(self, service):
        _, config = service
        env = start(config())
        first = env.places[0]
        shown = step(env, "search_places", keyword=first.name, region=first.region)
        assert json.loads(shown)[0] == {
            "name": first.name,
            "region": first.region,
            "location": env.gold_coordinates[0],
        }
        rows = OSM_PLACES if config().map == "osm" else AMAP_PLACES
        assert tuple(env.gold_coordinates[0].split(",")) in {r[3:] for r in rows}
        coarse = config().model_copy(update={"decimals": 2})
        other = start(coarse)
        where = json.loads(step(other, "search_places", keyword=first.name, region=first.region))[0]["location"]
        assert where == other.gold_coordinates[0] == f"{first.latitude:.2f},{first.longitude:.2f}"
        (task,) = Navigation.tasks(coarse, "train")
        assert asyncio.run(play_expert(Navigation(coarse, 6), task)).outcome.reward == 1.0

    def test_requests_are_what_the_services_document(self, service):
        server, config = service
        transcripts(config())
        first, *_ = server.requests
        around = next(r for r in server.requests if "around" in r[0] or "viewbox" in r[1])
        road = next(r for r in server.requests if "direction" in r[0] or "route" in r[0])
        if config().map == "osm":
            assert first[:2] == (
                "/search",
                {
                    "q": "Springfield, Ohio",
                    "limit": "1",
                    "format": "jsonv2",
                    "addressdetails": "1",
                    "accept-language": "en",
                    "countrycodes": "us",
                },
            )
            west, south, east, north = map(float, around[1]["viewbox"].split(","))
            assert around[1]["bounded"] == "1" and west < -83.8088171 < east and south < 39.9242266 < north
            path = "/route/v1/driving/-83.8088171,39.9242266;-89.0936762,38.9605969"
            assert road[:2] == (path, {"overview": "false"})
            return
        common = {"key": AMAP_KEY, "keywords": "人民公园"}
        v3 = {"city": "上海市", "citylimit": "true", "offset": "1", "page": "1", "extensions": "base"}
        v5 = {"region": "上海市", "city_limit": "true", "page_size": "1", "page_num": "1"}
        is_v5 = config().amap.version == "v5"
        assert first[:2] == (f"/{config().amap.version}/place/text", common | (v5 if is_v5 else v3))
        assert around[1]["location"] == "121.473301,31.232781" and around[1]["radius"] == "20000"
        assert road[1]["origin"] == "121.473301,31.232781" and road[1]["destination"] == "116.397029,39.917840"
        assert ("show_fields" in road[1]) == is_v5 and "waypoints" not in road[1]

    def test_the_answer_to_direction_is_the_road(self, service):
        _, config = service
        env = start(config(), "test")
        asyncio.run(env.step(env.expert()))
        result = asyncio.run(env.step(env.expert()))
        assert json.loads(result.messages[0]["content"]) == {"status": "ok", "distance_km": 30.0, "duration_min": 30}
        assert result.done and env.success

    def test_around_gives_the_nearest_within_the_circle(self, tmp_path, osm):
        config = osm_config(osm, tmp_path).model_copy(update={"candidates": 2})
        env = start(config)
        rows = json.loads(step(env, "search_around", location="39.9,-84.0", keyword="Springfield", radius=600))
        assert [r["region"] for r in rows] == ["Ohio", "Illinois"]
        # The box of 490 km around this point holds Springfield, Illinois; the circle does not.
        shown = step(env, "search_around", location="36.5,-85.5", keyword="Springfield", radius=490)
        assert [r["region"] for r in json.loads(shown)] == ["Ohio"]

    def test_box(self):
        west, south, east, north = _box(60.0, 10.0, 111.19)
        assert (round(south, 2), round(north, 2)) == (59.0, 61.0) and 2.0 < east - 10 < 2.01 and 2.0 < 10 - west < 2.01
        assert _box(0.0, 179.9, 100)[::2] == (-180.0, 180.0) and _box(89.9, 0.0, 100)[3] == 90.0

    def test_amap_limits_are_the_policys_to_keep(self, amap, tmp_path):
        env = start(amap_config(amap, tmp_path))
        assert "at most 50 km" in step(env, "search_around", location="30,104", keyword="x", radius=51)
        stops = [f"30,{100 + i}" for i in range(17)]
        assert "at most 16" in step(env, "direction", origin="30,99", waypoints=stops, destination="30,120")
        assert not amap.requests and not env.done

    def test_only_calls_that_are_run_are_asked(self, amap, tmp_path):
        env = start(amap_config(amap, tmp_path).model_copy(update={"calls_per_turn": 1}))
        calls = [ToolCall("search_places", {"keyword": k}) for k in ("南京南站", "人民公园")]
        asyncio.run(env.step(AssistantTurn("", tuple(calls))))
        assert [r[1]["keywords"] for r in amap.requests] == ["南京南站"]

    def test_truth_about_a_turn(self, amap, tmp_path):
        env = start(amap_config(amap, tmp_path))
        assert env.valid(env.expert()) is None  # nothing has been asked, and `valid` does not ask
        asyncio.run(env.foresee(env.expert()))
        assert env.valid(env.expert()) is True and env.turns == 0
        faults = env.faults(random.Random(0))
        assert "wrong_region" in faults or "invented_region" in faults

    def test_tools_say_what_the_map_does(self, service):
        _, config = service
        env = Navigation(config(), 6)
        tools = asyncio.run(env.reset(Navigation.tasks(config(), "train")[0])).tools
        search = tools[0]["function"]
        assert "best matches" in search["description"] and "populous" not in search["description"]
        words = "county" if config().map == "osm" else "City"
        assert words in search["parameters"]["properties"]["region"]["description"]


# What a service answers -> what becomes of the call: "refused" (a tool error), "retried", or a kind of error.
AMAP_CODES = [
    ("10001", "INVALID_USER_KEY", "key"),
    ("10003", "DAILY_QUERY_OVER_LIMIT", "quota"),
    ("10004", "ACCESS_TOO_FREQUENT", "retried"),
    ("10009", "USERKEY_PLAT_NOMATCH", "key"),
    ("10014", "QPS_HAS_EXCEEDED_THE_LIMIT", "retried"),
    ("10016", "SERVER_IS_BUSY", "retried"),
    ("10019", "CQPS_HAS_EXCEEDED_THE_LIMIT", "retried"),
    ("10020", "CKQPS_HAS_EXCEEDED_THE_LIMIT", "retried"),
    ("10021", "CUQPS_HAS_EXCEEDED_THE_LIMIT", "retried"),
    ("10044", "USER_DAILY_QUERY_OVER_LIMIT", "quota"),
    ("20000", "INVALID_PARAMS", "refused"),
    ("20002", "ILLEGAL_REQUEST", "setup"),
    ("20003", "UNKNOWN_ERROR", "retried"),
    ("20012", "ILLEGAL_CONTENT", "refused"),
    ("20800", "OUT_OF_SERVICE", "refused"),
    ("30001", "ENGINE_RESPONSE_DATA_ERROR", "retried"),
    ("40000", "QUOTA_PLAN_RUN_OUT", "quota"),
    ("99999", "SOMETHING_NEW", "setup"),
]
HTTP_ANSWERS = [
    ((429, "Bandwidth limit exceeded", {"Retry-After": "3600"}), "retried"),
    ((503, "<html>Service Unavailable</html>"), "retried"),
    ((200, "<html>Please log in</html>"), "retried"),
    ((200, [{"lat": "95.0", "lon": "0", "name": "x"}]), "retried"),
    ((403, "<html>Access blocked</html>"), "key"),
    ((404, "Not Found"), "setup"),
    ((302, "", {"Location": "http://127.0.0.1:9/"}), "setup"),
]
OSRM_CODES = [
    ("NoRoute", "refused"),
    ("NoSegment", "refused"),
    ("TooBig", "refused"),
    ("InvalidUrl", "setup"),
    ("InvalidQuery", "setup"),
    ("InvalidOptions", "setup"),
]


def expect(server, env, outcome, name, **arguments):
    """One call whose answer the server's script gives; then the same call again, in another episode."""
    asked = len(server.requests)
    env, again = env.fork(), env.fork()
    if outcome == "refused":
        assert step(env, name, **arguments).startswith("Error: the map refuses this: ")
        assert not env.done and env._tool_errors == 1
        assert step(again, name, **arguments).startswith("Error: ")  # an answer like any other
        assert len(server.requests) == asked + 1
        return
    if outcome == "retried":
        assert not step(env, name, **arguments).startswith("Error: ")
        assert len(server.requests) == asked + 2
        return
    with pytest.raises(ServiceError) as caught:
        step(env, name, **arguments)
    assert caught.value.kind == outcome and isinstance(caught.value, EnvironmentError)
    assert caught.value.status == "environment_error" and len(server.requests) == asked + 1
    assert env.turns == 0 and not step(again, name, **arguments).startswith("Error: ")  # it was not stored


class TestErrors:
    @pytest.mark.parametrize(("code", "info", "outcome"), AMAP_CODES, ids=[c[0] for c in AMAP_CODES])
    def test_amap(self, amap, tmp_path, code, info, outcome):
        env = start(amap_config(amap, tmp_path))
        amap.script = [(200, amap_error(code, info))]
        expect(amap, env, outcome, "search_places", keyword="故宫博物院")

    @pytest.mark.parametrize(("answer", "outcome"), HTTP_ANSWERS, ids=[str(a[0][:2]) for a in HTTP_ANSWERS])
    def test_http(self, osm, tmp_path, answer, outcome):
        env = start(osm_config(osm, tmp_path))
        osm.script = [answer]
        expect(osm, env, outcome, "search_places", keyword="Salem")

    def test_nominatims_refusal(self, osm, tmp_path):
        env = start(osm_config(osm, tmp_path))
        osm.script = [(400, {"error": {"code": 400, "message": "Nothing to search for."}})]
        expect(osm, env, "refused", "search_places", keyword="?")

    @pytest.mark.parametrize(("code", "outcome"), OSRM_CODES)
    def test_osrm(self, osm, tmp_path, code, outcome):
        env = start(osm_config(osm, tmp_path))
        osm.script = [(400, {"code": code, "message": "as documented"})]
        expect(osm, env, outcome, "direction", origin="40.5,-80.5", destination="41,-81")

    def test_v5_and_v3_drive_without_a_path(self, amap, tmp_path):
        env = start(amap_config(amap, tmp_path))
        amap.script = [(200, {"status": "1", "info": "OK", "infocode": "10000", "route": {"paths": []}})]
        expect(amap, env, "refused", "direction", origin="40.5,80.5", destination="41,81")

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            ([(200, amap_error("10021", "CUQPS_HAS_EXCEEDED_THE_LIMIT"))] * 3, "quota: AMap: 10021 CUQPS"),
            ([(503, "")] * 3, "unavailable: AMap: HTTP 503, tried 3 times"),
            ([(429, "")] * 3, "quota: AMap: HTTP 429, too many requests, tried 3 times"),
        ],
    )
    def test_after_the_last_try(self, amap, tmp_path, script, words):
        amap.script = list(script)
        with pytest.raises(EnvironmentError, match=words):
            step(start(amap_config(amap, tmp_path)), "search_places", keyword="故宫博物院")
        assert len(amap.requests) == 3

    def test_no_server(self, tmp_path):
        server = AMapServer()
        server.close()
        with pytest.raises(EnvironmentError, match=r"unavailable: AMap: ConnectError .*, tried 3 times"):
            step(start(amap_config(server, tmp_path)), "search_places", keyword="故宫博物院")

    def test_no_answer_in_time(self, amap, tmp_path):
        amap.gate = threading.Event()
        try:
            with pytest.raises(EnvironmentError, match="unavailable: AMap: ReadTimeout"):
                step(start(amap_config(amap, tmp_path, timeout=0.1, retries=0)), "search_places", keyword="x")
        finally:
            amap.gate.set()

    def test_the_wait_is_what_the_service_asks_up_to_the_limit(self, osm, tmp_path):
        client = Navigation.make_map(osm_config(osm, tmp_path, backoff=1.0, backoff_limit=8.0))._client

        def wait(attempt, after):
            outcome = type("Outcome", (), {"exception": lambda self: client_lib.Transient("", after)})()
            return client._wait(type("State", (), {"attempt_number": attempt, "outcome": outcome})())

        assert wait(1, 5.0) == 5.0 and wait(1, 3600.0) == 8.0
        assert 1.0 <= wait(1, 0.0) <= 2.0 and 4.0 <= wait(3, 0.0) <= 5.0 and wait(9, 0.0) == 8.0

    @pytest.mark.parametrize(
        ("code", "keys", "seconds"),
        [
            ("10004", {}, 30.0),  # the minute has to end
            ("10004", {"backoff": 0.01}, 0.6),
            ("10004", {"backoff_limit": 5.0}, 5.0),
            ("10021", {}, 1.0),
            ("10021", {"backoff": 0.01}, 0.02),
        ],
    )
    def test_the_wait_of_amaps_codes_follows_the_configured_backoff(self, amap, tmp_path, code, keys, seconds):
        client = Navigation.make_map(
            amap_config(amap, tmp_path, **{"backoff": 0.5, "backoff_limit": 30.0, **keys})
        )._client
        body = json.dumps({"status": "0", "info": "ACCESS_TOO_FREQUENT", "infocode": code})
        with pytest.raises(client_lib.Transient) as raised:
            amap_lib._checked(200, body)
        outcome = type("Outcome", (), {"exception": lambda self: raised.value})()
        wait = client._wait(type("State", (), {"attempt_number": 1, "outcome": outcome})())
        jitter = keys.get("backoff", 0.5)
        assert seconds <= wait <= max(seconds, 2 * jitter)

    def test_a_rollout_is_no_failure_of_the_policy(self, osm, tmp_path):
        """A member that met a full quota has no reward; one whose second try was answered is like any other."""
        chat = tiny_chat()
        engine = FakeEngine(chat, lambda request: call("search_places", keyword="Salem"))
        config = osm_config(osm, tmp_path, retries=0)
        player = Player(source(config, 2), chat, engine, small_config(rollout={"retries": 0}))
        (task,) = Navigation.tasks(config, "train")
        osm.script = [(429, "")]
        (first,), (second,) = (asyncio.run(player.collect([task], 1, step=i))[0].trajectories for i in range(2))
        assert (first.status, first.reward) == (Status.ENVIRONMENT_ERROR, None) and "quota" in first.info["error"]
        assert (second.status, second.reward) == (Status.FAILURE, 0.0)

    def test_an_answer_that_is_empty_is_no_error(self, service):
        _, config = service
        assert step(start(config()), "search_places", keyword="Nowhere") == "[]"


class TestSharing:
    def test_many_ask_the_same_once(self, amap, tmp_path):
        """One of the waiting episodes is cancelled meanwhile: the others still get the answer."""
        config, amap.gate = amap_config(amap, tmp_path), threading.Event()
        turn = AssistantTurn("", (ToolCall("search_places", {"keyword": "故宫博物院"}),))

        async def play():
            envs = [Navigation(config, 6) for _ in range(8)]
            for env in envs:
                await env.reset(Navigation.tasks(config, "train")[0])
            tasks = [asyncio.create_task(env.step(turn)) for env in envs]
            while not amap.requests:
                await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.sleep(0)
            amap.gate.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        cancelled, *others = asyncio.run(play())
        assert isinstance(cancelled, asyncio.CancelledError) and len(amap.requests) == 1
        assert len({r.messages[0]["content"] for r in others}) == 1

    def test_requests_are_spaced(self, amap, tmp_path):
        """Five requests at 20 a second take at least 4/20 s, however many episodes ask."""
        config = amap_config(amap, tmp_path, rate=20.0)

        async def play(keyword):
            env = Navigation(config, 6)
            await env.reset(Navigation.tasks(config, "train")[0])
            await env.step(AssistantTurn("", (ToolCall("search_places", {"keyword": keyword}),)))

        async def together():
            limiter = Navigation.make_map(config)._client._line().limiter
            assert (limiter.max_rate, limiter.time_period) == (1, 0.05)
            await asyncio.gather(*(play(f"x{i}") for i in range(5)))

        began = time.perf_counter()
        asyncio.run(together())
        assert time.perf_counter() - began > 0.19 and len(amap.requests) == 5

    def test_another_event_loop_goes_on(self, amap, tmp_path):
        config = amap_config(amap, tmp_path)
        for keyword in ("故宫博物院", "南京南站"):  # `start` and `step` run a loop each
            assert "location" in step(start(config), "search_places", keyword=keyword)
        assert Navigation.make_map(config)._client is Navigation.make_map(config)._client

    def test_processes_share_a_file(self, tmp_path):
        """Two processes write the same requests at once; all see the same answers, which are whole."""
        path = tmp_path / "new" / "answers.sqlite"
        code = (
            "import sys; from envs.navigation.services.store import Store\n"
            "store = Store(sys.argv[1], False); sys.stdin.readline()\n"
            "for i in range(20): store.put(str(i), 200, sys.argv[2] * 1000)\n"
            "print([store.get(str(i))[1][0] for i in range(20)])"
        )
        command = [sys.executable, "-c", code, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        processes = [subprocess.Popen([*command, str(i)], **pipes) for i in range(2)]
        for process in processes:  # all have imported before any begins
            process.stdin.write("\n")
            process.stdin.flush()
        seen = [process.communicate()[0] for process in processes]
        assert all(p.returncode == 0 for p in processes) and len(set(seen)) == 1
        store = Store(str(path), read_only=True)
        assert {len(store.get(str(i))[1]) for i in range(20)} == {1000}


class TestReplay:
    def test_a_run_is_replayed_offline(self, service, monkeypatch):
        server, config = service
        online = transcripts(config())
        asked = len(server.requests)
        server.close()
        monkeypatch.delenv("AMAP_KEY")
        offline = config(offline=True)
        Navigation.check(offline)
        assert transcripts(offline) == online and len(server.requests) == asked
        assert any("success" in t for t in online)
        report = asyncio.run(validate.check(source(offline), "test", Navigation.tasks(offline, "test")))
        assert not report.findings

    def test_a_missing_answer_is_named(self, service):
        server, config = service
        Store(config().osm.cache if config().map == "osm" else config().amap.cache, False).check()
        asked = len(server.requests)
        with pytest.raises(EnvironmentError) as caught:
            step(start(config(offline=True)), "search_places", keyword="Nowhere")
        assert caught.value.kind == "offline" and "Nowhere" in str(caught.value) and len(server.requests) == asked
        assert ("/place/text?" in str(caught.value)) or ("/search?" in str(caught.value))

    def test_training_repeats_cost_nothing(self, service):
        server, config = service
        first = transcripts(config())
        asked = len(server.requests)
        assert transcripts(config()) == first and len(server.requests) == asked


class TestSecrets:
    def test_the_key_is_nowhere(self, amap, tmp_path, caplog):
        config = amap_config(amap, tmp_path)
        echo = {"status": "0", "infocode": "10001", "info": f"INVALID_USER_KEY {AMAP_KEY}"}
        with caplog.at_level(logging.DEBUG):
            amap.script = [(200, echo)]
            with pytest.raises(ServiceError) as caught:
                step(start(config), "search_places", keyword="故宫博物院")
            transcripts(config)
            amap.script = [(200, {"status": "1", "info": "OK", "infocode": "10000", "pois": [], "you": AMAP_KEY})]
            step(start(config), "search_places", keyword="echo")
        assert "INVALID_USER_KEY ***" in str(caught.value)
        chain, error = [], caught.value
        while error:
            chain.append(repr(error))
            error = error.__cause__ or error.__context__
        logged = "\n".join(r.getMessage() for r in caplog.records)
        assert "HTTP Request: GET" in logged and "key=***" in logged  # httpx's own lines, with the key taken out
        database = sqlite3.connect(config.amap.cache)
        stored = [Store(config.amap.cache, True).get(r[0])[1] for r in database.execute("SELECT request FROM answers")]
        names = [r[0] for r in database.execute("SELECT request FROM answers")]
        assert len(stored) >= 5 and any("***" in body for body in stored)
        for text in (*chain, logged, *stored, *names, config.model_dump_json(), repr(config)):
            assert AMAP_KEY not in text
        assert AMAP_KEY.encode() not in pathlib.Path(config.amap.cache).read_bytes()
        assert all(r[1]["key"] == AMAP_KEY for r in amap.requests)

    def test_keys_of_openstreetmap_servers(self, osm, tmp_path, monkeypatch):
        monkeypatch.setenv("NOMINATIM_KEY", "n0minatim+key/")
        monkeypatch.setenv("OSRM_KEY", "osrm-secret-key")
        config = osm_config(osm, tmp_path, nominatim_key_parameter="token")
        asyncio.run(play_expert(Navigation(config, 6), Navigation.tasks(config, "train")[0]))
        sent = {path.split("/")[1]: query for path, query, _ in osm.requests}
        assert sent["search"]["token"] == "n0minatim+key/" and sent["route"]["access_token"] == "osrm-secret-key"
        assert client_lib.hide_keys("a?token=n0minatim%2Bkey%2F&b") == "a?token=***&b"

    def test_a_key_in_a_url_is_an_error_that_does_not_show_it(self, tmp_path):
        file = tmp_path / "c.yaml"
        for url in ("https://host/search?key=hush-hush", "https://me:hush-hush@host"):
            file.write_text(f"env: {{name: navigation, map: osm, tasks_file: t, osm: {{nominatim_url: '{url}'}}}}")
            with pytest.raises(ConfigError, match="keys come from the environment") as caught:
                load_config(file, check_env=environments.env_config)
            assert "hush" not in str(caught.value)

    def test_the_user_agent_has_the_contact(self, osm, tmp_path):
        config = osm_config(osm, tmp_path, contact="me@example.org")
        step(start(config), "search_places", keyword="Salem")
        assert osm.requests[0][2]["User-Agent"] == "rti-jax (me@example.org)"


class TestCheck:
    def test_in_order(self, service):
        _, config = service
        assert source(config()).check() is None

    def test_a_missing_key_is_one_line(self, amap, tmp_path, monkeypatch):
        monkeypatch.delenv("AMAP_KEY")
        config = amap_config(amap, tmp_path)
        with pytest.raises(ConfigError, match=r"^AMAP_KEY is not set: [^\n]*env.amap.offline=true$"):
            source(config).check()
        with pytest.raises(EnvironmentError, match="map service, key: AMAP_KEY is not set"):
            step(start(config), "search_places", keyword="x")
        assert not amap.requests

    def test_doctor_says_so(self, amap, tmp_path, monkeypatch):
        monkeypatch.delenv("AMAP_KEY")
        own = amap_config(amap, tmp_path)
        text = (ROOT / "configs" / "navigation_amap_qwen3_8b.yaml").read_text()
        file = tmp_path / "c.yaml"
        file.write_text(re.sub(r"(?m)^  tasks_file: .*$", f"  tasks_file: {own.tasks_file}", text))
        config = load_config(file, check_env=environments.env_config)
        with pytest.raises(ConfigError, match="AMAP_KEY is not set"):
            asyncio.run(doctor_setup.keys(Subject(config)))

    def test_no_key_at_all(self, amap, tmp_path, monkeypatch):
        monkeypatch.setenv("AMAP_KEY", "short")
        with pytest.raises(ConfigError, match="AMAP_KEY has fewer than 8 characters") as caught:
            source(amap_config(amap, tmp_path)).check()
        assert "short" not in str(caught.value)

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"nominatim_url": "https://nominatim.openstreetmap.org"}, "env.osm.contact is empty: nominatim."),
            ({"osrm_url": "https://router.project-osrm.org", "contact": "a@b.org"}, "one request a second"),
        ],
    )
    def test_shared_servers_have_rules(self, osm, tmp_path, keys, words):
        with pytest.raises(ConfigError, match=words):
            source(osm_config(osm, tmp_path, **keys)).check()
        assert source(osm_config(osm, tmp_path, **keys | {"rate": 1.0, "contact": "a@b.org"})).check() is None

    def test_caches_that_cannot_be_used(self, osm, tmp_path):
        with pytest.raises(ConfigError, match=r"env.osm.cache: map service, cache: .*none.sqlite: unable to open"):
            source(osm_config(osm, tmp_path, offline=True, cache=str(tmp_path / "none.sqlite"))).check()
        (tmp_path / "text.sqlite").write_text("no database, but longer than the head of one, " * 40)
        with pytest.raises(ConfigError, match="not a database"):
            source(osm_config(osm, tmp_path, cache=str(tmp_path / "text.sqlite"))).check()
        with pytest.raises(EnvironmentError, match="map service, cache"):
            step(start(osm_config(osm, tmp_path, cache=str(tmp_path / "text.sqlite"))), "search_places", keyword="x")

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"map": "osm"}, "tasks_file=null: map=osm needs one"),
            ({"decimals": 6}, "decimals=6 must be at most 5 on the embedded map"),
            ({"tasks_file": "x", "random_names": 0.5}, "random_coordinates and random_names"),
            ({"map": "amap", "tasks_file": "x", "candidates": 26}, "candidates=26 must be at most 25 with map=amap"),
            ({"map": "google"}, "'embedded', 'amap' or 'osm'"),
        ],
    )
    def test_config(self, keys, words):
        with pytest.raises(ValueError, match=words):
            NavigationConfig(**keys)

    def test_scripted_transcripts_need_generated_tasks(self):
        env = {"name": "navigation", "tasks_file": "x"}
        with pytest.raises(ConfigError, match="env.tasks_file: transcripts are scripted on generated tasks"):
            sft.make_environment(sft.SFTConfig.model_validate({"env": env, "model": {"path": "x"}}))
        with pytest.raises(ConfigError, match="rti.replay.rows: transcripts are scripted on generated tasks"):
            replay.check(Config.model_validate({"env": env, "rti": {"replay": {"rows": 1}}}))


class TestTaskFile:
    LINE = json.loads(
        '{"id": "a", "split": "train", "request": "Go.", "places": ['
        '{"name": "Salem", "region": "Ohio", "location": "40.9,-80.86"},'
        '{"name": "Vandalia", "region": "", "location": "38.96,-89.09", "ambiguous": false}]}'
    )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"id": ""}, "line 2: id: "),
            ({"id": "a"}, "line 2: the id 'a' occurs twice"),
            ({"split": 3}, "line 2: split: "),
            ({"gold": "x"}, "line 2: gold: "),
            ({"places": LINE["places"][:1]}, "line 2: places: "),
            ({"places": [LINE["places"][0]] * 2}, "two places are named salem"),
            (
                {"places": [LINE["places"][0] | {"region": ""}, LINE["places"][1]]},
                "Salem is ambiguous and has no region",
            ),
            (
                {"places": [LINE["places"][0] | {"location": "91,0"}, LINE["places"][1]]},
                "location of Salem must be coord",
            ),
            ({"places": [LINE["places"][0] | {"name": "a|b"}, LINE["places"][1]]}, "line 2: places.0.name: "),
        ],
    )
    def test_errors_name_the_line(self, tmp_path, change, words):
        file = tmp_path / "t.jsonl"
        file.write_text(f"{json.dumps(self.LINE)}\n{json.dumps(self.LINE | {'id': 'b'} | change)}\n")
        with pytest.raises(ConfigError, match=re.escape(words)):
            source(NavigationConfig(tasks_file=str(file))).check()

    @pytest.mark.parametrize(
        ("text", "words"), [("", "has no tasks"), ("{", "line 1: task: Invalid JSON"), (None, "No such")]
    )
    def test_files_that_are_none(self, tmp_path, text, words):
        file = tmp_path / "t.jsonl"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            source(NavigationConfig(tasks_file=str(file))).check()

    def test_a_byte_order_mark_is_no_part_of_the_file(self, tmp_path):
        file = tmp_path / "t.jsonl"
        file.write_text("\ufeff" + json.dumps(self.LINE), encoding="utf-8")
        config = NavigationConfig(tasks_file=str(file), min_population=15000)
        assert [t.id for t in source(config).tasks("train")] == [self.LINE["id"]]

    def test_splits_turns_and_records(self, tmp_path):
        file = tmp_path / "t.jsonl"
        file.write_text(json.dumps(self.LINE))
        config = NavigationConfig(tasks_file=str(file), calls_per_turn=1, min_population=15000)
        with pytest.raises(ConfigError, match="unknown split 'test'; env.tasks_file has train"):
            source(config).tasks("test")
        with pytest.raises(ValueError, match=r"2 places \(env.tasks_file\) .* need 3 turns"):
            Navigation(config, 2)
        (task,) = Navigation.tasks(config, "train")
        assert "40.9" not in json.dumps(task.data) and task.data["request"] == "Go."
        env = start(config)
        assert "" not in env.evidence().values and "40.90000,-80.86000" in env.evidence().values
        file.write_text(json.dumps(self.LINE | {"id": "b"}))
        assert [t.id for t in Navigation.tasks(config, "train")] == ["b"]  # a changed file is read again

    def test_generated_tasks_can_be_written_and_played(self, tmp_path, capsys):
        keys = {"train_tasks": 4, "test_tasks": 2, "ood_tasks": 0, "min_population": 5000}
        keys |= {"places": [2, 3], "calls_per_turn": 1}
        make_tasks.main(["write", *(f"{k}={v}" for k, v in keys.items())])
        file = tmp_path / "t.jsonl"
        file.write_text(capsys.readouterr().out)
        made, read = (NavigationConfig(**keys | more) for more in ({}, {"tasks_file": str(file)}))
        for split, count in (("train", 4), ("test", 2)):
            pairs = zip(Navigation.tasks(made, split), Navigation.tasks(read, split), strict=True)
            for generated, task in pairs:
                played = [asyncio.run(play_expert(Navigation(c, 6), t)) for c, t in ((made, generated), (read, task))]
                assert played[0].messages == played[1].messages and played[1].outcome.reward == 1.0
            report = asyncio.run(validate.check(source(read), split, Navigation.tasks(read, split)))
            assert report.gold == count and not report.findings

    def test_tasks_are_resolved_on_a_service(self, tmp_path, osm, capsys):
        """GeoNames' locations become Nominatim's; what is ambiguous there, or not to be found, is known afterwards."""
        rows = [
            ("named", "Drive Springfield, Ohio to Vandalia.", [(2, "39.92,-83.81"), (3, "38.96,-89.09")]),
            ("unnamed", "Drive Springfield to Vandalia.", [(2, "39.92,-83.81"), (3, "38.96,-89.09")]),
            ("far", "Drive Salem, Ohio to Vandalia.", [(4, "44.94,-123.03"), (3, "38.96,-89.09")]),
        ]
        lines = []
        for name, request, places in rows:
            of = [{"name": OSM_PLACES[i][0], "region": OSM_PLACES[i][1], "location": where} for i, where in places]
            lines.append(json.dumps({"id": name, "split": "train", "request": request, "places": of}))
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        config = osm_config(osm, tmp_path)
        keys = [f"osm.{k}={v}" for k, v in {**FAST, "cache": config.osm.cache}.items()]
        keys += [f"osm.nominatim_url={osm.url}", f"osm.osrm_url={osm.url}", "candidates=1", "decimals=7", "map=osm"]
        make_tasks.main(["resolve", f"tasks_file={tmp_path / 'in.jsonl'}", *keys])
        out = capsys.readouterr()
        assert sorted(out.err.splitlines()) == [
            "left out 1: a place is not found",
            "left out 1: needs its region, which the request does not name",
        ]
        (row,) = map(json.loads, out.out.splitlines())
        assert [(p["location"], p["ambiguous"]) for p in row["places"]] == [
            ("39.9242266,-83.8088171", True),
            ("38.9605969,-89.0936762", False),
        ]
        (tmp_path / "osm.jsonl").write_text(out.out)
        config = config.model_copy(update={"tasks_file": str(tmp_path / "osm.jsonl")})
        report = asyncio.run(validate.check(source(config), "train", Navigation.tasks(config, "train")))
        assert report.gold == report.tasks == 1 and not report.findings

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["write", "map=osm", "tasks_file=x"], "write takes neither"),
            (["write", "places"], "give keys as key=value"),
            (["write", "plaecs=3"], "plaecs: "),
            (["resolve"], "resolve needs tasks_file"),
            (["resolve", "map=osm", "tasks_file=/nowhere.jsonl"], "No such file"),
        ],
    )
    def test_the_tool_fails_in_one_line(self, arguments, words):
        with pytest.raises(SystemExit) as caught:
            make_tasks.main(arguments)
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_request_never_holds_a_key():
    request = Request("AMap", "http://host/x", (("b", "2"), ("a", "1 &")), Key("key", "AMAP_KEY", True), print)
    assert request.name == "http://host/x?a=1+%26&b=2" and AMAP_KEY not in repr(request)
