"""Transcripts: the ids of a rollout, the right labels, weights on the answers, and no hard task taught to the agent."""

import asyncio
import itertools
import json
import random

import numpy as np
import pytest

from envs.base import AssistantTurn, ToolCall
from envs.navigation import Navigation
from envs.navigation.mistakes import Mistakes, direction_turn, search_turn
from rti_jax import tokenizer as tokenizer_lib
from rti_jax.chat import Chat
from rti_jax.transcripts import Transcripts, check, describe

KEYS = {
    "tools": "short", "countries": ["US"], "min_population": 5000, "decimals": 2, "candidates": 2, "places": [2, 3],
    "anchor_radius_km": None, "calls_per_turn": 1, "turn_slack": 0, "kinds": {"easy": 1, "hard": 1},
    "train_tasks": 60, "easy_region_mention": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def world():
    config = Navigation.Config(**KEYS)
    chat = Chat(tokenizer_lib.train((), vocab_size=tokenizer_lib.MINIMUM), "qwen3", thinking=False)
    return Navigation(config, 6), Navigation.tasks(config, "train"), chat


def rows_of(world, kind, count, seed=0, leak_share=0.25, **own):
    env, tasks, chat = world
    stream = Transcripts(
        env, tasks, chat, style="compact", shares={kind: 1.0}, leak_share=leak_share, text_weight=0.3, seed=seed, **own
    )
    return list(itertools.islice(iter(stream), count))


def answer(world, row):
    trained = np.flatnonzero(row.weights == 1.0)
    assert (np.diff(trained) == 1).all()  # one answer, at the end
    assert trained[-1] == len(row.ids) - 1
    return world[2].decode(row.ids[trained])


def test_agent_rows_are_the_ids_of_the_engine_prompts(world):
    _, _, chat = world
    for row in rows_of(world, "agent", 8):
        text = chat.decode(row.ids)
        assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == text.count("<|im_start|>assistant")
        trained = chat.decode(row.ids[row.weights == 1.0])
        assert trained.count("<|im_end|>") == text.count("<|im_start|>assistant")
        assert '"direction"' in trained
        assert "<think>" not in trained  # the generation prompt is the template's


def test_the_agent_hardly_ever_names_a_region(world):
    calls = [world[2].decode(r.ids[r.weights == 1.0]) for r in rows_of(world, "agent", 60)]
    assert sum(c.count('"region"') for c in calls) <= 0.1 * sum(c.count('"keyword"') for c in calls)


def test_a_teacher_is_shown_hard_tasks_as_the_expert_plays_them(world):
    calls = [world[2].decode(r.ids[r.weights == 1.0]) for r in rows_of(world, "agent", 40, hard_share=1.0)]
    assert all(c.count('"region"') >= 1 for c in calls)
    some = [world[2].decode(r.ids[r.weights == 1.0]) for r in rows_of(world, "agent", 60, hard_share=0.5)]
    assert 10 < sum('"region"' in c for c in some) < 50


def test_earlier_assistant_turns_of_role_rows_are_not_trained(world):
    env, _, chat = world
    for row in rows_of(world, "validator", 12):
        head = chat.decode(row.ids[row.weights == 0.0])
        whole = chat.decode(row.ids).split("VALIDATE")[0]
        assert head.count('<tool_call>\n{"name": "') == whole.count('<tool_call>\n{"name": "')


def test_validator_answers_check_expected_verdict(world):
    answers = [json.loads(answer(world, r).removesuffix("<|im_end|>")) for r in rows_of(world, "validator", 60)]
    assert all(list(a) == ["check", "expected", "verdict"] for a in answers)
    share = np.mean([a["verdict"] == "valid" for a in answers])
    assert 0.25 < share < 0.75


def test_verifier_sees_clean_wrong_and_leaking_replacements(world):
    answers = [json.loads(answer(world, r).removesuffix("<|im_end|>")) for r in rows_of(world, "verifier", 80)]
    reasons = {a.get("reason", a["verdict"]) for a in answers}
    assert reasons == {"accept", "inconsistent", "leak"}


def test_correctors_leak_as_often_as_told(world):
    clean = [answer(world, r) for r in rows_of(world, "corrector", 30, leak_share=0.0)]
    assert all(a.startswith("<tool_call>") for a in clean)  # no comment before the call
    leaking = [answer(world, r) for r in rows_of(world, "corrector", 60, leak_share=1.0)]
    assert sum(not a.startswith("<tool_call>") for a in leaking) > 15


def test_the_stream_is_seeded(world):
    same = [r.ids.tolist() for r in rows_of(world, "validator", 5)]
    assert same == [r.ids.tolist() for r in rows_of(world, "validator", 5)]
    assert same != [r.ids.tolist() for r in rows_of(world, "validator", 5, seed=1)]


async def _reset(world, kind):
    env, tasks, _ = world
    await env.reset(next(t for t in tasks if t.kind == kind))
    return env


@pytest.fixture
def hard(world):
    return asyncio.run(_reset(world, "hard"))


def test_check_numbers_places_and_zero_for_none(hard):
    a, b, *_ = hard.places
    gold = hard.gold_coordinates
    assert check(search_turn(a.name), hard) == "1 -"
    assert check(search_turn(b.name, b.region), hard) == "2 2"
    assert check(search_turn("Nowhere", a.region), hard).startswith("0 ")
    assert check(direction_turn(gold), hard) == " | ".join(f"{i} {i}" for i in range(1, len(gold) + 1))
    swapped = [gold[1], gold[0], *gold[2:]]
    assert check(direction_turn(swapped), hard).startswith("2 2 | 1 1")
    assert check(direction_turn(["0.01,0.02", *gold[1:]]), hard).startswith("0 0")


def test_describe_is_the_values_of_the_arguments():
    turn = AssistantTurn("", (ToolCall("direction", {"origin": "1,2", "waypoints": ["3,4"], "destination": "5,6"}),))
    assert describe(turn) == "1,2 | 3,4 | 5,6"


def test_wrong_turns_are_invalid_where_there_is_no_turn_to_spare(hard):
    kinds = set()
    for seed in range(60):
        kind, turn = Mistakes(hard, random.Random(seed)).wrong(hard.expert())
        kinds.add(kind)
        assert not hard.valid(turn), kind
    assert kinds == {"wrong_name", "misspelt", "no_region", "wrong_region"}


def test_leaks_show_what_the_history_does_not(hard):
    for seed in range(30):
        kind, turn = Mistakes(hard, random.Random(seed)).leak(hard.expert())
        if kind == "unseen_coordinates":
            assert turn == direction_turn(hard.gold_coordinates)
        else:
            assert turn.content and turn.tool_calls == hard.expert().tool_calls
