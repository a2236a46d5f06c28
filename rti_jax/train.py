"""`rti train CONFIG`: the main job.

    rti train configs/quickstart.yaml
    rti train configs/quickstart.yaml name=quickstart_grpo rti.enabled=false     plain GRPO, same budget

One step, in the order in which data flows (RTI, arXiv 2610.13438; docs/intervention.md):

    tasks -> groups of G trajectories (vLLM, weights version v)
          -> groups that failed entirely: intervened rollouts, scored by the learner under v, gated, one member replaced
          -> advantages on the rewards after replacement -> packed micro-batches
          -> update -> weights version v + 1 to the engine -> metrics, checkpoint

Everything that a step draws is a function of (seed, step), and a checkpoint holds parameters, optimizer and step, so a
run that was interrupted goes on where it was. What the paper leaves open is chosen in config.py, marked "ours".

On several hosts every process runs this program (rti_jax/hosts.py, docs/clusters.md): tasks of a step are divided by
their number, each host samples its own with its own engine, and all compute each update together. Process 0 alone
writes the run folder, metrics and transcripts of all hosts included; checkpoints are written by all.
"""

import asyncio
import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from envs.base import Task
from rti_jax import (
    advantages,
    batching,
    checkpoint,
    evaluate,
    intervention,
    intervention_metrics,
    replay,
    role_eval,
    roles,
    runs,
    summary,
    weight_sync,
)
from rti_jax import config as config_lib
from rti_jax.checkpoint import Checkpoints
from rti_jax.engine import Engine, GenerateRequest, make_engine
from rti_jax.engine_errors import EngineError
from rti_jax.environments import EnvironmentSource, environment_source, sample_tasks
from rti_jax.hosts import Hosts, join, own_servers
from rti_jax.joint_scoring import JointScorer
from rti_jax.learner import init_state, make_logprobs_step, make_optimizer, make_update_step, row_multiple
from rti_jax.logprobs import Scorer
from rti_jax.metrics import Recorder, Unrecorded
from rti_jax.optimizer import total_updates
from rti_jax.replay import Replay
from rti_jax.rollout import Player
from rti_jax.runtime import Policy, load_policy
from rti_jax.types import Group, TrainBatch

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
    run = runs.open_run(config)
    return run, run.finished(config.steps)


async def _train(config: config_lib.Config, run: runs.Run, hosts: Hosts) -> bool:
    """Whatever a user may have got wrong is read before vLLM is started, which takes a while.

    Returns False if all hosts were told to end early.
    """
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    config = own_servers(config, hosts)
    tasks = TaskSets.load(config)
    learner = Learner(config, load_policy(config), run, tasks, hosts)
    with Recorder(run.folder, config.steps, learner.step) if hosts.first else Unrecorded() as recorder:
        recorder.phase("starting vLLM")
        hosts.at("starting vLLM")
        starting = asyncio.create_task(asyncio.to_thread(make_engine, config.model.path, config))
        try:
            engine = await asyncio.shield(starting)  # a thread cannot be cancelled: its engine is closed below
            return await Trainer(config, run, learner, engine, tasks, recorder, hosts).run()
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
        trained, held_out = source.tasks(config.env.split), source.tasks(config.eval.split)
        evaluate.check_disjoint(trained, held_out)
        roles.RolePrompts(config.rti.prompts)
        replay.check(config)
        if config.eval.roles:
            role_eval.check(source.cls)
        sample_tasks(trained, 0, config.rollout.groups_per_step, config.seed, config.rollout.mix)
        return cls(source, trained, evaluate.limited(held_out, config.eval.limit))


class Learner:
    """The training state with its compiled functions, restored from the run's newest checkpoint if there is one."""

    def __init__(self, config: config_lib.Config, policy: Policy, run: runs.Run, tasks: "TaskSets", hosts: Hosts):
        self.config, self.policy, self.hosts = config, policy, hosts
        optimizer = make_optimizer(config.optimizer, policy.params, total_updates(config))
        self.state = init_state(policy.params, optimizer, policy.mesh, offload=config.optimizer.offload)
        self.step = 0
        # One host looks for the newest good checkpoint, so that all take the same.
        newest = None if hosts.alone else hosts.from_first(lambda: checkpoint.newest(run.checkpoints))
        found = hosts.alone or newest is not None
        if restored := found and checkpoint.restore(run.checkpoints, self.state, newest):
            self.state, self.step = restored.state, restored.step
            if self.step > config.steps:
                raise config_lib.ConfigError(
                    f"steps={config.steps}, but {run.folder} has a checkpoint of step {self.step}; raise steps "
                    "or give another name="
                )
            if hosts.first:
                print(f"going on from the checkpoint after step {self.step}")
        recompute = config.loss.behavior == "recompute"
        self._on_policy = recompute and config.optimizer.minibatches == 1
        self._recompute = recompute and not self._on_policy
        self._logprobs = make_logprobs_step(policy.model, config, policy.mesh)
        self._update = make_update_step(
            policy.model, config, policy.mesh, optimizer, on_policy=self._on_policy, norms_by_source=config.rti.enabled
        )
        self._scorer = Scorer(policy.model, policy.mesh, config.sampling.temperature, config.batch.buckets)
        self._reference = load_policy(config).params if config.loss.kl_beta else None
        replays = config.rti.replay.rows > 0
        self.replay = Replay(config, policy, tasks.source, tasks.trained, optimizer) if replays else None

    def score(self, rows: Sequence[intervention.Row]) -> list[np.ndarray]:
        """Log-probabilities of responses under the current weights, at the rollout temperature."""
        return self._scorer.score(self.state.params, rows)

    def pack(self, groups: Sequence[Group], numbers: range, total: int) -> list[batching.PackedBatch]:
        """One packed batch per optimizer step; on several hosts this one's part of it.

        Args:
          groups: of this host. numbers: of these among all hosts' groups. total: how many all hosts have.
        """
        hosts = self.hosts
        own = [
            batching.build(
                part,
                self.config,
                row_multiple=row_multiple(self.policy.mesh, hosts.count),
                leave_out_flat=not self.config.loss.kl_beta,
                hosts=hosts.count,
            )
            for part in batching.split_groups(groups, self.config.optimizer.minibatches, numbers, total)
        ]
        outlines = zip(*hosts.exchange([packed.outline for packed in own]), strict=True)
        return [batching.agree(packed, parts, self.config) for packed, parts in zip(own, outlines, strict=True)]

    def update(self, packed: Sequence[batching.PackedBatch]) -> dict[str, float]:
        """All optimizer steps of a batch; those without a gradient are skipped, in every arm."""
        batches = [[self._filled(b) for b in p.microbatches] for p in packed]
        results: list[dict[str, float]] = []
        for part, microbatches in zip(packed, batches, strict=True):
            if microbatches and (part.has_gradient or self.config.loss.kl_beta):
                self.state, metrics = self._update(self.state, microbatches, part.corrected)
                results.append(metrics)
        replayed: dict[str, float] = {}
        if self.replay:
            self.state, replayed = self.replay(self.state, self.step)
        programs = {"compile/programs": float(self._update.programs)}
        counts = {"optimizer/updates": float(len(results)), "optimizer/idle": float(len(packed) - len(results))}
        return _combined([p.metrics for p in packed]) | _combined(results) | counts | programs | replayed

    def _filled(self, batch: TrainBatch) -> TrainBatch:
        """Behaviour and reference log-probabilities, before any parameter changes."""
        if self._recompute:
            batch = batching.with_behavior(batch, self._logprobs(self.state.params, batch))
        if self._reference is not None:
            batch = batching.with_reference(batch, self._logprobs(self._reference, batch))
        return batch


class Trainer:
    """The loop: what happens in a step, and around the steps."""

    def __init__(
        self,
        config: config_lib.Config,
        run: runs.Run,
        learner: Learner,
        engine: Engine,
        tasks: TaskSets,
        recorder: Recorder | Unrecorded,
        hosts: Hosts,
    ):
        self.config, self.run_folder, self.learner, self.engine, self.recorder = config, run, learner, engine, recorder
        self.tasks, self.hosts = tasks, hosts
        self.player = Player(tasks.source, learner.policy.chat, engine, config)
        endpoints = roles.connect(config.rti)
        self.roles = roles.Roles(learner.policy.chat, engine, config.sampling, config.rti, endpoints)
        self.scorer = JointScorer(hosts, learner.score, patience=1.0 if config.gate.scope == "turn" else None)
        self._seconds: dict[str, float] = {}
        self._told_to_end = False

    async def run(self) -> bool:
        """All steps that are left, evaluations, export and report. A cancelled run saves its last whole step.

        On several hosts SIGTERM ends the run after the step in which any of them received it; returns False then.
        """
        config, learner, hosts = self.config, self.learner, self.hosts
        if not hosts.alone:  # one that stopped by itself would leave the others waiting
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
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
                    states = hosts.exchange((self._told_to_end, overdue))
                    ending, overdue = any(told for told, _ in states), states[0][1]
                    if learner.step % config.checkpoint.every == 0 or overdue or learner.step == config.steps or ending:
                        self.save(checkpoints)
                        saved, saved_at = learner.step, time.monotonic()
                    if ending:
                        return False
                    if learner.step == config.steps or (config.eval.every and learner.step % config.eval.every == 0):
                        await self.evaluate()
            except BaseException:
                if learner.step > saved and hosts.alone:  # a save takes all hosts, and the others know of nothing
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
        self._seconds = {}
        tasks = sample_tasks(self.tasks.trained, n, config.rollout.groups_per_step, config.seed, config.rollout.mix)
        own = self.hosts.share(len(tasks))
        groups, everyone, metrics = await self.roll_out(tasks, own, n)
        with self._timed("update"):  # in this thread: an interruption comes before it or after it, never in between
            packed = learner.pack(groups, own, len(tasks))
            metrics |= learner.update(packed)
            learner.step = n + 1
        if self.hosts.first:
            assigned = advantages.assign_advantages(everyone, config.loss.variant).advantages
            runs.write_groups(self.run_folder.trajectories(n + 1), everyone, assigned)
        try:
            with self._timed("sync"):
                if metrics["optimizer/updates"] or learner.replay:
                    await weight_sync.sync(self.engine, learner.policy.model, learner.state.params, n + 1)
            with self._timed("probe"):
                gaps = self.hosts.exchange(await self.scorer.during(self.probe(groups)))
                metrics["mismatch/after_max"] = max((g for g in gaps if not math.isnan(g)), default=math.nan)
        finally:
            self.recorder.write(n + 1, metrics | {f"time/{k}": v for k, v in self._seconds.items()})

    async def roll_out(
        self, tasks: Sequence[Task], own: range, n: int
    ) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Groups of the step after intervention, this host's and (in process 0) everyone's, and their metrics."""
        config, here = self.config, [tasks[i] for i in own]
        with self._timed("rollout"), self._episodes("rollouts", len(here) * config.rollout.group_size) as seen:
            before = await self.player.collect(here, step=n, numbers=own, on_episode=seen)
        if not any(self.hosts.exchange(any(g.valid for g in before))):
            raise EngineError(f"no episode of step {n + 1} could be played: {summary.first_error(before)}")
        groups, intervenes = before, bool(config.rti.enabled and config.rti.attempts)
        if intervenes:
            waiting = sum(map(intervention.triggered, before))
            with self._timed("intervention"), self._episodes("interventions", waiting) as seen:
                groups = await self.scorer.during(
                    intervention.intervene(
                        before, tasks, self.player, self.roles, self.scorer, config, step=n, on_episode=seen
                    )
                )
        gathered = self.hosts.collect((before, groups, self.roles.pop_usage()))
        if not self.hosts.first:
            return groups, groups, {}
        before, everyone = (self.hosts.in_order([part[i] for part in gathered]) for i in (0, 1))
        metrics = summary.group_metrics(before, tasks)
        if intervenes:
            usage = roles.added([part[2] for part in gathered])
            metrics |= summary.after(everyone) | intervention_metrics.statistics(everyone, usage)
        return groups, everyone, metrics | {"rollout/sampled_tokens": summary.sampled_tokens(metrics)}

    async def probe(self, groups: Sequence[Group]) -> float:
        """Engine against learner after the update: the largest gap on fresh samples, scored by the learner."""
        prompts = list({t.turns[0].prompt_ids: None for g in groups for t in g.trajectories if t.turns})[:PROBE_ROWS]
        sampling, stop = self.config.sampling, self.player.chat.stop_ids
        requests = [
            GenerateRequest(p, min(sampling.max_tokens, 64), sampling.temperature, i, stop)
            for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(self.engine.generate(r) for r in requests))
        scored = await self.scorer([(r.prompt_ids, a.ids) for r, a in zip(requests, answers, strict=True)])
        gaps = [np.abs(s - np.asarray(a.logprobs)) for s, a in zip(scored, answers, strict=True)]
        return float(max((g.max() for g in gaps if g.size), default=math.nan))

    async def evaluate(self) -> None:
        """Pass@k on the held-out tasks with the weights of now, unless this step's file is there already."""
        step, hosts, held_out = self.learner.step, self.hosts, self.tasks.held_out
        path = self.run_folder.evaluation(step)
        if hosts.from_first(path.is_file):
            return
        name = f"evaluation after {step} steps"
        self._at(name)
        with self._episodes(name, len(hosts.share(len(held_out))) * self.config.eval.trials) as seen:
            result, groups = await evaluate.evaluate(self.player, held_out, self.config, on_episode=seen, hosts=hosts)
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
        step, tasks = self.learner.step, evaluate.limited(self.tasks.held_out, self.config.eval.roles)
        own, name = self.hosts.share(len(tasks)), f"roles after {step} steps"
        self._at(name)
        with self._episodes(name, len(own)) as seen:
            measuring = role_eval.measure(
                self.player,
                self.roles,
                self.scorer,
                [tasks[i] for i in own],
                step=step,
                numbers=own,
                on_episode=seen,
            )
            result, turns = await self.scorer.during(measuring)
        self.roles.pop_usage()  # not the training's
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
        """A checkpoint of the last whole step."""
        self._at(f"saving the checkpoint of step {self.learner.step}")
        checkpoints.save(self.learner.step, self.learner.state, {"seed": self.config.seed})

    def _end(self) -> None:
        self._told_to_end = True

    def _at(self, phase: str) -> None:
        """Says what is going on, to whoever watches and to the other hosts."""
        self.recorder.phase(phase)
        self.hosts.at(f"step {self.learner.step + 1}, {phase}")

    @contextlib.contextmanager
    def _episodes(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """A function to call when one of this host's `total` episodes is done."""
        with self.recorder.episodes(name, total) as seen:

            def done(*what) -> None:
                self.hosts.alive()
                seen(*what)

            yield done

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._at(name)
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started


def _combined(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each metric over the optimizer steps of a batch: counts add up, maxima stay maxima, the rest is a mean."""
    names = dict.fromkeys(name for r in results for name in r)
    return {k: float(_how(k)([r[k] for r in results if k in r])) for k in names}


def _how(name: str):
    group, _, kind = name.partition("/")
    if kind in ("max", "buckets"):
        return np.max
    counts = group in ("groups", "batch") and kind != "padding_fraction"
    return np.sum if counts or kind in ("tokens", "skipped") else np.mean
