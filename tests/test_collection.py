"""A step's groups: one round as ever, and dynamic sampling until enough of them have a gradient."""

import asyncio
import contextlib

import pytest

from rti_jax import advantages
from rti_jax.collection import Collection, capped
from rti_jax.engine_errors import EngineError
from rti_jax.hosts import Hosts
from rti_jax.rollout import Player
from tests.fakes import FakeEngine, Lookup, call, lookup_source, lookup_task, small_config, tiny_chat

WRONG, RIGHT = call("answer", code="1"), call("answer", code="X4711")


class NoRecorder:
    def __init__(self):
        self.costs = {}

    @contextlib.contextmanager
    def episodes(self, name, total):
        yield lambda *_: None

    def collected(self, step, usage):
        self.costs[step] = usage


def collected(answer, tasks, step=0, **rollout):
    chat = tiny_chat()
    loss = {"variant": "dapo"}
    config = small_config(rollout={"group_size": 2, "groups_per_step": 2, **rollout}, loss=loss, rti={"enabled": False})
    engine = FakeEngine(chat, answer)
    player = Player(lookup_source(), chat, engine, config)
    collection = Collection(
        config, tasks, player, None, None, None, NoRecorder(), lambda name: contextlib.nullcontext(), Hosts()
    )
    found = asyncio.run(collection(step))
    assert found.everyone == found.own and found.total == len(found.numbers) == len(found.own)
    return config, (found.own, found.metrics)


def tasks(count=40):
    return [lookup_task(f"train/{i}") for i in range(count)]


def by_seed(request):
    """A policy that wins half of its episodes."""
    return RIGHT if request.seed % 2 else WRONG


class TestDynamicSampling:
    def test_one_round_is_what_it_was(self):
        _, (groups, metrics) = collected(lambda r: WRONG, tasks())
        assert len(groups) == 2 and metrics["rollout/rounds"] == 1 and metrics["rollout/groups"] == 2

    def test_rounds_go_on_until_enough_groups_have_a_gradient(self):
        config, (groups, metrics) = collected(by_seed, tasks(), max_rounds=20)
        useful = advantages.with_gradient(groups)
        assert len(useful) == 2 == advantages.assign_advantages(groups, "dapo").has_gradient * 2
        rounds = metrics["rollout/rounds"]
        assert 1 <= rounds < 20 and metrics["rollout/groups"] == 2 * rounds
        assert len({g.id for g in groups}) == len(groups) and len({g.task_id for g in groups}) == len(groups)

    def test_and_are_bounded(self):
        _, (groups, metrics) = collected(lambda r: WRONG, tasks(), max_rounds=3)
        assert metrics["rollout/rounds"] == 3 and len(groups) == 6 and not advantages.with_gradient(groups)

    def test_every_step_draws_tasks_of_its_own(self):
        drawn = [collected(lambda r: WRONG, tasks(12), step=n, max_rounds=3)[1][0] for n in (0, 1)]
        first, second = ({g.task_id for g in groups} for groups in drawn)
        assert len(first) == len(second) == 6 and not first & second

    def test_a_step_trains_no_more_than_its_share(self):
        _, (groups, _) = collected(by_seed, tasks(), max_rounds=20)
        useful = advantages.with_gradient(groups)
        assert [g.id for g in capped(groups, 1)] == [g.id for g in groups if g.id != useful[1].id]
        assert capped(groups, 2) == groups

    def test_nothing_could_be_played(self):
        broken = [lookup_task(f"train/{i}", fault="reset") for i in range(4)]
        with pytest.raises(EngineError, match="no episode of step 1 could be played: environment_error"):
            collected(lambda r: WRONG, broken)
        assert Lookup.closed

    def test_an_outage_after_that_is_a_step_without_valid_groups(self):
        """stop.dropped_steps decides how long it is waited for."""
        broken = [lookup_task(f"train/{i}", fault="reset") for i in range(4)]
        chat = tiny_chat()
        config = small_config(rollout={"group_size": 2, "groups_per_step": 2}, rti={"enabled": False})
        player = Player(lookup_source(), chat, FakeEngine(chat, lambda r: WRONG), config)
        collection = Collection(
            config, tasks(2), player, None, None, None, NoRecorder(), lambda name: contextlib.nullcontext(), Hosts()
        )
        assert asyncio.run(collection(0)).metrics["rollout/environment_error"] == 0
        [(step, costs)] = collection._recorder.costs.items()
        assert step == 1 and costs["policy"].calls > 0 and player.usage.calls == 0, "the display goes on with them"
        collection.tasks = broken
        found = asyncio.run(collection(1))
        assert found.metrics["rollout/environment_error"] == 4 and not any(g.valid for g in found.own)
