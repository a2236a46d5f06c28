"""Estimates from repeated trials of tasks: Pass@k, Pass^k, bootstrap intervals over tasks, paired differences.

A task is played n times and solved c times. Estimators are per task and unbiased; k never exceeds n: a task with fewer
than k valid trials has no value and is left out, never padded. Intervals resample *tasks*, since the trials of one task
are not independent samples of what the benchmark measures.
"""

import dataclasses
import functools
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


def grid_interval(values: np.ndarray, *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES) -> Estimate:
    """Mean of values of the same tasks under several training seeds, with its percentile bootstrap interval over both.

    A resample draws tasks, the same for every seed, and seeds, the same for every task. With one seed it says how far
    the mean holds for other tasks; with few seeds the spread over seeds is underestimated, as any bootstrap's.

    Args:
      values: [seeds, tasks]; NaN where a task has no value. Differences of two methods make it a paired comparison.
    """
    known = np.isfinite(values)
    if not known.any():
        return Estimate(None, None, None, 0)
    filled = np.where(known, values, 0.0)
    seeds, tasks = (draws(n, resamples, seed + axis) for axis, n in enumerate(values.shape))
    sums, counts = (np.einsum("rs,rs->r", seeds, tasks @ x.T.astype(np.float64)) for x in (filled, known))
    low, high = np.quantile((sums / np.maximum(counts, 1))[counts > 0], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(filled.sum() / known.sum()), float(low), float(high), int(known.any(axis=0).sum()))


@functools.lru_cache(maxsize=16)
def draws(n: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """How often each of n items is drawn in n draws with replacement, [resamples, n]; the same for the same seed."""
    picks = np.random.default_rng(seed).integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(picks.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def slope_interval(
    x: Sequence[float], y: Sequence[float], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Least-squares slope of y over x with its interval; points are resampled, those with a NaN left out."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x, y = x[np.isfinite(x) & np.isfinite(y)], y[np.isfinite(x) & np.isfinite(y)]
    if len(np.unique(x)) < 2:
        return Estimate(None, None, None, 0)
    weights = np.vstack([np.ones(len(x)), draws(len(x), resamples, seed)])
    weights /= weights.sum(axis=1, keepdims=True)
    covariance, variance = weights @ (x * y) - (weights @ x) * (weights @ y), weights @ x**2 - (weights @ x) ** 2
    slopes = (covariance / np.where(variance > 1e-12, variance, np.nan)).tolist()
    low, high = np.nanquantile(slopes[1:], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(slopes[0], float(low), float(high), len(x))


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
