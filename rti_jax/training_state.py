"""What is trained: parameters and optimizer with the compiled functions that update, score and restore them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rti_jax import batching, checkpoint, distillation, frozen, resume, runs
from rti_jax.config import Config, ConfigError
from rti_jax.hosts import Hosts
from rti_jax.learner import init_state, make_logprobs_step, make_optimizer, make_update_step, row_multiple
from rti_jax.logprobs import Scorer
from rti_jax.optimizer import total_updates
from rti_jax.replay import Replay
from rti_jax.run_tasks import RunTasks
from rti_jax.runtime import Policy, load_policy
from rti_jax.types import Group, TrainBatch


class Learner:
    """The training state with its compiled functions, restored from the run's newest checkpoint if there is one.

    Args:
      tasks: of the run; what is replayed (`rti.replay`) is played on them. hosts: of the run; None: this process alone.

    Attributes:
      step: steps that were made. version: the last of them that changed the weights, which the engine serves.
      extra: what the checkpoint that was restored holds beside the state.
    """

    def __init__(
        self, config: Config, policy: Policy, run: runs.Run, tasks: RunTasks | None, hosts: Hosts | None = None
    ):
        self.config, self.policy, self.hosts = config, policy, hosts or Hosts()
        optimizer = make_optimizer(config.optimizer, policy.params, total_updates(config))
        self.state = init_state(policy.params, optimizer, policy.mesh, offload=config.optimizer.offload)
        self.step = self.version = 0
        self.identity = resume.identity(config, tasks)
        self.extra: dict[str, Any] = {}
        self._held: Any = None  # parameters that `score` uses in the place of the state's
        self._restore(run)
        self._on_policy = config.on_policy
        self._recompute = config.loss.behavior == "recompute" and not self._on_policy
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

    def _restore(self, run: runs.Run) -> None:
        """State and step of the newest checkpoint. One host looks for it, so that all take the same."""
        hosts, config = self.hosts, self.config
        newest = None if hosts.alone else hosts.from_first(lambda: checkpoint.newest(run.checkpoints))
        if newest is None and not hosts.alone:
            return
        if restored := checkpoint.restore(run.checkpoints, self.state, newest):
            self.state, self.step, self.extra = restored.state, restored.step, restored.extra
            if self.step > config.steps:
                raise ConfigError(
                    f"steps={config.steps}, but {run.folder} has a checkpoint of step {self.step}; raise steps "
                    "or give another name="
                )
            self.version = restored.extra.get("version", self.step)
            changed = resume.check(restored.extra, self.identity, run.folder)
            if hosts.first:
                for line in changed:
                    print(f"changed since this run was started: {line}")
                print(f"going on from the checkpoint after step {self.step}")

    def score(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[np.ndarray]:
        """Log-probabilities of responses under the current weights (or those held), at the rollout temperature."""
        return self._scorer.score(self.state.params if self._held is None else self._held, rows)

    def hold(self) -> None:
        """Until `release`, scores are under a copy of the weights of now: an update donates its own."""
        self._held = jax.tree.map(jnp.copy, self.state.params)

    def release(self) -> None:
        """Scores are under the current weights again."""
        self._held = None

    def pack(
        self, groups: Sequence[Group], numbers: range | None = None, total: int | None = None
    ) -> list[batching.PackedBatch]:
        """One packed batch per optimizer step; on several hosts this one's part of it.

        Args:
          groups: of this host. numbers: of these among all hosts' groups; None counts from 0.
          total: how many all hosts have; None: these.
        """
        hosts = self.hosts
        own = [
            batching.build(
                part,
                self.config,
                row_multiple=row_multiple(self.policy.mesh, hosts.count),
                leave_out_flat=not self.config.loss.on_every_token,
                hosts=hosts.count,
            )
            for part in batching.split_groups(groups, self.config.optimizer.minibatches, numbers, total)
        ]
        outlines = zip(*hosts.exchange([packed.outline for packed in own]), strict=True)
        return [batching.agree(packed, parts, self.config) for packed, parts in zip(own, outlines, strict=True)]

    def update(self, packed: Sequence[batching.PackedBatch]) -> dict[str, float]:
        """All optimizer steps of a batch; those without a gradient are skipped, in every arm."""
        batches = [[self._filled(b) for b in p.microbatches] for p in packed]
        taught: dict[str, float] = {}
        if self._teacher:
            batches, taught = self._distilled(batches)
        results: list[dict[str, float]] = []
        for part, microbatches in zip(packed, batches, strict=True):
            if microbatches and (self._has_gradient(part, microbatches) or self.config.loss.on_every_token):
                self.state, metrics = self._update(self.state, microbatches, part.corrected)
                results.append(metrics)
        replayed: dict[str, float] = {}
        if self.replay:
            self.state, replayed = self.replay(self.state, self.step)
        if results or self.replay:
            self.version = self.step + 1
        counts = {
            "optimizer/updates": float(len(results)),
            "optimizer/idle": float(len(packed) - len(results)),
            "compile/programs": float(self._update.programs),
        }
        return combined([p.metrics for p in packed]) | combined(results) | counts | taught | replayed

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


def combined(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each metric over the optimizer steps of a batch: counts add up, maxima stay maxima, the rest is a mean."""
    names = dict.fromkeys(name for r in results for name in r)
    return {k: float(_how(k)([r[k] for r in results if k in r])) for k in names}


def _how(name: str):
    group, _, kind = name.partition("/")
    if kind in ("max", "buckets"):
        return np.max
    if group == "reweight" and kind.startswith(("min_", "max_")):
        return np.min if kind.startswith("min_") else np.max
    counts = group in ("groups", "batch") and kind != "padding_fraction"
    return np.sum if counts or kind in ("tokens", "skipped") else np.mean
