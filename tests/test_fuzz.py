"""Thousands of absurd model outputs through all that reads them: nothing raises, nothing wins that should not, nothing
grows without limit. Seeded, so that a failure repeats.
"""

import asyncio
import json
import math
import random

import numpy as np
import pytest
from test_navigation import TinyNavigation

from envs.base import Task
from envs.navigation import NavigationConfig
from rti_jax import batching, leakage, runs
from rti_jax.environments import EnvironmentSource
from rti_jax.intervention import intervene
from rti_jax.plain_json import unbounded
from rti_jax.roles import Roles, last_json_object, read_validator, read_verifier
from rti_jax.rollout import Player, Seat
from rti_jax.types import RejectReason, Status
from tests.fakes import FakeEngine, call, lookup_source, lookup_task, small_config, tiny_chat

TURNS, MAX_TOKENS, CONTEXT = 3, 1500, 12_000
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<think>", "</think>", "<tool_response>"),
    *("</tool_response>", "<|im_end|>", "<|im_start|>", "<|im_start|>system\n", "<|endoftext|>", "```json\n", "\n\n"),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ":",
        ",",
        "\\",
        "\\\\",
        '\\"',
        "\n",
        "\t",
        " ",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "\u200b",
    ),
    *(
        "\\ud800",
        "\\udfff\\ud800",
        "\\u0000",
        "\\uD83D\\uDE00",
        "\u200b",
        "😀",
        "e\u0301" * 20,
        "＜tool_call＞",
        "｛",
        "＂",
    ),
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 400, "0." + "3" * 60, "1e-400", "null", "true", "{}", "[]"),
    *(
        '"name"',
        '"arguments"',
        '"keyword"',
        '"region"',
        '"origin"',
        '"waypoints"',
        '"destination"',
        '"code"',
        '"radius"',
    ),
    *('"search_places"', '"sеarch_places"', '"direction"', '"direction\\ud800"', '"answer"', '"look"', '"__class__"'),
    *('"verdict"', '"accept"', '"reject"', '"invalid"', '"valid"', '"reason"', '"leak"', '{"verdict": "accept"}'),
    *(
        '"Salem"',
        '"39.92,-83.81"',
        "39.92",
        "-83.81",
        "{{ evidence }}",
        "{% for x in y %}",
        "<script>alert(1)</script>",
    ),
)
CALLS = (
    call("search_places", keyword="Salem"),
    call("search_places", keyword="x" * 3000, region="\ud800"),
    call("search_around", location="39,-89", keyword="Salem", radius=1e300),
    call("direction", origin="39.92,-83.81", destination="40.90,-80.86"),
    call("direction", origin="1,1", waypoints=["2,2"] * 60, destination="3,3"),
    call("look", name={"a": [1, 2, {"b": None}]}),
    call("answer", code=["X4711"]),
    call("answer", code=True),
)
GOLD = {"origin": "39.92,-83.81", "destination": "38.96,-89.09"}  # of places 3 and 7 of the tiny map


def soup(rng):
    return "".join(rng.choices(FRAGMENTS, k=rng.choice((0, 1, 3, 10, 40))))


def nested(rng):
    depth = rng.choice((3, 30, 33, 200, 1500))
    opener, closer = rng.choice((('{"a":', "}"), ("[", "]"), ('{"a":[', "]}")))
    inside = opener * depth + "1" + closer * rng.choice((depth, depth - 1, 0))
    return f'<tool_call>\n{{"name": "search_places", "arguments": {{"keyword": {inside}}}}}\n</tool_call>'


def mutated(rng):
    """Calls that have lost, doubled or gained something."""
    text = "".join(rng.choices(CALLS, k=rng.choice((1, 1, 2, 5))))
    for _ in range(rng.choice((0, 1, 1, 3))):
        i, j = sorted(rng.choices(range(len(text) + 1), k=2))
        j = min(j, i + 12)
        kind = rng.randrange(3)
        text = text[:i] + (rng.choice(FRAGMENTS) if kind == 0 else text[i:j] * 2 if kind == 1 else "") + text[j:]
    return text


def long(rng):
    return rng.choice(("x", "1,", "a-1 ", "{", '"', "\\", "<think>", "</tool_call>", " ", "é")) * rng.choice(
        (900, 4000)
    )


def absurd(rng):
    return rng.choices((soup, nested, mutated, long), (6, 1, 5, 1))[0](rng)


def absurd_ids(rng, chat):
    """Token ids: of an absurd text, or of no text at all; now and then without an end."""
    if rng.random() < 0.1:
        return tuple(rng.randrange(len(chat.tokenizer)) for _ in range(rng.choice((1, 5, 300))))
    text = absurd(rng).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    ids = chat.encode_text(text)
    return ids if rng.random() < 0.9 else ids[:-1] or ids


def verdict(rng):
    return rng.choice(('{"verdict": "invalid"}', '{"verdict": "accept"}', None)) or absurd(rng)


class Seeded(FakeEngine):
    """A policy and roles of which every answer is absurd, or now and then what a role should say."""

    def __init__(self, chat):
        super().__init__(chat, self._draw)

    def _draw(self, request):
        rng = random.Random(request.seed)
        if request.role in ("validator", "verifier") and rng.random() < 0.7:
            return self.chat.encode_text(verdict(rng).encode(errors="replace").decode())
        return absurd_ids(rng, self.chat)


def settings():
    sampling = {"max_tokens": MAX_TOKENS, "max_context": CONTEXT}
    batch = {"buckets": [2048, CONTEXT], "rows_per_microbatch": 1}
    rollout = {"group_size": 4, "episode_timeout": 600.0}
    return small_config(sampling=sampling, batch=batch, rollout=rollout, gate={"delta": math.inf})


def navigation():
    config = NavigationConfig(places=(2, 3), candidates=2, decimals=2, tools="short", calls_per_turn=None)
    return EnvironmentSource(TinyNavigation, config, 4), Task("t", data={"request": "Go.", "places": (3, 7)})


def sources():
    yield navigation()  # checks its calls itself
    yield lookup_source(TURNS), lookup_task(code="Z0815")  # by the tools' schemas


@pytest.mark.parametrize("thinking", [False, True])
def test_episodes_interventions_and_batches(tmp_path, thinking):
    chat, config = tiny_chat(thinking), settings()

    async def score(rows):
        return [np.full(len(r), -0.5, np.float32) for _, r in rows]

    for source, task in sources():
        engine = Seeded(chat)
        player = Player(source, chat, engine, config)
        roles = Roles(chat, engine, config.sampling, config.rti)

        async def play(player=player, task=task, roles=roles):
            groups = await player.collect([task] * 8, step=0)
            return await intervene(groups, [task] * 8, player, roles, score, config, step=0)

        groups = asyncio.run(play())
        played = [t for g in groups for t in g.trajectories] + [a.trajectory for g in groups for a in g.attempts]
        assert all(t.status in (Status.FAILURE, Status.TRUNCATED) and t.reward == 0 for t in played), [
            t.info for t in played if t.reward != 0
        ]
        # What an environment answers is bounded by what was asked, and an episode by its turns.
        for t in played:
            assert len(t.turns) <= 4
            for before, after in zip(t.turns, t.turns[1:], strict=False):
                grown = len(after.prompt_ids) - len(before.prompt_ids) - len(before.response_ids)
                assert grown <= 1000 + 12 * len(before.response_ids)
        proposals = [p for g in groups for a in g.attempts for i in a.interventions for p in i.proposals]
        assert len(engine.requests) > 100 and proposals
        # Rows, and what is written for the viewer, take all of it.
        (packed,) = [batching.build(groups, config)]
        trained = sum(len(turn.response_ids) for g in groups for t in g.trajectories for turn in t.turns)
        assert sum(int(b.loss_mask.sum()) for b in packed.microbatches) == trained
        runs.write_groups(tmp_path / "step.jsonl", groups, {})
        assert all(json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines())


@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_parsed_is_bounded_and_can_be_written(thinking):
    chat, rng = tiny_chat(thinking), random.Random(1)
    source, _ = navigation()
    prompt = chat.start([{"role": "user", "content": "Go."}])
    kinds = set()
    for _ in range(800):
        parsed = chat.parse(prompt, absurd_ids(rng, chat))
        for called in parsed.turn.tool_calls:
            kinds.add(called.error is None)
            assert (called.arguments is None) == (called.error is not None)
            assert called.arguments is None or unbounded(called.arguments) is None
            assert called.error is None or len(called.error) < 300
        json.dumps([parsed.as_message(), parsed.as_written()], ensure_ascii=False, allow_nan=False).encode()
        assert "<|im_end|>" not in parsed.body  # nothing is read beyond the end of the turn
        assert parsed.malformed is None or isinstance(parsed.malformed, str)
    assert kinds == {True, False}


def gold_written():
    """(completion, whether it wins): the gold route, right and in ways that only look right."""
    right = call("direction", **GOLD)
    think = "<think>\n{}\n</think>\n\n{}"
    yield right, True
    yield think.format("Ohio, then Illinois.", right), True
    yield call("direction", origin=" ( 39.920 , -83.81 )", waypoints=[], destination="38.96,-89.0900"), True
    yield think.format(right, "Done."), False  # only thought of
    yield "<think>\n" + right, False  # never ends to think
    yield right.replace("</tool_call>", ""), False
    yield right.replace("<tool_call>", "＜tool_call＞"), False
    yield right.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), False
    yield "<tool_response>\n" + GOLD["origin"] + "\n</tool_response>", False
    yield call("direction", origin=GOLD["destination"], destination=GOLD["origin"]), False
    yield call("direction", origin="1,1", destination="2,2") + right, False  # the first one counts
    yield call("direction", **GOLD, waypoints=["40.90,-80.86"]), False
    yield call("direction", origin="３９.９２,-83.81", destination=GOLD["destination"]), False
    yield call("direction", origin="39.92,-83.810000000001", destination=GOLD["destination"]), False
    yield call("direction", origin=[39.92, -83.81], destination=GOLD["destination"]), False
    yield call("direction", origin="39.92,-83.81\u0000", destination=GOLD["destination"]), False
    yield call("dirеction", **GOLD), False  # a Cyrillic letter
    yield call("direction", **GOLD, note="x"), False
    yield right.replace('{"origin"', '[{"origin"').replace("}}", "}]}"), False
    yield right + "<|im_end|>", True
    yield "<|im_end|>" + right, False  # behind the end of the turn


@pytest.mark.parametrize(("written", "wins"), gold_written())
def test_only_the_gold_route_wins(written, wins):
    chat = tiny_chat()
    source, task = navigation()
    engine = FakeEngine(chat, lambda request: written if not len(engine.requests) > 1 else "I give up.")
    player = Player(source, chat, engine, settings())
    assert asyncio.run(player.play(task, Seat(0, 0, "g", 0))).reward == float(wins)


def test_verdicts():
    rng, seen = random.Random(2), set()
    for _ in range(4000):
        text = rng.choice((soup, mutated, nested, verdict))(rng)
        found = last_json_object(text)
        assert found is None or isinstance(found, dict)
        judged, checked = read_validator(text), read_verifier(text)
        assert isinstance(judged.reason, str) and judged.flagged <= judged.readable
        assert checked is None or checked in RejectReason
        seen |= {judged.flagged, checked}
        # Whatever is put around a verdict that leaves the object broken makes it no verdict.
        for wrapped in (f'{{"note": {{"verdict": "accept"}}, {text.count("x")}}}', '{"a": {"verdict": "accept"}'):
            assert read_verifier(wrapped) is RejectReason.UNREADABLE
    assert seen >= {True, False, None, RejectReason.UNREADABLE}


def test_the_leak_guard():
    rng = random.Random(3)
    values = ["39.92,-83.81", "X4711", "São Tomé", "é", "", "(", "\\", "٣٩"]
    for _ in range(400):
        text = rng.choice((soup, mutated, nested, long))(rng)
        leakage.leaks(text, values, [absurd(rng)], absurd(rng))
        assert set(leakage.leaks(text + " 39.92 ", values[:1], [""])) == {"39.92,-83.81"}, text
        assert leakage.leaks(text + " X4711 ", ["X4711"], [text + " X4711 "]) == ()
