"""Navigation: map, tools, episode, reward, expert. The task generator has its own file, test_navigation_tasks.py."""

import asyncio
import itertools
import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.base import AssistantTurn, EnvironmentError, Task, ToolCall
from envs.navigation import Navigation, NavigationConfig
from envs.navigation.expert import play_expert
from envs.navigation.gazetteer import Gazetteer, load
from envs.navigation.map import Place, RandomCoordinates, coordinates, distance_km, fold

# Two names in three regions each, one in two, one unique; the least populous Springfield is beyond the top two.
PLACES = (
    Place(1, "Springfield", "Illinois", 39.8, -89.65, 900),
    Place(2, "Springfield", "Missouri", 37.22, -93.3, 800),
    Place(3, "Springfield", "Ohio", 39.92, -83.81, 700),
    Place(4, "Salem", "Oregon", 44.94, -123.03, 600),
    Place(5, "Salem", "Ohio", 40.9, -80.86, 500),
    Place(6, "Salem", "Illinois", 38.63, -88.95, 400),
    Place(7, "Vandalia", "Illinois", 38.96, -89.09, 300),
    Place(8, "São Tomé", "Ohio", 41.0, -82.0, 200),
)
TINY = Gazetteer(PLACES, decimals=2, region_codes={"IL": "Illinois"})
SHORT = NavigationConfig(
    places=(2, 3),
    candidates=2,
    decimals=2,
    kinds={"easy": 1, "hard": 1},
    tools="short",
    anchor_radius_km=None,
    calls_per_turn=1,
    turn_slack=1,
    random_coordinates=0.5,
)


class TinyNavigation(Navigation):
    """Navigation on the eight places above."""

    @classmethod
    def make_map(cls, config):
        return TINY


def start(places=(3, 7), max_turns=6, **keys):
    """An episode of the tiny map and its observation."""
    config = NavigationConfig(**{"places": (2, 3), "candidates": 2, "decimals": 2, "tools": "short"} | keys)
    env = TinyNavigation(config, max_turns)
    task = Task("t", data={"request": "Go.", "places": places})
    return env, asyncio.run(env.reset(task))


def call(name, **arguments):
    return ToolCall(name, arguments)


def search(keyword, region=None):
    return call("search_places", keyword=keyword, **({"region": region} if region else {}))


def direction(*points):
    return call("direction", origin=points[0], waypoints=list(points[1:-1]), destination=points[-1])


def step(env, *calls):
    return asyncio.run(env.step(AssistantTurn("", tuple(calls))))


def reward(env):
    return asyncio.run(env.score()).reward


class TestMap:
    def test_fold_ignores_case_accents_and_punctuation(self):
        assert fold("São  Tomé") == "sao tome" and fold("St. Louis") == fold("Saint-Louis") == "saint louis"
        assert fold("Coeur d'Alene") == "coeur dalene" and fold("!?") == "" and fold("東京") == "東京"

    def test_distance(self):
        assert distance_km(0, 0, 1, 0) == pytest.approx(111.195, abs=1e-3)
        assert distance_km(60, 10, 60, 11) == pytest.approx(55.6, abs=0.05)
        assert distance_km(90, 0, -90, 0) == pytest.approx(20015.09, abs=0.01)

    def test_search_returns_the_most_populous_first(self):
        assert [p.id for p in TINY.search("springfield", None, 2)] == [1, 2]
        assert [p.id for p in TINY.search("SPRINGFIELD ", None, 9)] == [1, 2, 3]
        assert TINY.search("Spring", None, 9) == [] and TINY.search("", None, 9) == []

    def test_search_by_region_name_or_code(self):
        assert [p.id for p in TINY.search("Springfield", "ohio", 2)] == [3]
        assert [p.id for p in TINY.search("Salem", "IL", 2)] == [6]
        assert TINY.search("Salem", "Atlantis", 2) == [] and TINY.search("sao tome", "Ohio", 1)[0].id == 8

    def test_around_sorts_by_distance_within_the_radius(self):
        assert [p.id for p in TINY.around(39.0, -89.0, "Salem", 2000, 9)] == [6, 5]
        assert [p.id for p in TINY.around(39.0, -89.0, "Salem", 100, 9)] == [6]
        assert [p.id for p in TINY.around(39.0, -89.0, "Salem", 9000, 1)] == [6]

    def test_alternate_names(self):
        gazetteer = Gazetteer(PLACES, 2, alternates={7: ["Salem"]})
        assert [p.id for p in gazetteer.search("Salem", None, 9)] == [4, 5, 6, 7]
        assert gazetteer.share_keyword(PLACES[3], PLACES[6]) and not TINY.share_keyword(PLACES[3], PLACES[6])

    def test_embedded_gazetteer(self):
        us = load(("US",), 1000, 2)
        springfield = us.search("Springfield", "Illinois", 3)
        assert [coordinates(p, 2) for p in springfield] == ["39.80,-89.64"]
        assert len({p.region for p in us.places}) == 51 and len(us.named("Springfield")) >= 10
        assert load(("US",), 1000, 2) is us
        with pytest.raises(ValueError, match="'us'.*'US'"):
            load(("us",), 1000, 2)

    def test_search_is_fast(self):
        us, began = load(("US",), 1000, 2), time.perf_counter()
        for _ in range(500):
            us.search("Springfield", "Illinois", 5)
        assert (time.perf_counter() - began) / 500 < 2e-3

    def test_random_coordinates_belong_to_the_seed(self):
        one, same, two = RandomCoordinates(TINY, 1), RandomCoordinates(TINY, 1), RandomCoordinates(TINY, 2)
        assert one.places == same.places != two.places
        assert one.search("Vandalia", None, 1) == [one.place(7)] != [TINY.place(7)]
        moved = one.place(7)
        assert one.around(moved.latitude, moved.longitude, "Vandalia", 1, 1) == [moved]
        assert moved.latitude in {p.latitude for p in PLACES} and moved.longitude in {p.longitude for p in PLACES}


class TestEpisode:
    def test_success_needs_all_coordinates_in_order(self):
        env, _ = start((3, 6, 7))
        result = step(env, direction("39.92,-83.81", "38.63,-88.95", "38.96,-89.09"))
        assert result.done and reward(env) == 1.0

    @pytest.mark.parametrize(
        "points",
        [
            ("38.63,-88.95", "39.92,-83.81", "38.96,-89.09"),  # order
            ("39.92,-83.81", "38.96,-89.09"),  # a stop left out
            ("39.92,-83.81", "38.63,-88.95", "38.63,-88.95", "38.96,-89.09"),  # a stop twice
            ("39.92,-83.81", "38.63,-88.95", "38.97,-89.09"),  # one digit
            ("39.9,-83.8", "38.63,-88.95", "38.96,-89.09"),  # rounded
            ("-83.81,39.92", "38.63,-88.95", "38.96,-89.09"),  # lon,lat
        ],
    )
    def test_no_partial_credit(self, points):
        env, _ = start((3, 6, 7))
        assert step(env, direction(*points)).done and reward(env) == 0.0

    def test_only_the_value_of_a_number_counts(self):
        env, _ = start((4, 7))
        step(env, call("direction", origin=" (44.940, -123.03)", destination="38.96 ,-89.09"))
        assert reward(env) == 1.0

    def test_the_first_direction_call_ends_the_episode(self):
        env, _ = start()
        wrong, right = direction("1,1", "2,2"), direction("39.92,-83.81", "38.96,-89.09")
        result = step(env, wrong, right)
        assert result.done and len(result.messages) == 1 and reward(env) == 0.0
        with pytest.raises(EnvironmentError, match="after the end"):
            step(env, right)

    def test_a_malformed_direction_call_does_not(self):
        env, _ = start()
        result = step(env, call("direction", origin="Springfield", destination="38.96,-89.09"))
        assert not result.done and result.messages[0]["content"] == 'Error: origin must be coordinates "lat,lon"'
        step(env, direction("39.92,-83.81", "38.96,-89.09"))
        assert reward(env) == 1.0

    def test_idle_play_fails_at_the_turn_limit(self):
        env, _ = start(max_turns=4)
        results = [asyncio.run(env.step(AssistantTurn("I think."))) for _ in range(4)]
        assert [r.done for r in results] == [False, False, False, True]
        assert results[0].messages == [{"role": "user", "content": "Call a tool."}]
        outcome = asyncio.run(env.score())
        assert (outcome.status, outcome.reward, outcome.info["reason"]) == ("failure", 0.0, "no direction call")

    def test_results(self):
        env, _ = start()
        messages = step(env, search("Springfield"), search("Springfield", "Ohio"), search("Nowhere")).messages
        assert [m["content"] for m in messages] == [
            "Springfield | Illinois | 39.80,-89.65\nSpringfield | Missouri | 37.22,-93.30",
            "Springfield | Ohio | 39.92,-83.81",
            "No results.",
        ]
        env, _ = start(tools="full")
        around = call("search_around", location="39,-89", keyword="Salem", radius=100)
        assert step(env, around).messages[0]["content"] == (
            '[{"name": "Salem", "region": "Illinois", "location": "38.63,-88.95"}]'
        )

    def test_turn_limit_with_slack(self):
        assert [start(turn_slack=s)[0].turn_limit for s in (None, 0, 1, 9)] == [6, 3, 4, 6]
        with pytest.raises(ValueError, match="max_turns=3 is too few"):
            TinyNavigation(NavigationConfig(places=(2, 3), calls_per_turn=1), 3)

    def test_calls_beyond_the_limit_of_a_turn_are_refused(self):
        env, _ = start(calls_per_turn=1)
        messages = step(env, search("Vandalia"), search("Salem", "Ohio")).messages
        assert messages[1]["content"] == "Error: only 1 call(s) per turn"
        assert [p.id for p in env._missing()] == [3]

    def test_observation_has_the_request_and_three_tools(self):
        for style in ("full", "short"):
            _, observation = start(tools=style)
            assert [m["role"] for m in observation.messages] == ["system", "user"]
            assert observation.messages[1]["content"] == "Go."
            functions = [t["function"] for t in observation.tools]
            assert [f["name"] for f in functions] == ["search_places", "search_around", "direction"]
            assert list(functions[2]["parameters"]["properties"]) == ["origin", "waypoints", "destination"]

    def test_many_episodes_at_once_share_nothing(self):
        async def one(env, task):
            await asyncio.sleep(0)
            return (await play_expert(env, task)).outcome.reward

        async def many():
            tasks = [Task(f"{i}", data={"request": "", "places": (1 + i % 3, 4 + i % 4)}) for i in range(200)]
            config = NavigationConfig(places=(2, 3), decimals=2)
            return await asyncio.gather(*(one(TinyNavigation(config, 6), task) for task in tasks))

        assert asyncio.run(many()) == [1.0] * 200


class TestBadCalls:
    @pytest.mark.parametrize(
        "bad, text",
        [
            (ToolCall("search_places", None), "arguments must be an object"),
            (ToolCall("", None, error="bad JSON"), "bad JSON"),
            (call("fly"), "unknown tool; the tools are search_places, search_around, direction"),
            (call("search_places"), "argument keyword is missing"),
            (call("search_places", keyword=3), "keyword must be a text"),
            (call("search_places", keyword="a", state="b"), "unknown argument state; search_places takes"),
            (call("search_places", keyword="x" * 201), "keyword is longer than 200 characters"),
            (call("search_around", location="1,2", keyword="a", radius=True), "radius must be a positive number"),
            (call("search_around", location="1,2", keyword="a", radius=float("nan")), "radius must be a positive"),
            (call("search_around", location="91,2", keyword="a", radius=1), "location must be coordinates"),
            (call("direction", origin="1,2", destination=[3, 4]), "destination must be coordinates"),
            (call("direction", origin="1,2", waypoints="3,4", destination="3,4"), "waypoints must be a list"),
            (call("direction", origin="1,2", waypoints=["nan,1"], destination="3,4"), "waypoints must be coordinates"),
        ],
    )
    def test_come_back_as_errors(self, bad, text):
        env, _ = start()
        result = step(env, bad)
        assert not result.done and result.messages[0]["role"] == "tool"
        assert result.messages[0]["content"].startswith(f"Error: {text}")
        assert asyncio.run(env.score()).info["tool_errors"] == 1 and env.turns == 1

    VALUES = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["1,2", "Salem", "IL"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )
    ARGUMENTS = st.dictionaries(
        st.sampled_from(["keyword", "region", "location", "radius", "origin", "destination", "waypoints"]) | st.text(),
        VALUES,
        max_size=5,
    )
    NAMES = st.sampled_from(["search_places", "search_around", "direction"]) | st.text()

    @settings(max_examples=300, deadline=None)
    @given(calls=st.lists(st.builds(ToolCall, NAMES, st.none() | ARGUMENTS), max_size=4), style=st.booleans())
    def test_never_raise_and_never_win(self, calls, style):
        env, _ = start(tools="short" if style else "full")
        result = step(env, *calls)
        assert result.messages and all(isinstance(m["content"], str) for m in result.messages)
        assert reward(env) == 0.0 and result.done == (env._route is not None)


def can_win(env, memo=None):
    """True if some play that copies coordinates from earlier results wins: all calls, all turns, all routes."""
    memo = {} if memo is None else memo
    key = (env._shown, env.turns, env._route)
    if key not in memo:
        memo[key] = env.success if env.done else any(can_win(e, memo) for e in successors(env))
    return memo[key]


def successors(env):
    searches = [search(n, r) for n in ("Springfield", "Salem", "Vandalia") for r in (None, "Illinois", "Ohio")]
    searches += [call("search_around", location="39,-89", keyword="Salem", radius=9000), search("Salem", "Oregon")]
    shown = [f"{lat:.2f},{lon:.2f}" for lat, lon in env._shown]
    turns = [(direction(*route),) for route in itertools.permutations(shown, len(env._places))]
    # A route of n places uses n coordinates, each shown by some call: more than n calls in a turn gain nothing.
    for n in range(1, min(env.config.calls_per_turn or len(env._places), len(env._places)) + 1):
        turns += itertools.combinations(searches, n)
    for calls in turns:
        successor = env.fork()
        successor._play(AssistantTurn("", tuple(calls)))
        yield successor


class TestExpert:
    @pytest.mark.parametrize("config", [NavigationConfig(), SHORT], ids=["full", "short"])
    @pytest.mark.parametrize("split", ["train", "test", "ood"])
    def test_solves_every_task(self, config, split):
        tasks = Navigation.tasks(config, split)
        outcomes = [asyncio.run(play_expert(Navigation(config, 6), t)).outcome for t in tasks]
        assert len(tasks) == (600 if split == "train" else 150)
        assert [t.id for t, o in zip(tasks, outcomes, strict=True) if o.reward != 1.0] == []
        if config is SHORT:  # one search a place
            assert all(o.info["turns"] == o.info["places"] + 1 for o in outcomes)

    def test_searches_by_region_only_where_the_name_is_ambiguous(self):
        env, _ = start((3, 7), calls_per_turn=1)
        first, second = env.expert(), None
        assert first.tool_calls[0].arguments == {"keyword": "Springfield", "region": "Ohio"}
        asyncio.run(env.step(first))
        second = env.expert()
        assert second.tool_calls[0].arguments == {"keyword": "Vandalia"}
        asyncio.run(env.step(second))
        assert env.expert().tool_calls[0].arguments == {"origin": "39.92,-83.81", "destination": "38.96,-89.09"}

    def test_does_not_search_what_a_result_has_shown(self):
        env, _ = start((1, 7, 5), calls_per_turn=1, turn_slack=2)
        step(env, search("Springfield"))  # its first result is place 1
        step(env, call("search_around", location="41,-81", keyword="Salem", radius=50))  # place 5
        assert env.expert().tool_calls[0].arguments == {"keyword": "Vandalia"}

    def test_gives_up_exactly_when_the_turns_do_not_suffice(self):
        env, _ = start((3, 7), calls_per_turn=1, turn_slack=1)
        step(env, search("Springfield"))
        assert env.recoverable() and env.expert() is not None
        assert env.valid(AssistantTurn("", (search("Vandalia"),)))
        assert not env.valid(AssistantTurn("", (search("Springfield"),)))
        assert env.turns == 1, "judging a turn must not play it"
        step(env, search("Springfield"))
        assert not env.recoverable() and env.expert() is None

    @settings(max_examples=60, deadline=None)
    @given(
        places=st.lists(st.sampled_from([3, 6, 7]), min_size=2, max_size=3, unique=True).map(tuple),
        cap=st.sampled_from([1, 2, None]),
        wasted=st.integers(0, 4),
        seed=st.integers(0, 10**6),
    )
    @example(places=(3, 6, 7), cap=None, wasted=3, seed=262143)  # three searches in the last turn but one
    def test_recoverable_is_exact(self, places, cap, wasted, seed):
        env, _ = start(places, max_turns=5, calls_per_turn=cap, turn_slack=1)
        rng = random.Random(seed)
        for _ in range(wasted):
            if not env.done:
                step(env, *rng.choices([search("Salem"), search("Springfield", "Ohio"), search("Vandalia")]))
        assert env.recoverable() == can_win(env)

    def test_fork_is_independent(self):
        env, _ = start()
        other = env.fork()
        step(other, direction("1,1", "2,2"))
        assert other.done and not env.done and env.turns == 0


class TestEvidence:
    def test_short(self):
        env, _ = start((3, 7))
        evidence = env.evidence()
        assert evidence.text == (
            "1. Springfield | Ohio | 39.92,-83.81 | ambiguous\n2. Vandalia | Illinois | 38.96,-89.09 | unique"
        )
        assert {"39.92,-83.81", "39.92", "-83.81", "Ohio", "Vandalia"} <= set(evidence.values)
        assert len(env.role_rules().splitlines()) == 1

    def test_full_has_the_rules_that_roles_know(self):
        env, _ = start(tools="full")
        assert env.evidence().text.startswith("Gold route, in order")
        for rule in ("before direction", "refined by region", "no result has shown", "silent reference"):
            assert rule in env.role_rules()

    @pytest.mark.parametrize("tools", ["full", "short"])
    def test_reaches_no_observation(self, tools):
        config = SHORT.model_copy(update={"tools": tools, "random_coordinates": 1.0})
        for task in Navigation.tasks(config, "test")[:40]:
            env = Navigation(config, 6)
            observation = asyncio.run(env.reset(task))
            hidden = [v for v in env.evidence().values if "," in v]
            seen = repr(observation) + repr(task) + repr(task.data)
            assert hidden and not any(v in seen for v in hidden)
