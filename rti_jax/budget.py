"""What a run may use up: sampled tokens and wall time (`stop.tokens`, `stop.hours`), summed over its resumes.

The totals stand in every line of metrics.jsonl, which is cut back to the checkpoint when a run goes on: what a crash
lost is not counted, and a resumed run ends where an unbroken one would. Time without a step's line is that of an
engine's start, and of whatever comes after the last line of a process.
"""

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rti_jax.config import Config, StopConfig
from rti_jax.metrics import read_metrics
from rti_jax.types import ROLES


class Budget:
    """What the run has used up so far.

    Args:
      lines: of metrics.jsonl, up to the step from which the run goes on.
      clock: gives seconds.
    """

    def __init__(
        self, stop: StopConfig, lines: Sequence[Mapping[str, Any]] = (), clock: Callable[[], float] = time.monotonic
    ):
        self._stop, self._clock, self._started = stop, clock, clock()
        self._tokens, self._before = totals(lines)
        self._seconds = self._before

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adds a step; returns the totals as metrics."""
        self._tokens += sampled(metrics)
        self._seconds = self._before + self._clock() - self._started
        return {"run/sampled_tokens": self._tokens, "run/wall_seconds": self._seconds}

    def spent(self) -> str:
        """Which budget is used up by the steps so far, in words; empty if none is."""
        return _spent(self._stop, self._tokens, self._seconds)


class End(NamedTuple):
    """The last step of a run, and which budget ends it there; empty if all its steps are done by then."""

    step: int
    why: str


def end(config: Config, folder: pathlib.Path) -> End:
    """Where a run ends, as far as its metrics.jsonl tells."""
    lines = read_metrics(folder / "metrics.jsonl")
    last = lines[-1]["step"] if lines else 0
    why = _spent(config.stop, *totals(lines)) if last < config.steps else ""
    return End(last, why) if why else End(config.steps, "")


def totals(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(sampled tokens, seconds) of a run's steps; lines of older versions have the seconds of each step alone."""
    tokens = sum(map(sampled, lines))
    if lines and (seconds := lines[-1].get("run/wall_seconds")) is not None:
        return tokens, seconds
    return tokens, sum(v for line in lines for name, v in line.items() if name.startswith("time/") and v)


def sampled(line: Mapping[str, Any]) -> float:
    """Tokens that a step sampled, those of broken and repeated episodes included, which rollout/sampled_tokens leaves
    out; lines of older versions know these alone."""
    if (policy := line.get("rollout/policy_tokens")) is None:
        return line.get("rollout/sampled_tokens") or 0.0
    return policy + sum(line.get(f"rti/{role}_tokens") or 0.0 for role in ROLES)


def _spent(stop: StopConfig, tokens: float, seconds: float) -> str:
    if stop.tokens is not None and tokens >= stop.tokens:
        return f"stop.tokens={stop.tokens} ({tokens:.0f} tokens were sampled)"
    if stop.hours is not None and seconds >= 3600 * stop.hours:
        return f"stop.hours={stop.hours:g} ({seconds / 3600:.2f} hours have passed)"
    return ""
