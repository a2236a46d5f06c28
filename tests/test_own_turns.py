"""The policy's own turns as material for role transcripts, and role replay."""

import asyncio
import pathlib

import jax
import numpy as np
import pytest

from envs.navigation import Navigation
from rti_jax import config as config_lib
from rti_jax import own_turns, replay
from rti_jax.environments import EnvironmentSource
from rti_jax.learner import init_state, make_optimizer
from rti_jax.runtime import load_policy
from rti_jax.transcripts import Transcripts
from tests.fakes import FakeEngine, call, small_config
from tests.test_transcripts import KEYS, answer, rows_of, world  # noqa: F401 - fixture

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.yaml"
NOWHERE = call("search_places", keyword="Nowhere")


@pytest.fixture
def own(world, monkeypatch):  # noqa: F811
    """Turns of a policy that always searches for a place that is not there."""
    env, tasks, chat = world
    monkeypatch.setattr(own_turns, "make_engine", lambda folder, config: FakeEngine(chat, lambda r: NOWHERE))
    monkeypatch.setattr(own_turns.Chat, "from_folder", lambda folder, thinking: chat)
    source = EnvironmentSource(Navigation, env.config, 6)
    return own_turns.collect(pathlib.Path("policy"), source, tasks[:6], small_config())


def test_every_state_can_still_be_won(world, own):  # noqa: F811
    env, _, chat = world
    assert {t.task.id for t in own} == {f"train/{i:04d}" for i in range(6)}
    for turn in own:
        assert chat.decode(turn.ids) == NOWHERE + "<|im_end|>"

        async def replay(turn=turn):
            start = await env.reset(turn.task)
            prompt = chat.start(start.messages, start.tools)
            for ids in turn.history:
                result = await env.step(chat.parse(prompt, ids, start.tools).turn)
                prompt = chat.extend(prompt, ids, result.messages, start.tools)
            return env.recoverable()

        assert asyncio.run(replay())
    assert max(len(t.history) for t in own) >= 2  # the expert's turns lead on


def test_roles_judge_them(world, own):  # noqa: F811
    rows = rows_of(world, "validator", 30, own=own, own_share=1.0)
    assert all("PROPOSED " + NOWHERE in world[2].decode(r.ids) for r in rows)
    assert all(answer(world, r).endswith('"verdict": "invalid"}<|im_end|>') for r in rows)
    assert not any("Nowhere" in world[2].decode(r.ids) for r in rows_of(world, "validator", 30))


def test_evidence_of_another_task_makes_every_turn_invalid(world, monkeypatch):  # noqa: F811
    from rti_jax import transcripts

    monkeypatch.setattr(transcripts, "FOREIGN_SHARE", 1.0)
    for kind in ("validator", "verifier"):
        for row in rows_of(world, kind, 20):
            _, request, *_, evidence = world[2].decode(row.ids).split("<|im_start|>user")
            names = [line.split(" | ")[0][3:] for line in evidence.splitlines() if line[:3] in ("1. ", "2. ", "3. ")]
            assert names and not all(name in request for name in names)
    verdicts = [answer(world, r) for r in rows_of(world, "validator", 20)]
    assert all('"invalid"' in v for v in verdicts)


@pytest.mark.slow
def test_replay_learns_the_roles_and_is_a_function_of_the_step():
    overrides = ["rti.replay.rows=4", "env.train_tasks=60", "env.min_population=5000", "optimizer.lr=1e-3"]
    config = config_lib.load_config(CONFIG, overrides)
    policy = load_policy(config)
    source = EnvironmentSource(Navigation, Navigation.Config(**KEYS), 6)
    optimizer = make_optimizer(config.optimizer, policy.params, 10)
    step = replay.Replay(config, policy, source, source.tasks("train"), optimizer)

    def fresh():
        noisy = jax.tree.map(lambda x: x * 1.05, policy.params)
        return init_state(noisy, optimizer, policy.mesh)

    first, metrics = step(fresh(), 3)
    again, same = step(fresh(), 3)
    assert metrics == same
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert step(fresh(), 4)[1] != metrics
    broken = fresh()
    broken = broken._replace(params=jax.tree.map(lambda x: x * np.nan, broken.params))
    kept, _ = step(broken, 3)
    assert int(kept.step) == 0, "an update with a gradient that is not finite was counted"
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept.opt_state))
    state, losses = fresh(), []
    for _ in range(8):
        state, metrics = step(state, 3)  # the same transcripts each time
        losses.append(metrics["replay/loss"])
    assert losses[-1] < 0.7 * losses[0]


def test_replay_needs_transcripts():
    config = config_lib.load_config(CONFIG, ["rti.replay.rows=4"])
    other = config.model_copy(update={"env": config.env.model_copy(update={"name": "tau2"})})
    with pytest.raises(config_lib.ConfigError, match="rti.replay.rows"):
        replay.check(other)
    replay.check(config)


def test_transcripts_without_own_turns_take_scripted_ones(world):  # noqa: F811
    env, tasks, chat = world
    stream = Transcripts(
        env, tasks, chat, style="compact", shares={"agent": 1}, leak_share=0, text_weight=0, seed=0, own_share=1.0
    )
    assert next(iter(stream)).kind == "agent"
