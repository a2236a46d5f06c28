"""The measurement of the roles: truth from the expert, rates by hand, and the command end to end."""

import asyncio
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from envs.base import AssistantTurn, ToolCall
from rti_jax import role_eval
from rti_jax.config import ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.role_eval import EXPERT, OWN, Judged, JudgedTurn, summarize
from rti_jax.roles import Roles
from rti_jax.rollout import Player
from rti_jax.runs import write_lines
from rti_jax.statistics import ratio_interval
from tests.fakes import FakeEngine, Lookup, call, lookup_source, lookup_task, small_config, tiny_chat

ROOT = pathlib.Path(__file__).parents[1]
WRONG, LOOK, RIGHT = call("answer", code="1"), call("look", name="Ada"), call("answer", code="X4711")
TELLS = "The key says X4711.\n" + LOOK


class Known(Lookup):
    """Lookup with an expert: look, then answer."""

    looked = False

    async def step(self, turn):
        self.looked |= any(c.name == "look" for c in turn.tool_calls)
        return await super().step(turn)

    def expert(self):
        name, arguments = ("answer", {"code": "X4711"}) if self.looked else ("look", {"name": "Ada"})
        return AssistantTurn("", (ToolCall(name, arguments),))

    def valid(self, turn):
        answers = [c.arguments.get("code") for c in turn.tool_calls if c.name == "answer"]
        return not answers or answers[0] == "X4711"

    def faults(self, rng):
        wrong = AssistantTurn("", (ToolCall("answer", {"code": "0"}),))
        return {"wrong_code": wrong, "tells": AssistantTurn("The key says X4711.", self.expert().tool_calls)}

    def reveals(self, turn):
        return "tells" if "key" in turn.content else None


def measured(script, tasks=2, cls=Known, recorded=(), **sections):
    chat, config = tiny_chat(), small_config(**sections)
    engine = FakeEngine(chat, lambda r: script[r.role](chat.decode(r.prompt_ids)))
    player = Player(EnvironmentSource(cls, Lookup.Config(), 4), chat, engine, config)
    roles = Roles(chat, engine, config.sampling, config.rti)

    async def score(rows):
        return [np.full(len(ids), -0.5, np.float32) for _, ids in rows]

    listed = [lookup_task(f"t{i}") for i in range(tasks)]
    return *asyncio.run(role_eval.measure(player, roles, score, listed, recorded=recorded)), engine


SCRIPT = {
    "policy": lambda text: WRONG if '"code": "X4711"' not in text else RIGHT,
    "validator": lambda text: '{"verdict": "invalid", "reason": "look"}',
    "corrector": lambda text: LOOK,
    "verifier": lambda text: '{"verdict": "accept"}',
}


def test_each_turn_is_judged_against_the_expert():
    summary, turns, engine = measured(SCRIPT)
    assert [(t.valid, t.flagged) for t in turns] == [(False, True), (True, True)] * 2
    assert summary["turns"] == 4
    validator = summary["validator"]
    assert (validator["recall"]["mean"], validator["specificity"]["mean"]) == (1.0, 0.0)
    assert validator["balanced_accuracy"]["mean"] == 0.5 and validator["balanced_accuracy"]["n"] == 4
    assert validator["precision"]["mean"] == 0.5
    assert summary["corrector"]["success"]["mean"] == 1.0 and summary["corrector"]["success"]["n"] == 2
    assert summary["corrector"]["perplexity"]["mean"] == pytest.approx(math.exp(0.5))
    verifier = summary["verifier"]
    assert (verifier["true_accept"]["mean"], verifier["true_accept"]["n"]) == (1.0, 4)  # the expert's and its own
    assert (verifier["false_accept"]["mean"], verifier["false_accept"]["n"]) == (1.0, 4)
    assert verifier["false_accept_leaking"]["n"] == 2
    assert verifier["false_accept_leaking_after_guard"]["mean"] == 0.0  # the guard sees the code
    assert set(verifier["accept_by_kind"]) == {"expert", "own: clean", "tells", "wrong_code"}


def test_after_an_invalid_turn_the_experts_is_played():
    _, _, engine = measured(SCRIPT, tasks=1)
    second = engine.prompts("policy")[1]
    assert LOOK in second and WRONG not in second


def test_a_revealing_or_losing_correction_is_no_success():
    for text, reveals in ((TELLS, 1.0), (call("answer", code="2"), 0.0)):
        summary, _, _ = measured(SCRIPT | {"corrector": lambda _, text=text: text})
        assert summary["corrector"]["success"]["mean"] == 0.0
        assert summary["corrector"]["reveals"]["mean"] == reveals
        assert summary["corrector"]["perplexity"]["n"] == 0


def test_recorded_turns_are_judged_again_in_their_states(tmp_path):
    summary, turns, _ = measured(SCRIPT)
    path = tmp_path / "roles.jsonl"
    write_lines(path, map(dataclasses.asdict, turns))
    recorded = role_eval.read_turns(path)
    again, same, engine = measured(SCRIPT, recorded=recorded)
    assert again == summary and not engine.prompts("policy")
    assert [(t.text, t.valid, t.history) for t in same] == [(t.text, t.valid, t.history) for t in turns]
    drifted, _, _ = measured(SCRIPT | {"validator": lambda text: '{"verdict": "valid"}'}, recorded=recorded)
    assert drifted["validator"]["recall"]["mean"] == 0.0 and drifted["turns"] == summary["turns"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="--turns"):
        role_eval.read_turns(path)


def test_a_verifier_that_rejects_all():
    rejecting = SCRIPT | {"verifier": lambda text: '{"verdict": "reject", "reason": "leak"}'}
    verifier = measured(rejecting)[0]["verifier"]
    assert verifier["true_accept"]["mean"] == verifier["false_accept"]["mean"] == 0.0


def test_turns_that_were_not_flagged_have_no_correction():
    summary, turns, engine = measured(SCRIPT | {"validator": lambda text: '{"verdict": "valid"}'})
    assert summary["validator"]["recall"]["mean"] == 0.0 and summary["validator"]["specificity"]["mean"] == 1.0
    assert not engine.prompts("corrector")
    assert summary["corrector"]["success"] == {"mean": None, "low": None, "high": None, "n": 0}


def test_an_environment_without_an_expert_is_one_line():
    with pytest.raises(ConfigError, match="on Lookup: it has no scripted expert"):
        measured(SCRIPT, cls=lookup_source().cls)


def test_by_hand():
    def judged(source, wins, reveals, accepted):
        return Judged(source, "", wins, reveals, accepted, guarded=False, verdict="")

    def turn(task, valid, flagged, correction=None, rewrites=()):
        return JudgedTurn(task, "hard", "id", "", valid, flagged, True, "", correction, rewrites=rewrites)

    turns = [
        turn("a", True, False),
        turn("a", True, True),
        turn("a", False, True, judged(OWN, True, None, True), (judged(EXPERT, True, None, False),)),
        turn("b", False, True, judged(OWN, False, None, True), (judged("leak", True, "leak", False),)),
        turn("b", False, False),
    ]
    summary = summarize(turns)
    assert summary["validator"]["recall"]["mean"] == pytest.approx(2 / 3)
    assert summary["validator"]["balanced_accuracy"]["mean"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert summary["validator"]["precision"]["mean"] == pytest.approx(2 / 3)
    assert summary["corrector"]["success"]["mean"] == 0.5
    assert summary["verifier"]["true_accept"]["mean"] == 0.5
    assert summary["verifier"]["false_accept"]["mean"] == 0.5
    assert summary["verifier"]["false_accept_leaking"]["mean"] == 0.0
    assert summary["verifier"]["accept_by_kind"]["own: does not win"]["mean"] == 1.0


def test_intervals_resample_tasks():
    sure = ratio_interval(np.array([[2.0, 3.0]]), np.array([[4.0, 6.0]]))
    assert (sure.mean, sure.low, sure.high) == (0.5, 0.5, 0.5)
    unsure = ratio_interval(np.array([[4.0, 0.0]]), np.array([[4.0, 4.0]]))
    assert (unsure.mean, unsure.low, unsure.high) == (0.5, 0.0, 1.0)
    assert ratio_interval(np.zeros((2, 3)), np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])).mean is None


@pytest.mark.slow
def test_the_command_measures_the_shipped_policy(tmp_path):
    output = tmp_path / "roles.json"
    command = [sys.executable, "-m", "rti_jax.cli", "eval", "configs/quickstart.yaml", "--roles", "eval.limit=8"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["validator"]["balanced_accuracy"]["mean"] > 0.8
    assert found["verifier"]["true_accept"]["mean"] > 0.8
    assert found["verifier"]["false_accept_leaking"]["mean"] < 0.2  # of few; the README has the rates of many
    assert found["corrector"]["success"]["n"] > 5
    lines = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert len(lines) == found["turns"] and "verdict" in lines[0]
