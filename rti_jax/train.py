"""`rti train CONFIG`: the main job.

    rti train configs/quickstart.yaml
    rti train configs/quickstart.yaml name=quickstart_grpo rti.enabled=false     plain GRPO, same budget

One step, in the order in which data flows (RTI, arXiv 2610.13438; docs/intervention.md):

    tasks -> groups of G trajectories (vLLM, weights version v)
          -> groups that failed entirely: intervened rollouts, scored by the learner under v, gated, one member replaced
             (a baseline instead: a teacher's rollout, rti_jax/luffy.py, or its log-probabilities, distillation.py)
          -> advantages on the rewards after replacement -> packed micro-batches
          -> update -> weights version v + 1 to the engine -> metrics, checkpoint

With `rollout.staleness=1` the next step's groups are sampled while the update runs (rti_jax/overlap.py).

Everything that a step draws is a function of (seed, step), and a checkpoint holds parameters, optimizer and step, so a
run that was interrupted goes on where it was. Choices that the paper leaves open are marked "ours" in docs/config.md.

On several hosts every process runs this program (rti_jax/hosts.py, docs/clusters.md): tasks of a step are divided by
their number, each host samples its own with its own engine, and all compute each update together. Process 0 alone
writes the run folder, metrics and transcripts of all hosts included; checkpoints are written by all.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rti_jax import (
    advantages,
    budget,
    evaluate,
    frozen,
    luffy,
    redaction,
    role_eval,
    roles,
    runs,
    summary,
    task_sets,
    trackers,
    weight_sync,
)
from rti_jax import config as config_lib
from rti_jax.alarms import Alarms
from rti_jax.batching import PackedBatch
from rti_jax.chat import Chat
from rti_jax.checkpoint import Checkpoints
from rti_jax.collection import Collected, Collection
from rti_jax.engine import Engine, GenerateRequest, GenerateResult, make_engine
from rti_jax.engine_errors import EngineDiedError, EngineError
from rti_jax.frozen_servers import FrozenServers
from rti_jax.guards import Guards
from rti_jax.hosts import Hosts, join, own_servers
from rti_jax.joint_scoring import JointScorer, Row
from rti_jax.metrics import Recorder, Stopwatch, Unrecorded, over_hosts, read_metrics
from rti_jax.overlap import Beside
from rti_jax.rollout import Player
from rti_jax.run_tasks import RunTasks
from rti_jax.runtime import load_policy
from rti_jax.training_state import Learner
from rti_jax.types import Group

logger = logging.getLogger(__name__)
PROBE_ROWS = 8  # sequences that are sampled and scored after each weight update


def main(config: config_lib.Config) -> int:
    """Trains, or goes on with an interrupted run; returns the exit code."""
    try:
        with join(config.hosts) as hosts:
            run, finished = hosts.from_first(lambda: _open(config))
            if not finished:
                with runs.locked(run) if hosts.first else contextlib.nullcontext():
                    finished = asyncio.run(_train(config, run, hosts))
            if hosts.first and finished:
                print(summary.finished(run, config))
    except asyncio.CancelledError:  # SIGTERM; Ctrl-C is a KeyboardInterrupt
        finished = False
    if not finished:
        print("terminated; the same command goes on from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def _open(config: config_lib.Config) -> tuple[runs.Run, bool]:
    """The run folder, and whether the run is finished."""
    trackers.check(config.logging)
    if hidden := redaction.hidden_keys(config.model_dump()):  # of another run's config.yaml
        raise config_lib.ConfigError(f"{hidden[0]} is hidden in this config (***): give it again, e.g. from $VARIABLE")
    run = runs.open_run(config)
    return run, run.finished(budget.end(config, run.folder).step)


async def _train(config: config_lib.Config, run: runs.Run, hosts: Hosts) -> bool:
    """Whatever a user may have got wrong is read before vLLM is started, which takes a while.

    Returns False if all hosts were told to end early.
    """
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    config = own_servers(config, hosts)
    tasks = RunTasks.load(config)
    learner = Learner(config, load_policy(config), run, tasks, hosts)
    with Recorder.of(config, run.folder, learner.step) if hosts.first else Unrecorded() as recorder:
        recorder.phase("starting vLLM")
        hosts.at("starting vLLM")
        starting = asyncio.create_task(asyncio.to_thread(make_engine, config.model.path, config))
        try:
            engine = await asyncio.shield(starting)  # a thread cannot be cancelled: its engine is closed below
            async with frozen.serving(config.frozen_folders, config) as others:
                return await Trainer(config, run, learner, engine, tasks, recorder, others, hosts).run()
        finally:
            if not (starting.done() and starting.exception()):
                await (await starting).close()


class Trainer:
    """The loop: what happens in a step, and around the steps."""

    def __init__(
        self,
        config: config_lib.Config,
        run: runs.Run,
        learner: Learner,
        engine: Engine,
        tasks: RunTasks,
        recorder: Recorder | Unrecorded,
        others: Mapping[str, Engine],
        hosts: Hosts | None = None,
    ):
        self.config, self.run_folder, self.learner, self.engine, self.recorder = config, run, learner, engine, recorder
        self.tasks, self.hosts = tasks, hosts or Hosts()
        self.player = Player(tasks.source, learner.policy.chat, engine, config)
        chat, endpoints = learner.policy.chat, roles.connect(config.rti)
        engines = {role: others[key] for role in roles.ROLES if (key := f"rti.roles.{role}.model") in others}
        self.roles = roles.Roles(chat, engine, config.sampling, config.rti, endpoints, engines)
        self.scorer = JointScorer(self.hosts, self._score, patience=1.0 if config.gate.scope == "turn" else None)
        self._engines = list(dict.fromkeys([engine, *others.values()]))
        self.guards = Guards(config.stop, run.folder, self.hosts.index)
        self.guards.restore(learner.extra.get("statistics", {}).get("guards", {}))
        lines = read_metrics(run.folder / "metrics.jsonl") if self.hosts.first else []  # up to the checkpoint
        self.budget, self.alarms = budget.Budget(config.stop, lines), Alarms(config, lines)
        self._watch = Stopwatch()
        self._told_to_end, self._recorded = False, 0  # the last step whose line is on disk
        self._next: Collected | None = None  # sampled and not trained yet, with rollout.staleness
        self._ahead = False  # whether it is being sampled
        self._updated = threading.Event()
        self._updated.set()
        if stored := learner.extra.pop("next", None):  # as JSON it would stay in memory for the whole run
            self._next = Collected.restored(stored, self.hosts)
        teacher = luffy_teacher(config, tasks, chat, others.get("loss.teacher.path"))
        self.collect = Collection(
            config, tasks.trained, self.player, self.roles, self.scorer, teacher, recorder, self._sampled, self.hosts
        )
        recorder.watch(lambda: {"policy": self.player.usage, **self.roles.usage}, self.player.concurrency)

    async def run(self) -> bool:
        """All steps that are left, evaluations, export and report. A cancelled run saves its last whole step.

        On several hosts SIGTERM ends the run after the step in which any of them received it; returns False then.
        """
        config, learner, hosts = self.config, self.learner, self.hosts
        if not hosts.alone:  # one that stopped by itself would leave the others waiting
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
        # On several hosts a save ends for all of them before any goes on.
        with Checkpoints(self.run_folder.checkpoints, config.checkpoint.keep, background=hosts.alone) as checkpoints:
            if learner.version:
                await weight_sync.sync(self.engine, learner.policy.model, learner.state.params, learner.version)
            saved, saved_at = learner.step, time.monotonic()
            spent = hosts.from_first(self.budget.spent)
            if hosts.first and learner.step < config.steps and not spent:
                self.run_folder.report.unlink(missing_ok=True)  # written last, it says that the run is finished
            try:
                if learner.step in (0, config.steps) or spent or self._evaluates:
                    await self.evaluate()  # also one that was interrupted
                while learner.step < config.steps and not spent:
                    await self.step()
                    checkpoints.check()
                    overdue = time.monotonic() - saved_at > 60 * config.checkpoint.minutes
                    states = hosts.exchange((self._told_to_end, overdue, self.budget.spent()))
                    ending, (_, overdue, spent) = any(told for told, _, _ in states), states[0]
                    last = learner.step == config.steps or bool(spent)
                    if learner.step % config.checkpoint.every == 0 or overdue or last or ending:
                        self.save(checkpoints)
                        saved, saved_at = learner.step, time.monotonic()
                    if ending:
                        return False
                    if last or self._evaluates:
                        await self.evaluate()
            except BaseException:
                # A save takes all hosts, and the others know of nothing. A step without its line is made again.
                if learner.step > saved and self._recorded == learner.step and hosts.alone:
                    self.save(checkpoints)
                raise
        self._at("export")
        await asyncio.to_thread(summary.export, self.run_folder.export, learner)
        if hosts.first:
            await asyncio.to_thread(summary.write_report, self.run_folder)
        return True

    async def step(self) -> None:
        """One step of the algorithm; the learner's step counts up when it is complete."""
        config, learner, n = self.config, self.learner, self.learner.step
        self._watch = Stopwatch()
        collected = self._next or await self.collect(n)
        metrics = ({"rollout/staleness": 0.0} if config.rollout.staleness else {}) | collected.metrics
        for each in self._engines:
            await each.sleep()
        with self._timed("update"):
            packed = learner.pack(collected.own, collected.numbers, collected.total)
        async with self._sampling(n + 1) or contextlib.nullcontext() as following:
            with self._timed("update"):  # an interruption comes before it or after it, never in between
                metrics |= await self._update(packed, following)
                learner.step, self._next = n + 1, None
            self._write_groups(collected.everyone)  # without them the step has no line, and is made again
            try:
                updated = learner.version == n + 1
                if following:
                    with self._timed("rollout"):
                        self._next = await following.result()
                    metrics |= following.metrics()
                    self._next.metrics["rollout/staleness"] = float(updated)
                with self._timed("sync"):
                    for each in self._engines:
                        await each.wake_up()
                    if updated:
                        await weight_sync.sync(self.engine, learner.policy.model, learner.state.params, n + 1)
                with self._timed("probe"):
                    gap = await self.scorer.during(self.probe(collected.own))
                    gaps, faults = zip(*self.hosts.exchange((gap, self.engine.pop_metrics())), strict=True)
                    metrics["mismatch/after_max"] = max((g for g in gaps if not math.isnan(g)), default=math.nan)
                    metrics |= over_hosts(faults)
            finally:
                self._record(n + 1, self.engine.pop_metrics() | metrics)  # without the probe this host's faults alone
                self._recorded = n + 1
        self.guards.check(n + 1, metrics, packed)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step, with the run's totals and alarms; process 0 has the metrics of all hosts."""
        alarms, warnings = self.alarms.check(metrics)
        self.recorder.write(step, {**metrics, **self._watch.metrics(), **self.budget.add(metrics), **alarms})
        for warning in warnings:
            self.recorder.warn(warning)

    def _sampling(self, n: int) -> Beside | None:
        """Begins with the groups of step n, under the weights of now; None if they wait for their turn."""
        if not self.config.rollout.staleness or n == self.config.steps:
            return None
        if self.collect.intervenes:
            self.learner.hold()
        self._ahead = True
        self._updated.clear()
        return Beside(self._collect_ahead(n))

    async def _collect_ahead(self, n: int) -> Collected:
        try:
            return await self.collect(n)
        finally:
            self._ahead = False
            self.learner.release()

    async def _update(self, packed: Sequence[PackedBatch], following: Beside | None) -> dict[str, float]:
        """The learner's update: in this thread, or in another one while this one samples."""
        if not following:
            return self.learner.update(packed)
        try:
            return await following.compute(lambda: self.learner.update(packed))
        finally:
            self._updated.set()

    def _score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """The learner's scores; on several hosts after an update: all start the mesh's programs in one order."""
        if not self.hosts.alone:
            self._updated.wait()
        return self.learner.score(rows)

    def _write_groups(self, groups: Sequence[Group]) -> None:
        """The transcripts of a step that was made."""
        if not self.hosts.first:
            return
        distilled = self.config.loss.baseline == "opd"  # its advantages are per token
        assigned = {} if distilled else advantages.assign_advantages(groups, self.config.loss.variant).advantages
        runs.write_groups(self.run_folder.trajectories(self.learner.step), groups, assigned)

    async def probe(self, groups: Sequence[Group]) -> float:
        """Engine against learner after the update: the largest gap on fresh samples, scored by the learner."""
        prompts = list({t.turns[0].prompt_ids: None for g in groups for t in g.trajectories if t.turns})[:PROBE_ROWS]
        sampling, stop = self.config.sampling, self.player.chat.stop_ids
        requests = [
            GenerateRequest(p, min(sampling.max_tokens, 64), sampling.temperature, i, stop)
            for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(self._answer, requests))
        answered = [(r, a) for r, a in zip(requests, answers, strict=True) if a]
        scored = await self.scorer([(r.prompt_ids, a.ids) for r, a in answered])
        gaps = [np.abs(s - np.asarray(a.logprobs)) for s, (_, a) in zip(scored, answered, strict=True)]
        return float(max((g.max() for g in gaps if g.size), default=math.nan))

    async def _answer(self, request: GenerateRequest) -> GenerateResult | None:
        """The engine's answer, None for one that failed: that is no reason to end a run."""
        try:
            return await self.engine.generate(request)
        except EngineDiedError:
            raise
        except EngineError as error:
            logger.warning("a request of the probe: %s", error)
            return None

    @property
    def _evaluates(self) -> bool:
        """Whether this step is one of `eval.every`."""
        return bool(self.config.eval.every) and self.learner.step % self.config.eval.every == 0

    async def evaluate(self) -> None:
        """Pass@k on the held-out tasks with the weights of now, unless this step's file is there already."""
        step, hosts, held_out = self.learner.step, self.hosts, self.tasks.held_out
        path = self.run_folder.evaluation(step)
        if hosts.from_first(path.is_file):
            return
        name = f"evaluation after {step} steps"
        self._tell(name)
        with self.recorder.episodes(name, len(hosts.share(len(held_out))) * self.config.eval.trials) as seen:
            result, groups = await evaluate.evaluate(
                self.player, held_out, self.config, on_episode=hosts.living(seen), hosts=hosts
            )
        self.player.pop_usage()  # not the training's
        if self.config.eval.roles:
            await self.measure_roles()
        if hosts.first:
            runs.write_groups(path.with_suffix(".jsonl"), groups, {})
            runs.write_json(path, {"step": step, **result})
            self.recorder.evaluation(step, result)
        if self.config.eval.keep_best and hosts.from_first(lambda: step == summary.best_step(self.run_folder)):
            summary.export(self.run_folder.best, self.learner)

    async def measure_roles(self) -> None:
        """How right the three roles are with the weights of now, on held-out tasks."""
        step, tasks = self.learner.step, task_sets.limited(self.tasks.held_out, self.config.eval.roles)
        own, name = self.hosts.share(len(tasks)), f"roles after {step} steps"
        self._tell(name)
        with self.recorder.episodes(name, len(own)) as seen:
            measuring = role_eval.measure(
                self.player,
                self.roles,
                self.scorer,
                [tasks[i] for i in own],
                step=step,
                numbers=own,
                on_episode=self.hosts.living(seen),
            )
            result, turns = await self.scorer.during(measuring)
        self.roles.pop_usage(), self.player.pop_usage()  # not the training's
        parts = self.hosts.collect(turns)
        if not self.hosts.first:
            return
        if not self.hosts.alone:
            turns = [turn for part in parts for turn in part]
            result = role_eval.summarize(turns, self.config.seed)
        path = self.run_folder.roles(step)
        runs.write_lines(path.with_suffix(".jsonl"), map(dataclasses.asdict, turns))
        runs.write_json(path, {"step": step, **result})
        self.recorder.roles(step, role_eval.metrics(result))

    def save(self, checkpoints: Checkpoints) -> None:
        """A checkpoint of the last whole step, with the groups of the next one if they are there."""
        self._at(f"saving the checkpoint of step {self.learner.step}")
        extra = self.learner.identity | {"version": self.learner.version, "statistics": {"guards": self.guards.state}}
        if self._next and self.hosts.first:
            extra["next"] = self._next.as_json()
        checkpoints.save(self.learner.step, self.learner.state, extra)

    def _end(self) -> None:
        self._told_to_end = True

    def _at(self, phase: str) -> None:
        """Says what is going on, to whoever watches and to the other hosts."""
        self.recorder.phase(phase)
        self._tell(phase)

    def _tell(self, phase: str) -> None:
        self.hosts.at(f"step {self.learner.step + 1}, {phase}")

    def _sampled(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A phase of the collection; beside an update it is none of the step's."""
        return contextlib.nullcontext() if self._ahead else self._timed(name)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._at(name)
        with self._watch.timed(name):
            yield


def luffy_teacher(config: config_lib.Config, tasks: RunTasks, chat: Chat, engine: Engine | None) -> luffy.Guide | None:
    """Where LUFFY's rollouts come from; None without LUFFY."""
    teacher = config.loss.teacher
    if config.loss.baseline != "luffy":
        return None
    if teacher.rollouts:
        return luffy.Stored(teacher.rollouts, chat, tasks.source, tasks.trained, config)
    engine = engine or FrozenServers(teacher.urls, chat.tokenizer, config.rollout.concurrency)
    return luffy.Played(Player(tasks.source, chat, engine, config), config)
