"""`rti train CONFIG`: the main job.

    rti train configs/quickstart.yaml
    rti train configs/quickstart.yaml name=quickstart_grpo rti.enabled=false     plain GRPO, same budget

One step, in the order in which data flows (RTI, arXiv 2610.13438; docs/intervention.md):

    tasks -> groups of G trajectories (vLLM, weights version v)
          -> groups that failed entirely: intervened rollouts, scored by the learner under v, gated, one member replaced
             (a baseline instead: a teacher's rollout, rti_jax/luffy.py, or its log-probabilities, distillation.py)
          -> advantages on the rewards after replacement -> packed micro-batches
          -> update -> weights version v + 1 to the engine -> metrics, checkpoint

Everything that a step draws is a function of (seed, step), and a checkpoint holds parameters, optimizer and step, so a
run that was interrupted goes on where it was. What the paper leaves open is chosen in config.py, marked "ours".
"""

import asyncio
import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envs.base import Task
from rti_jax import (
    advantages,
    batching,
    distillation,
    evaluate,
    frozen,
    intervention,
    luffy,
    replay,
    role_eval,
    roles,
    runs,
    summary,
    task_sets,
    weight_sync,
)
from rti_jax import config as config_lib
from rti_jax.chat import Chat
from rti_jax.checkpoint import Checkpoints, restore
from rti_jax.collection import Collection
from rti_jax.engine import Engine, GenerateRequest, make_engine
from rti_jax.environments import EnvironmentSource, environment_source, sample_tasks
from rti_jax.frozen_servers import FrozenServers
from rti_jax.guards import Guards
from rti_jax.learner import init_state, make_logprobs_step, make_optimizer, make_update_step, row_multiple
from rti_jax.logprobs import Scorer
from rti_jax.metrics import Recorder
from rti_jax.optimizer import total_updates
from rti_jax.replay import Replay
from rti_jax.rollout import Player
from rti_jax.runtime import Policy, load_policy
from rti_jax.types import Group, TrainBatch

PROBE_ROWS = 8  # sequences that are sampled and scored after each weight update


def main(config: config_lib.Config) -> int:
    """Trains, or goes on with an interrupted run; returns the exit code."""
    run = runs.open_run(config)
    if run.finished(config.steps):
        print(summary.finished(run, config))
        return 0
    try:
        with runs.locked(run):
            asyncio.run(_train(config, run))
    except asyncio.CancelledError:  # SIGTERM; Ctrl-C is a KeyboardInterrupt
        print("terminated; the same command goes on from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGTERM
    print(summary.finished(run, config))
    return 0


async def _train(config: config_lib.Config, run: runs.Run) -> None:
    """Whatever a user may have got wrong is read before vLLM is started, which takes a while."""
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tasks = TaskSets.load(config)
    learner = Learner(config, load_policy(config), run, tasks)
    with Recorder(run.folder, config.steps, learner.step) as recorder:
        recorder.phase("starting vLLM")
        starting = asyncio.create_task(asyncio.to_thread(make_engine, config.model.path, config))
        try:
            engine = await asyncio.shield(starting)  # a thread cannot be cancelled: its engine is closed below
            async with frozen.serving(config.frozen_folders, config) as others:
                await Trainer(config, run, learner, engine, tasks, recorder, others).run()
        finally:
            if not (starting.done() and starting.exception()):
                await (await starting).close()


class TaskSets(NamedTuple):
    """The environment, and what is trained and what is evaluated."""

    source: EnvironmentSource
    trained: list[Task]
    held_out: list[Task]

    @classmethod
    def load(cls, config: config_lib.Config) -> "TaskSets":
        """Raises ConfigError for unknown splits, tasks in both, and what would stop the run at its first step."""
        if config.sampling.max_context > max(config.batch.buckets):
            raise config_lib.ConfigError(
                f"sampling.max_context={config.sampling.max_context} lets rows grow beyond the largest of "
                f"batch.buckets={config.batch.buckets}; add a bucket or lower it"
            )
        source = environment_source(config.env)
        source.check()
        trained, held_out = task_sets.trained(source, config), task_sets.held_out(source, config)
        evaluate.check_disjoint(trained, held_out)
        roles.RolePrompts(config.rti.prompts)
        replay.check(config)
        if config.eval.roles:
            role_eval.check(source.cls)
        if config.loss.teacher.rollouts:
            luffy.read_episodes(config.loss.teacher.rollouts)
        sample_tasks(trained, 0, config.rollout.groups_per_step, config.seed, config.rollout.mix)
        return cls(source, trained, task_sets.limited(held_out, config.eval.limit))


class Learner:
    """The training state with its compiled functions, restored from the run's newest checkpoint if there is one."""

    def __init__(self, config: config_lib.Config, policy: Policy, run: runs.Run, tasks: "TaskSets"):
        self.config, self.policy = config, policy
        optimizer = make_optimizer(config.optimizer, policy.params, total_updates(config))
        self.state = init_state(policy.params, optimizer, policy.mesh)
        self.step = 0
        if restored := restore(run.checkpoints, self.state):
            self.state, self.step = restored.state, restored.step
            if self.step > config.steps:
                raise config_lib.ConfigError(
                    f"steps={config.steps}, but {run.folder} has a checkpoint of step {self.step}; raise steps "
                    "or give another name="
                )
            print(f"going on from the checkpoint after step {self.step}")
        recompute = config.loss.behavior == "recompute"
        self._on_policy = recompute and config.optimizer.minibatches == 1
        self._recompute = recompute and not self._on_policy
        self._logprobs = make_logprobs_step(policy.model, config, policy.mesh)
        by_source = config.rti.enabled or config.loss.baseline == "luffy"
        self._update = make_update_step(
            policy.model, config, policy.mesh, optimizer, on_policy=self._on_policy, norms_by_source=by_source
        )
        self._scorer = Scorer(policy.model, policy.mesh, config.sampling.temperature, config.batch.buckets)
        self._reference = load_policy(config).params if config.loss.kl_beta else None
        self._teacher = distillation.make_teacher(config, policy) if config.loss.baseline == "opd" else None
        for key, folder in config.frozen_folders.items():
            frozen.check_vocabulary(policy.chat, folder, key)
        replays = config.rti.replay.rows > 0
        self.replay = Replay(config, policy, tasks.source, tasks.trained, optimizer) if replays else None

    def score(self, rows: Sequence[intervention.Row]) -> list[np.ndarray]:
        """Log-probabilities of responses under the current weights, at the rollout temperature."""
        return self._scorer.score(self.state.params, rows)

    def pack(self, groups: Sequence[Group]) -> list[batching.PackedBatch]:
        """One packed batch per optimizer step."""
        return [
            batching.build(
                part,
                self.config,
                row_multiple=row_multiple(self.policy.mesh),
                leave_out_flat=not self.config.loss.on_every_token,
            )
            for part in batching.split_groups(groups, self.config.optimizer.minibatches)
        ]

    def update(self, packed: Sequence[batching.PackedBatch]) -> dict[str, float]:
        """All optimizer steps of a batch; those without a gradient are skipped, in every arm."""
        batches = [[self._filled(b) for b in p.microbatches] for p in packed]
        taught: dict[str, float] = {}
        if self._teacher:
            batches, taught = self._distilled(batches)
        results: list[dict[str, float]] = []
        for part, microbatches in zip(packed, batches, strict=True):
            if microbatches and (self._has_gradient(part, microbatches) or self.config.loss.on_every_token):
                self.state, metrics = self._update(self.state, microbatches)
                results.append(metrics)
        replayed: dict[str, float] = {}
        if self.replay:
            self.state, replayed = self.replay(self.state, self.step)
        counts = {"optimizer/updates": float(len(results)), "optimizer/idle": float(len(packed) - len(results))}
        return _combined([p.metrics for p in packed]) | _combined(results) | counts | taught | replayed

    def _filled(self, batch: TrainBatch) -> TrainBatch:
        """Behaviour and reference log-probabilities, before any parameter changes."""
        if self._recompute:
            batch = batching.with_behavior(batch, self._logprobs(self.state.params, batch))
        if self._reference is not None:
            batch = batching.with_reference(batch, self._logprobs(self._reference, batch))
        return batch

    def _distilled(self, batches: list[list[TrainBatch]]) -> tuple[list[list[TrainBatch]], dict[str, float]]:
        """Advantages of every token from student and teacher, before any parameter changes, and their means."""
        flat = [b for part in batches for b in part]
        taught = [self._teacher(b) for b in flat]
        own = [b.behavior_logprobs if self._recompute else self._logprobs(self.state.params, b) for b in flat]
        done = [batching.with_distillation(*each) for each in zip(flat, own, taught, strict=True)]
        rest = iter(done)
        return [[next(rest) for _ in part] for part in batches], distillation.statistics(done, taught)

    def _has_gradient(self, part: batching.PackedBatch, microbatches: Sequence[TrainBatch]) -> bool:
        return any(b.advantages.any() for b in microbatches) if self._teacher else part.has_gradient


class Trainer:
    """The loop: what happens in a step, and around the steps."""

    def __init__(
        self,
        config: config_lib.Config,
        run: runs.Run,
        learner: Learner,
        engine: Engine,
        tasks: TaskSets,
        recorder: Recorder,
        others: Mapping[str, Engine],
    ):
        self.config, self.run_folder, self.learner, self.engine, self.recorder = config, run, learner, engine, recorder
        self.tasks = tasks
        self.player = Player(tasks.source, learner.policy.chat, engine, config)
        chat, endpoints = learner.policy.chat, roles.connect(config.rti)
        engines = {role: others[key] for role in roles.ROLES if (key := f"rti.roles.{role}.model") in others}
        self.roles = roles.Roles(chat, engine, config.sampling, config.rti, endpoints, engines)
        self._teacher = luffy_teacher(config, tasks, chat, others.get("loss.teacher.path"))
        self._engines = list(dict.fromkeys([engine, *others.values()]))
        self.guards = Guards(config.stop, run.folder)
        self._seconds: dict[str, float] = {}
        self.collect = Collection(
            config, tasks.trained, self.player, self.roles, self._score, self._teacher, recorder, self._timed
        )

    async def run(self) -> None:
        """All steps that are left, evaluations, export and report. A cancelled run saves its last whole step."""
        config, learner = self.config, self.learner
        with Checkpoints(self.run_folder.checkpoints, config.checkpoint.keep) as checkpoints:
            if learner.step:
                await weight_sync.sync(self.engine, learner.policy.model, learner.state.params, learner.step)
            saved, saved_at = learner.step, time.monotonic()
            try:
                if learner.step in (0, config.steps):
                    await self.evaluate()
                while learner.step < config.steps:
                    await self.step()
                    overdue = time.monotonic() - saved_at > 60 * config.checkpoint.minutes
                    if learner.step % config.checkpoint.every == 0 or overdue or learner.step == config.steps:
                        self.save(checkpoints)
                        saved, saved_at = learner.step, time.monotonic()
                    if learner.step == config.steps or (config.eval.every and learner.step % config.eval.every == 0):
                        await self.evaluate()
            except BaseException:
                if learner.step > saved:
                    self.save(checkpoints)
                raise
        await asyncio.to_thread(summary.export_and_report, self.run_folder, learner)

    async def step(self) -> None:
        """One step of the algorithm; the learner's step counts up when it is complete."""
        config, learner, n = self.config, self.learner, self.learner.step
        self._seconds = {}
        groups, metrics = await self.collect(n)
        for each in self._engines:
            await each.sleep()
        with self._timed("update"):  # in this thread: an interruption comes before it or after it, never in between
            packed = learner.pack(groups)
            metrics |= learner.update(packed)
            learner.step = n + 1
        distilled = config.loss.baseline == "opd"  # its advantages are per token
        assigned = {} if distilled else advantages.assign_advantages(groups, config.loss.variant).advantages
        runs.write_groups(self.run_folder.trajectories(n + 1), groups, assigned)
        try:
            with self._timed("sync"):
                for each in self._engines:
                    await each.wake_up()
                if metrics["optimizer/updates"] or learner.replay:
                    await weight_sync.sync(self.engine, learner.policy.model, learner.state.params, n + 1)
            with self._timed("probe"):
                metrics |= await self.probe(groups)
        finally:
            metrics |= self.engine.pop_metrics()
            self.recorder.write(n + 1, metrics | {f"time/{k}": v for k, v in self._seconds.items()})
        self.guards.check(n + 1, metrics, packed)

    async def probe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Engine against learner after the update: fresh samples of the new weights, scored by the learner."""
        prompts = list({t.turns[0].prompt_ids: None for g in groups for t in g.trajectories if t.turns})[:PROBE_ROWS]
        sampling, stop = self.config.sampling, self.player.chat.stop_ids
        requests = [
            GenerateRequest(p, min(sampling.max_tokens, 64), sampling.temperature, i, stop)
            for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(self.engine.generate(r) for r in requests))
        scored = await self._score([(r.prompt_ids, a.ids) for r, a in zip(requests, answers, strict=True)])
        gaps = [np.abs(s - np.asarray(a.logprobs)) for s, a in zip(scored, answers, strict=True)]
        return {"mismatch/after_max": float(max((g.max() for g in gaps if g.size), default=math.nan))}

    async def evaluate(self) -> None:
        """Pass@k on the held-out tasks with the weights of now, unless this step's file is there already."""
        step = self.learner.step
        path = self.run_folder.evaluation(step)
        if path.is_file():
            return
        with self.recorder.episodes(
            f"evaluation after {step} steps", len(self.tasks.held_out) * self.config.eval.trials
        ) as seen:
            result, groups = await evaluate.evaluate(self.player, self.tasks.held_out, self.config, on_episode=seen)
        if self.config.eval.roles:
            await self.measure_roles()
        runs.write_groups(path.with_suffix(".jsonl"), groups, {})
        runs.write_json(path, {"step": step, **result})
        self.recorder.evaluation(step, result)
        if self.config.eval.keep_best and step == summary.best_step(self.run_folder):
            summary.export(self.run_folder.best, self.learner)

    async def measure_roles(self) -> None:
        """How right the three roles are with the weights of now, on held-out tasks."""
        step, tasks = self.learner.step, task_sets.limited(self.tasks.held_out, self.config.eval.roles)
        with self.recorder.episodes(f"roles after {step} steps", len(tasks)) as seen:
            result, turns = await role_eval.measure(
                self.player, self.roles, self._score, tasks, step=step, on_episode=seen
            )
        self.roles.pop_usage()  # not the training's
        path = self.run_folder.roles(step)
        runs.write_lines(path.with_suffix(".jsonl"), map(dataclasses.asdict, turns))
        runs.write_json(path, {"step": step, **result})
        self.recorder.roles(step, role_eval.metrics(result))

    def save(self, checkpoints: Checkpoints) -> None:
        """A checkpoint of the last whole step."""
        self.recorder.phase(f"saving the checkpoint of step {self.learner.step}")
        checkpoints.save(self.learner.step, self.learner.state, {"seed": self.config.seed})

    async def _score(self, rows) -> list[np.ndarray]:
        return await asyncio.to_thread(self.learner.score, rows)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.recorder.phase(name)
        started = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started


def luffy_teacher(config: config_lib.Config, tasks: TaskSets, chat: Chat, engine: Engine | None) -> luffy.Guide | None:
    """Where LUFFY's rollouts come from; None without LUFFY."""
    teacher = config.loss.teacher
    if config.loss.baseline != "luffy":
        return None
    if teacher.rollouts:
        return luffy.Stored(teacher.rollouts, chat, tasks.source, tasks.trained, config)
    engine = engine or FrozenServers(teacher.urls, chat.tokenizer, config.rollout.concurrency)
    return luffy.Played(Player(tasks.source, chat, engine, config), config)


def _combined(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each metric over the optimizer steps of a batch: counts add up, maxima stay maxima, the rest is a mean."""
    names = dict.fromkeys(name for r in results for name in r)
    return {k: float(_how(k)([r[k] for r in results if k in r])) for k in names}


def _how(name: str):
    group, _, kind = name.partition("/")
    if kind == "max":
        return np.max
    if group == "reweight" and kind.startswith(("min_", "max_")):
        return np.min if kind.startswith("min_") else np.max
    counts = group in ("groups", "batch") and kind != "padding_fraction"
    return np.sum if counts or kind in ("tokens", "skipped") else np.mean
