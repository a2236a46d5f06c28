"""What the runs of a study came to: values of every task under every seed, and series over training."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rti_jax import statistics
from rti_jax.config import ConfigError
from rti_jax.metrics import read_metrics
from rti_jax.study import Job

LONG_TURNS = 3  # an episode of more turns is a long one (the paper looks at those of more than three)


class MissingError(Exception):
    """A comparison needs a run, a task set or a number that is not there."""


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """A finished run.

    Attributes:
      splits: split -> rows of its tasks at the end, as `evaluate.summarize` writes them.
      lines: metrics.jsonl. evaluations: step -> rows of the held-out tasks that were played during training.
      trials: episodes of a task. delta: the gate's threshold; None without intervention.
    """

    arm: str
    seed: int
    splits: Mapping[str, Sequence[Mapping[str, Any]]]
    lines: Sequence[Mapping[str, Any]]
    evaluations: Mapping[int, Sequence[Mapping[str, Any]]]
    trials: int
    delta: float | None = None

    def rows(self, tasks: str) -> Sequence[Mapping[str, Any]]:
        """Rows of a task set: "all" (the first split), one of its kinds, another split, or "full" (all splits)."""
        first = next(iter(self.splits))
        sets = {"all": self.splits[first], "full": [r for rows in self.splits.values() for r in rows], **self.splits}
        rows = sets.get(tasks) or [r for r in self.splits[first] if r["kind"] == tasks]
        if not rows:
            raise MissingError(f"no tasks {tasks!r} were evaluated")
        return rows

    def total(self, metric: str) -> float:
        """Sum of a metric over all steps."""
        return float(sum(line.get(metric) or 0.0 for line in self.lines))


class Results:
    """All finished runs of a study."""

    def __init__(self, runs: Iterable[StudyRun]):
        self.runs = {(r.arm, r.seed): r for r in runs}
        self._values: dict[tuple, np.ndarray] = {}

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for arm, _ in self.runs))

    def seeds(self, *arms: str) -> list[int]:
        """The seeds that all of these arms have. Raises MissingError for none."""
        common = [s for s in sorted({s for _, s in self.runs}) if all((a, s) in self.runs for a in arms)]
        if not common:
            absent = [a for a in arms if a not in self.arms] or arms
            raise MissingError(f"not run: {', '.join(absent)}")
        return common

    def of(self, arm: str, seeds: Sequence[int] = ()) -> list[StudyRun]:
        return [self.runs[arm, s] for s in seeds or self.seeds(arm)]

    def values(self, arm: str, tasks: str, measure: str, seeds: Sequence[int] = ()) -> np.ndarray:
        """A measure of every task at the end of training, [seeds, tasks]; NaN where a task has too few valid trials."""
        key = (arm, tasks, measure, *seeds)
        if key not in self._values:
            rows = [(r.rows(tasks), r.trials) for r in self.of(arm, seeds)]
            self._values[key] = np.array([[value(row, measure, trials) for row in found] for found, trials in rows])
        return self._values[key]

    def series(self, arm: str, metric: str, seeds: Sequence[int] = ()) -> np.ndarray:
        """A metric of every step, [seeds, steps]; NaN where a step has none. Raises MissingError if no step has one."""
        runs = self.of(arm, seeds)
        numbers = [[math.nan if line.get(metric) is None else line[metric] for line in r.lines] for r in runs]
        if not any(map(len, numbers)) or np.isnan(np.concatenate(numbers)).all():
            raise MissingError(f"{arm} has no {metric}")
        return np.array(numbers)

    def held_out(self, arm: str, tasks: str, measure: str, seeds: Sequence[int] = ()) -> dict[int, np.ndarray]:
        """The same measures during training: step -> [seeds, tasks]."""
        runs = self.of(arm, seeds)
        steps = sorted(set.intersection(*(set(r.evaluations) for r in runs)))
        pick = lambda rows: [r for r in rows if tasks in ("all", r["kind"])]  # noqa: E731
        return {
            s: np.array([[value(row, measure, r.trials) for row in pick(r.evaluations[s])] for r in runs])
            for s in steps
        }


def value(row: Mapping[str, Any], measure: str, trials: int) -> float:
    """A measure of one task: "pass@2", "pass^4", "pass@" or "pass^" (the mean over k = 1..trials), "long", "turns".

    NaN where there are too few valid trials.
    """
    if measure == "long":
        turns = row["turns_each"]
        return sum(t > LONG_TURNS for t in turns) / len(turns) if turns else math.nan
    if measure == "turns":
        return math.nan if row["turns"] is None else row["turns"]
    estimator = {"pass@": statistics.pass_at_k, "pass^": statistics.pass_hat_k}[measure[:5]]
    ks = [int(measure[5:])] if measure[5:] else range(1, trials + 1)
    found = [estimator(row["n"], row["c"], k) for k in ks]
    return math.nan if None in found else sum(found) / len(found)


def read(jobs: Iterable[Job]) -> Results:
    """The finished runs among the jobs. Raises ConfigError for runs that were evaluated on different tasks."""
    runs = [_read(job) for job in jobs if job.done]
    for run in runs[1:]:
        ids = [[r["task"] for r in x.rows("full")] for x in (runs[0], run)]
        if ids[0] != ids[1]:
            raise ConfigError(f"{run.arm}, seed {run.seed}: evaluated on other tasks than {runs[0].arm}")
    return Results(runs)


def _read(job: Job) -> StudyRun:
    final = json.loads(job.final.read_text())
    evaluations = {}
    for path in sorted(job.final.parent.glob("step_*.json")):
        data = json.loads(path.read_text())
        evaluations[int(data["step"])] = data["tasks"]
    return StudyRun(
        arm=job.arm,
        seed=job.seed,
        splits={split: result["tasks"] for split, result in final["splits"].items()},
        lines=read_metrics(job.config.run_dir / "metrics.jsonl"),
        evaluations=evaluations,
        trials=min(result["trials"] for result in final["splits"].values()),
        delta=job.config.gate.delta if job.config.rti.enabled else None,
    )
