"""Estimates from repeated trials of tasks: Pass@k, Pass^k, bootstrap intervals over tasks, paired differences.

A task is played n times and solved c times. Estimators are per task and unbiased; k never exceeds n: a task with fewer
than k valid trials has no value and is left out, never padded. Intervals resample *tasks*, since the trials of one task
are not independent samples of what the benchmark measures.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

Counts = tuple[int, int]  # (n, c): valid trials of a task, successes among them
RESAMPLES = 2000


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Probability that at least one of k trials succeeds: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (https://arxiv.org/abs/2107.03374), equation 1. Returns None if k > n.
    """
    _check(n, c, k)
    return None if k > n else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Probability that all k trials succeed, Pass^k: C(c, k) / C(n, k).

    Yao et al. 2024 (tau-bench, https://arxiv.org/abs/2406.12045), section 4. Returns None if k > n.
    """
    _check(n, c, k)
    return None if k > n else math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"{c} successes of {n} trials with k = {k}")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95% interval; all None where no task has enough trials.

    Attributes:
      tasks: number of tasks that have a value.
    """

    mean: float | None
    low: float | None
    high: float | None
    tasks: int

    def __str__(self) -> str:
        return "-" if self.mean is None else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
    values: Sequence[float], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Mean of values, one a task, with the percentile bootstrap interval over tasks; the same for the same seed."""
    if not len(values):
        return Estimate(None, None, None, 0)
    array = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(len(array), size=(resamples, len(array)))
    low, high = np.quantile(array[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def ratio_interval(
    numerators: np.ndarray, denominators: np.ndarray, *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Mean over parts of sum(numerators) / sum(denominators), with its bootstrap interval over tasks.

    Args:
      numerators, denominators: counts, [parts, tasks]. One part is a rate; two (true and false cases) are a balanced
        accuracy. Resamples in which a part has nothing to count are left out of the interval.
    """
    if not denominators.sum(axis=1).all():
        return Estimate(None, None, None, 0)
    tasks = denominators.shape[1]
    picks = np.random.default_rng(seed).integers(tasks, size=(resamples, tasks))
    with np.errstate(invalid="ignore"):
        drawn = (numerators[:, picks].sum(-1) / denominators[:, picks].sum(-1)).mean(axis=0)
    low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float((numerators.sum(1) / denominators.sum(1)).mean()), float(low), float(high), tasks)


def estimate(
    estimator: Callable[[int, int, int], float | None], counts: Sequence[Counts], k: int, *, seed: int = 0
) -> Estimate:
    """Mean of `pass_at_k` or `pass_hat_k` over the tasks with at least k valid trials, with its interval."""
    values = [estimator(n, c, k) for n, c in counts]
    return mean_interval([v for v in values if v is not None], seed=seed)


def paired_difference(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean of second - first over the same tasks in the same order, with its interval (pairs are resampled)."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} tasks cannot be paired")
    return mean_interval([b - a for a, b in zip(first, second, strict=True)], seed=seed)
