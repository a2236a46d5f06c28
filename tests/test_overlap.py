"""Sampling beside the update: the numbers of one after the other, one version behind, and nothing lost on the way.

As a script it is one of two hosts of such a run: python tests/test_overlap.py PORT INDEX FOLDER.
"""

import asyncio
import contextlib
import json
import pathlib
import runpy
import shutil
import sys
import threading
import zlib

import jax
import numpy as np
import pytest
from stand_in import LAYERS, WIDTH, StandIn, mesh

from rti_jax import checkpoint, recorded, runs, train
from rti_jax.collection import Collected
from rti_jax.config import Config, ConfigError, HostsConfig, validate
from rti_jax.disk import DiskFullError
from rti_jax.engine_errors import EngineDiedError
from rti_jax.hosts import Hosts, join
from rti_jax.metrics import Recorder, Unrecorded, read_metrics
from rti_jax.overlap import Beside, whole
from rti_jax.run_tasks import RunTasks
from rti_jax.runtime import Policy
from rti_jax.seeds import derive_seed
from rti_jax.train import Trainer
from rti_jax.training_state import Learner
from rti_jax.types import Group, Status, Trajectory, Turn
from tests.fakes import FakeEngine, call, tiny_chat

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROLES = {
    "validator": '{"verdict": "invalid", "reason": "not the code"}',
    "corrector": call("answer", code="X4711"),
    "verifier": '{"verdict": "accept"}',
}


@pytest.fixture(autouse=True, scope="module")
def _without_a_model_folder():
    with without_a_model_folder():
        yield


@contextlib.contextmanager
def without_a_model_folder():
    """The loop with the stand-in: parameters go to the engine as they are, and nothing is exported."""

    async def sync(engine, model, params, version):
        return await engine.update_weights(jax.tree.leaves(params), version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.weight_sync, "sync", sync)
        patch.setattr(train.summary, "export", lambda folder, learner: None)
        yield


def policy():
    """The stand-in with a vocabulary that holds the fakes' tokens."""
    on, chat, rng = mesh(jax.process_count()), tiny_chat(), np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(0, 0.4, shape).astype(np.float32)

    layers = {
        "mixer": {"kernel": draw(LAYERS, WIDTH, WIDTH), "bias": draw(LAYERS, WIDTH)},
        "norm": {"scale": 1 + draw(LAYERS, WIDTH)},
    }
    params = {"embed_tokens": {"embedding": draw(len(chat.tokenizer), WIDTH)}, "layers": layers}
    whole = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec())
    return Policy(StandIn(), jax.device_put(params, whole), on, chat)


def config_of(folder, steps=3, staleness=1, **sections):
    base = {
        "steps": steps,
        "runs_dir": str(folder),
        "env": {"name": "tests.fakes:Lookup", "max_turns": 2},
        "rollout": {"groups_per_step": 3, "group_size": 2, "staleness": staleness},
        "sampling": {"max_tokens": 100, "max_context": 1024, "thinking": False},
        "rti": {"prompts": "compact", "leak_guard": False},
        "gate": {"delta": float("inf")},
        "optimizer": {"lr": 1e-3},
        "batch": {"buckets": [1024], "rows_per_microbatch": 2},
        "eval": {"trials": 1, "limit": 1},
        "checkpoint": {"every": 1, "keep": 9},
    }
    return Config.model_validate({k: v | sections.pop(k, {}) if isinstance(v, dict) else v for k, v in base.items()})


class Engine(FakeEngine):
    """Which answer it gives depends on the weights that it was given, or on their version alone."""

    def __init__(self, chat, exact=True):
        super().__init__(chat, self._answer)
        self.digest, self.exact = 0, exact

    def _answer(self, request):
        right = (
            derive_seed(request.seed, self.digest) % 4 == 0
        )  # a step in which all succeed has no gradient, and no new version
        return ROLES.get(request.role) or call("answer", code="X4711" if right else "1")

    async def update_weights(self, tensors, version):
        self.digest = 0 if self.exact else version
        for values in tensors if self.exact else ():
            self.digest = zlib.crc32(np.ascontiguousarray(values), self.digest)
        return await super().update_weights(tensors, version)


COMPILED = {}  # the same programs serve all runs here


@contextlib.contextmanager
def trainer_of(config, hosts=None, exact=True):
    hosts = hosts or Hosts()
    run = hosts.from_first(lambda: runs.open_run(config))
    tasks = RunTasks.load(config)
    learner = Learner(config, policy(), run, tasks, hosts)
    for part in ("_update", "_scorer"):
        setattr(learner, part, COMPILED.setdefault((part, config.rollout.staleness), getattr(learner, part)))
    with Recorder(run.folder, config.steps, learner.step) if hosts.first else Unrecorded() as recorder:
        yield Trainer(config, run, learner, Engine(learner.policy.chat, exact), tasks, recorder, {}, hosts)


def trained(config, hosts=None, exact=True):
    """The trainer of a whole run."""
    with trainer_of(config, hosts, exact) as trainer:
        assert asyncio.run(trainer.run())
    return trainer


async def one_after_the_other(trainer):
    """What the steps compute, in one thread: with staleness a batch is sampled, and scored, before the update."""
    config, learner, engine = trainer.config, trainer.learner, trainer.engine
    versions, following = [], await trainer.collect(0)
    for n in range(config.steps):
        batch = following
        versions.append({t.policy_version for g in batch.own for m in g.trajectories for t in m.turns})
        ahead = config.rollout.staleness and n + 1 < config.steps
        following = await trainer.collect(n + 1) if ahead else None
        updated = learner.update(learner.pack(batch.own, batch.numbers, batch.total))["optimizer/updates"]
        learner.step = n + 1
        if updated:
            await train.weight_sync.sync(engine, learner.policy.model, learner.state.params, n + 1)
        if not ahead and n + 1 < config.steps:
            following = await trainer.collect(n + 1)
    return versions


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def versions(run, step):
    lines = [json.loads(line) for line in run.trajectories(step).open()]
    return {turn["policy_version"] for line in lines for turn in line["turns"]}


def untimed(line):
    return {k: v for k, v in line.items() if not k.startswith("time/") and "seconds" not in k and "compile" not in k}


class TestRun:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        """Whatever is sampled beside an update is scored after it, when the learner has other weights already."""
        with trainer_of(config_of(tmp_path_factory.mktemp("runs"), steps=4)) as trainer:
            score = trainer.learner.score
            trainer.learner.score = lambda rows: trainer._updated.wait() and score(rows)
            assert asyncio.run(trainer.run())
        return trainer

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_its_weights_are_those_of_the_steps_one_after_the_other(self, run, tmp_path, staleness):
        config = config_of(tmp_path, steps=4, staleness=staleness)
        with trainer_of(config) as trainer:
            seen = asyncio.run(one_after_the_other(trainer))
        assert seen == ([{0}, {0}, {1}, {2}] if staleness else [{0}, {1}, {2}, {3}])
        whole = run if staleness else trained(config)
        same(whole.learner.state, trainer.learner.state)
        assert [versions(whole.run_folder, n + 1) for n in range(4)] == seen

    def test_its_metrics_say_how_stale_a_batch_is_and_what_was_hidden(self, run):
        lines = read_metrics(run.run_folder.folder / "metrics.jsonl")
        assert [line["rollout/staleness"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
        assert all(np.isfinite(line["loss/total"]) for line in lines)
        for line in lines[:-1]:
            assert 0 <= line["overlap/hidden_seconds"] <= line["overlap/sampling_seconds"]
        assert "overlap/sampling_seconds" not in lines[-1]  # there is no next step to sample for

    def test_corrections_are_scored_by_the_weights_that_sampled_them(self, run, tmp_path):
        """The second batch was sampled beside the first update, by the weights before it."""
        groups, _, _ = recorded.read_groups(run.run_folder.trajectories(2))
        turns = [turn for g in groups for m in g.trajectories for turn in m.corrected_turns]
        assert turns, "no intervention was admitted: the test says nothing"
        before = Learner(run.config, policy(), runs.Run(tmp_path), None)
        before._scorer = run.learner._scorer
        after = checkpoint.restore(run.run_folder.checkpoints, run.learner.state, 1).state
        rows = [(turn.prompt_ids, turn.response_ids) for turn in turns]
        found = np.concatenate([turn.correction.rollout_logprobs for turn in turns])
        np.testing.assert_allclose(found, np.concatenate(before.score(rows)), rtol=1e-5)
        before.state = after
        assert np.abs(found - np.concatenate(before.score(rows))).max() > 1e-3

    def test_one_that_was_killed_ends_with_the_same_weights_and_records(self, run, tmp_path):
        """After step 2: the checkpoint holds the batch of step 3, which the weights before its own have sampled."""
        old, again = run.run_folder.folder, tmp_path / run.config.name
        for name in ("config.yaml", "metrics.jsonl", "checkpoints/2", "trajectories/step_000001.jsonl"):
            (again / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if name == "checkpoints/2" else shutil.copy)(old / name, again / name)
        resumed = trained(run.config.model_copy(update={"runs_dir": str(tmp_path)}))
        same(resumed.learner.state, run.learner.state)
        for name in ("step_000003.jsonl", "step_000004.jsonl"):
            assert (again / "trajectories" / name).read_bytes() == (old / "trajectories" / name).read_bytes()
        lines = [list(map(untimed, read_metrics(folder / "metrics.jsonl"))) for folder in (old, again)]
        assert lines[0] == lines[1]


class TestHosts:
    @pytest.mark.exhaustive
    def test_two_sample_and_learn_what_one_does(self, tmp_path):
        from test_hosts import pair

        one = trained(config_of(tmp_path / "one"), exact=False)
        for process in pair([__file__], tmp_path / "two", devices=1):
            _, errors = process.communicate(timeout=500)
            assert process.returncode == 0, errors[-3000:]
        folders = one.run_folder.folder, tmp_path / "two" / one.config.name
        for a, b in zip(*(read_metrics(folder / "metrics.jsonl") for folder in folders), strict=True):
            assert untimed(a).keys() == untimed(b).keys()
            for name in ("loss/total", "optimizer/grad_norm", "policy/ratio", "rollout/staleness", "rti/replaced"):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
        for n in (1, 2, 3):
            groups = [recorded.read_groups(runs.Run(folder).trajectories(n))[0] for folder in folders]
            ids = [
                [(t.id, x.policy_version, x.response_ids) for g in part for t in g.trajectories for x in t.turns]
                for part in groups
            ]
            assert ids[0] == ids[1]

    def test_a_stored_batch_is_dealt_to_the_hosts_of_now(self):
        names = ("a", "b", "c")
        members = [Trajectory(f"{g}/0", g, 0, g, (), Status.TIMEOUT, None) for g in names]
        batch = Collected([], range(0), 3, [Group(m.group_id, m.task_id, (m,)) for m in members], {"x/y": float("nan")})
        stored = json.loads(json.dumps(batch.as_json(), allow_nan=False))
        alone, first, second = (Collected.restored(stored, Hosts(*which)) for which in ((), (0, 2), (1, 2)))
        assert alone.own == alone.everyone == first.everyone == batch.everyone and np.isnan(alone.metrics["x/y"])
        assert [[g.id for g in part.own] for part in (first, second)] == [["a", "c"], ["b"]]
        assert (list(second.numbers), second.total) == ([1], 3)


class TestInterruption:
    """A run that is told to end, or fails, while it updates and samples."""

    def start(self, trainer, held):
        """Runs; the first update waits to be allowed, and the collection beside it, if that is held, for ever."""
        update, collect, loop = trainer.learner.update, trainer.collect, asyncio.get_running_loop()
        begun, allowed, sampled = asyncio.Event(), threading.Event(), asyncio.Event()

        def slow_update(packed):
            loop.call_soon_threadsafe(begun.set)
            allowed.wait()
            return update(packed)

        async def slow_collect(n):
            found = await collect(n)
            if n == 1 and held == "collection":
                await asyncio.Event().wait()
            if n == 1:
                sampled.set()
            return found

        slow_collect.intervenes = True
        trainer.learner.update, trainer.collect = slow_update, slow_collect
        return asyncio.ensure_future(trainer.run()), begun, allowed, sampled

    @pytest.mark.parametrize("held", ["collection", "update"])
    def test_the_step_is_finished_and_saved(self, tmp_path, held):
        config = config_of(tmp_path)

        async def interrupted(trainer):
            running, begun, allowed, sampled = self.start(trainer, held)
            await begun.wait()
            if held == "update":
                await sampled.wait()
            running.cancel()
            await asyncio.sleep(0.01)
            assert not running.done()  # it waits for the update
            allowed.set()
            with pytest.raises(asyncio.CancelledError):
                await running

        with trainer_of(config) as trainer:
            asyncio.run(interrupted(trainer))
        run = trainer.run_folder
        saved = checkpoint.restore(run.checkpoints, trainer.learner.state)
        assert saved.step == 1 and ("next" in saved.extra) == (held == "update")
        assert len(read_metrics(run.folder / "metrics.jsonl")) == 1 and versions(run, 1) == {0}
        resumed = trained(config)
        assert "next" not in resumed.learner.extra, "the restored batch would stay in memory for the whole run"
        # a batch that was lost is sampled again, by the weights of its own step
        assert [versions(run, n) for n in (2, 3)] == ([{0}, {1}] if held == "update" else [{1}, {1}])
        lines = read_metrics(run.folder / "metrics.jsonl")
        assert [line["rollout/staleness"] for line in lines] == [0.0, float(held == "update"), 1.0]

    def test_a_collection_that_fails_leaves_its_update(self, tmp_path):
        config = config_of(tmp_path)
        with trainer_of(config) as trainer:
            answer = trainer.engine.answer
            trainer.engine.answer = lambda r: EngineDiedError("gone") if trainer._ahead else answer(r)
            with pytest.raises(EngineDiedError, match="gone"):
                asyncio.run(trainer.run())
        assert checkpoint.newest(trainer.run_folder.checkpoints) == 1
        assert len(read_metrics(trainer.run_folder.folder / "metrics.jsonl")) == 1

    def test_an_update_that_fails_ends_the_collection(self, tmp_path):
        def broken(packed):
            raise RuntimeError("out of memory")

        with trainer_of(config_of(tmp_path)) as trainer:
            trainer.learner.update = broken
            with pytest.raises(RuntimeError, match="out of memory"):
                asyncio.run(trainer.run())
        assert checkpoint.newest(trainer.run_folder.checkpoints) is None and trainer.learner._held is None

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_a_step_whose_trajectories_cannot_be_written_is_made_again(self, tmp_path, monkeypatch, staleness):
        def full(path, *_):
            raise DiskFullError(f"no space left to write {path.name}")

        config = config_of(tmp_path, staleness=staleness, checkpoint={"every": 99})
        with trainer_of(config) as trainer, monkeypatch.context() as patch:
            patch.setattr(train.runs, "write_groups", lambda path, *rest: None if "evals" in path.parts else full(path))
            with pytest.raises(DiskFullError, match="step_000001.jsonl"):
                asyncio.run(trainer.run())
        run = trainer.run_folder
        assert checkpoint.newest(run.checkpoints) is None and not read_metrics(run.folder / "metrics.jsonl")
        trained(config)
        assert [versions(run, n) for n in (1, 2, 3)] == ([{0}, {0}, {1}] if staleness else [{0}, {1}, {2}])


class TestBeside:
    def test_seconds_that_were_hidden_are_those_of_both(self):
        now = [0.0]

        async def work():
            now[0] += 3.0
            await asyncio.sleep(0)
            return "sampled"

        async def main(more):
            beside = Beside(work(), clock=lambda: now[0])

            def compute():
                return "updated"

            async with beside:
                assert await beside.compute(compute) == "updated"
                assert await beside.result() == "sampled"
            return beside.metrics()

        assert asyncio.run(main(0)) == {"overlap/sampling_seconds": 3.0, "overlap/hidden_seconds": 3.0}

    def test_what_is_whole_is_interrupted_at_the_next_await_and_once(self):
        seen = []

        async def work():
            await asyncio.sleep(0.02)
            return 7

        async def main():
            try:
                seen.append(await whole(work()))
                await asyncio.sleep(0)
                seen.append("not reached")
            except asyncio.CancelledError:
                seen.append(asyncio.current_task().uncancel())
                raise

        async def outer():
            task = asyncio.ensure_future(main())
            await asyncio.sleep(0)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(outer())
        assert seen == [7, 0]  # asyncio.run takes a Ctrl-C for one only if no other cancellation is left


class TestCorrection:
    """Ratios are to what was recorded when the batch was sampled."""

    def groups(self):
        def member(i):
            prompt, response = (5, 6, 7 + i), (20, 21, 22 + i)
            turn = Turn(f"g/{i}/0", prompt, response, (-5.0, -6.0 - i, -4.5), "stop", 0)
            return Trajectory(f"g/{i}", "g", i, "t", (turn,), Status.SUCCESS if i else Status.FAILURE, float(i))

        return [Group("g", "t", (member(0), member(1)))]

    def updated(self, tmp_path, **loss):
        config = config_of(tmp_path, loss=loss, batch={"buckets": [32]}, sampling={"max_context": 32})
        config = Config.model_validate(config.model_dump() | {"loss": config.loss.model_dump() | loss})
        learner = Learner(config, policy(), runs.Run(tmp_path), None)
        turns = [t for g in self.groups() for m in g.trajectories for t in m.turns]
        scores = np.concatenate(learner.score([(t.prompt_ids, t.response_ids) for t in turns]))
        gap = scores - np.concatenate([t.sampler_logprobs for t in turns])
        return learner.update(learner.pack(self.groups())), gap

    def test_by_the_ratio_itself(self, tmp_path):
        metrics, gap = self.updated(tmp_path)
        assert np.abs(gap).max() > 0.1
        assert metrics["policy/ratio"] == pytest.approx(np.exp(gap).mean(), rel=1e-4)

    def test_or_by_a_truncated_weight_beside_a_ratio_of_one(self, tmp_path):
        metrics, gap = self.updated(tmp_path, behavior="recompute", mismatch_clip=1.5)
        assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy/weight"] == pytest.approx(np.minimum(np.exp(gap), 1.5).mean(), rel=1e-4)
        assert metrics["policy/truncated"] == pytest.approx((np.exp(gap) > 1.5).mean())


class TestConfig:
    def test_it_is_off_and_turns_on_the_recorded_behaviour(self):
        assert Config().rollout.staleness == 0 and Config().loss.behavior == "recompute" and Config().on_policy
        stale = validate({"rollout": {"staleness": 1}}, Config)
        assert stale.loss.behavior == "engine" and not stale.on_policy
        decoupled = validate({"rollout": {"staleness": 1}, "loss": {"mismatch_clip": 2.0}}, Config)
        assert decoupled.loss.behavior == "recompute" and not decoupled.on_policy

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"loss": {"behavior": "recompute"}}, "loss.behavior=engine, or loss.mismatch_clip"),
            ({"engine": {"sleep": True}}, "engine.sleep=true"),
            ({"hosts": {"coordinator": "auto"}, "gate": {"scope": "turn"}}, "gate.scope=trajectory"),
            ({"rollout": {"staleness": 2}}, "rollout.staleness"),
        ],
    )
    def test_what_cannot_work_is_one_line(self, keys, message):
        with pytest.raises(ConfigError, match=message) as error:
            validate({"rollout": {"staleness": 1}} | keys, Config)
        assert "\n" not in str(error.value)

    def test_names_of_other_trainers(self):
        with pytest.raises(ConfigError, match="rollout.staleness"):
            validate({"rollout": {"max_head_offpolicyness": 1}}, Config)


def test_a_stored_batch_of_another_form_is_one_line():
    for data in ({}, {"groups": [{"id": "g"}], "metrics": {}}):
        with pytest.raises(ConfigError, match="next batch cannot be read"):
            Collected.restored(data, Hosts())


def test_the_benchmark_counts_a_step_once(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measured = runpy.run_path(str(ROOT / "benchmarks" / "overlap.py"))["measured"]
    off = measured([{"time/rollout": 4.0, "time/intervention": 2.0, "time/update": 3.0, "time/sync": 1.0}] * 2)
    assert (off["step"], off["sampling"], off["hidden"], off["waits"]) == (10.0, 6.0, 0.0, 6.0)
    beside = {"overlap/sampling_seconds": 6.0, "overlap/hidden_seconds": 3.0, "time/rollout": 3.0, "time/update": 3.0}
    on = measured([beside | {"time/sync": 1.0}, beside | {"time/sync": 3.0}])
    assert (on["step"], on["sampling"], on["hidden"], on["waits"]) == (8.0, 6.0, 3.0, 3.0)


def main(port, index, folder):
    config = HostsConfig(coordinator=f"127.0.0.1:{port}", processes=2, process_id=int(index))
    with without_a_model_folder(), join(config) as hosts:
        trained(config_of(folder), hosts, exact=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
