"""Warnings of a run that goes on and learns nothing, or the wrong thing: once for each kind until it is over.

What ends a run instead is in guards.py. Every kind looks at the metrics of a step alone, so that a resumed run knows
from metrics.jsonl what it has warned of.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rti_jax.config import Config

Metrics = Mapping[str, Any]  # of a step; None where a value is not a finite number


@dataclasses.dataclass(frozen=True)
class Kind:
    """One thing to warn of.

    Attributes:
      metric: its name in metrics.jsonl, 1 while the alarm is raised.
      limit: it is raised when what `grows` gave, added up, reaches this; None turns it off.
      grows: of a step: more of it (above 0), its end (0), or None if the step says nothing.
      says: the warning, from the metrics of the step and how far it has grown.
    """

    metric: str
    limit: int | None
    grows: Callable[[Metrics], float | None]
    says: Callable[[Metrics, float], str]


class Alarms:
    """The alarms of a run.

    Args:
      lines: of the steps before, from metrics.jsonl; what they had raised is not said again.
    """

    def __init__(self, config: Config, lines: Iterable[Metrics] = ()):
        self._kinds = [kind for kind in kinds(config) if kind.limit is not None]
        self._grown = {kind.metric: 0.0 for kind in self._kinds}
        for line in lines:
            self.check(line)

    @property
    def raised(self) -> list[str]:
        """Names of those that are raised now."""
        return [kind.metric.partition("/")[2] for kind in self._kinds if self._grown[kind.metric] >= kind.limit]

    def check(self, metrics: Metrics) -> tuple[dict[str, float], list[str]]:
        """(a metric for each alarm, warnings of those that this step raised)."""
        warnings = []
        metrics = {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}  # as in the file
        for kind in self._kinds:
            before, more = self._grown[kind.metric], kind.grows(metrics)
            if more is None:
                continue
            self._grown[kind.metric] = now = before + more if more else 0.0
            if before < kind.limit <= now:
                warnings.append(f"{kind.metric.partition('/')[2].replace('_', ' ')}: {kind.says(metrics, now)}")
        return {k.metric: float(self._grown[k.metric] >= k.limit) for k in self._kinds}, warnings


def kinds(config: Config) -> list[Kind]:
    """All kinds, those included that the config turns off."""
    limits, rewarded = config.alarms, config.loss.baseline != "opd"
    corrects = config.rti.control != "never_invalid" and not (config.gate.scope == "turn" and config.gate.delta == 0)
    size = config.rollout.group_size
    return [
        Kind("alarms/constant_reward", limits.constant_reward if rewarded else None, _constant, _constant_words),
        Kind(
            "alarms/truncated",
            limits.steps if limits.truncated else None,
            lambda m: _above(_cut(m, size), limits.truncated),
            lambda m, n: (
                f"in {n:.0f} steps in a row nearly all episodes were cut at a token limit ({_cut(m, size):.0%} in this "
                "one): raise sampling.max_tokens or sampling.max_context"
            ),
        ),
        Kind(
            "alarms/mismatch",
            limits.steps if limits.mismatch else None,
            lambda m: _above(m.get("mismatch/abs"), limits.mismatch),
            lambda m, n: (
                f"for {n:.0f} steps the engine's log-probabilities have been far from the learner's "
                f"({m['mismatch/abs']:.3g} nats on average in this one): `rti doctor` compares the two; "
                "loss.mismatch_clip corrects for small gaps"
            ),
        ),
        Kind(
            "alarms/entropy",
            limits.steps if limits.entropy else None,
            lambda m: None if m.get("policy/entropy") is None else float(m["policy/entropy"] < limits.entropy),
            lambda m, n: (
                f"for {n:.0f} steps the policy's entropy has been next to nothing ({m['policy/entropy']:.2g} nats in "
                "this one), so all members of a group do the same: lower optimizer.lr, or give loss.entropy_coef"
            ),
        ),
        Kind("alarms/no_tool_calls", limits.no_tool_calls, _speechless, _speechless_words),
        Kind("alarms/never_accepted", limits.never_accepted if corrects else None, _refused, _refused_words),
    ]


def _above(value: float | None, limit: float) -> float | None:
    return None if value is None else float(value >= limit)


def _cut(metrics: Metrics, size: int) -> float | None:
    """Share of the step's episodes that were cut."""
    episodes = (metrics.get("rollout/groups") or 0.0) * size
    return (metrics.get("rollout/truncated") or 0.0) / episodes if episodes else None


def _constant(metrics: Metrics) -> float | None:
    flat = (metrics.get("groups/flat") or 0.0) + (metrics.get("groups/filtered") or 0.0)
    if not flat:  # some have a gradient, or none is valid, which is a guard's
        return 0.0 if metrics.get("rollout/groups") else None
    return float(flat + (metrics.get("groups/dropped") or 0.0) >= (metrics.get("rollout/groups") or 0.0))


def _constant_words(metrics: Metrics, steps: float) -> str:
    failed, solved, groups = (metrics.get(f"rollout/groups{end}") or 0.0 for end in ("_all_failed", "_all_solved", ""))
    return (
        f"in {steps:.0f} steps in a row no group had both a success and a failure (in this one {failed:.0f} of "
        f"{groups:.0f} failed entirely, {solved:.0f} were solved entirely), so nothing is learned: other tasks "
        "(rollout.mix, rollout.tasks), a larger rollout.group_size, or rti.enabled=true"
    )


def _speechless(metrics: Metrics) -> float | None:
    calls = metrics.get("rollout/tool_calls")
    return None if calls is None or not metrics.get("rollout/tokens") else float(calls == 0)


def _speechless_words(metrics: Metrics, steps: float) -> str:
    return (
        f"in {steps:.0f} steps in a row not one tool call could be read from the policy's turns, though it is offered "
        "tools: `rti doctor` looks at the chat template, trajectories/ holds the turns"
    )


def _refused(metrics: Metrics) -> float | None:
    attempts = metrics.get("rti/attempts")
    return None if not attempts else 0.0 if metrics.get("rti/accepted") else attempts


def _refused_words(metrics: Metrics, attempts: float) -> str:
    prefix = "rti/rejected_"
    reasons = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and v}
    shown = "".join(f", {count:.0f} rejected as {name}" for name, count in reasons.items())
    flagged, proposed = (metrics.get(f"rti/{name}") or 0.0 for name in ("turns_flagged", "proposals"))
    return (
        f"no correction was accepted in {attempts:.0f} intervened episodes in a row (in this step {flagged:.0f} turns "
        f"flagged, {proposed:.0f} rewrites proposed{shown}): `rti view` shows them, `rti eval --roles` measures roles"
    )
