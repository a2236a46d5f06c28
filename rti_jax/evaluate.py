"""`rti eval CONFIG`: Pass@k and Pass^k, k = 1..trials, of a policy on held-out tasks, with intervals.

    rti eval configs/quickstart.yaml                                  the policy in model.path
    rti eval configs/quickstart.yaml model.path=runs/quickstart/export --output after.json

Each task is played `eval.trials` times at the evaluation temperature, without any intervention. Episodes that ended in
an infrastructure error are excluded and counted beside every number.
"""

import asyncio
import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from envs.base import Task
from rti_jax import config as config_lib
from rti_jax import rollout, statistics
from rti_jax.types import Group

SAMPLING_STREAM = "eval"  # evaluation draws from a random stream of its own


def limited(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """The first `limit` tasks of each kind."""
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for task in tasks:
        seen[task.kind] += 1
        if limit is None or seen[task.kind] <= limit:
            kept.append(task)
    return kept


def summarize(tasks: Sequence[Task], groups: Sequence[Group], trials: int, seed: int) -> dict[str, Any]:
    """Counts per task and Pass@k / Pass^k with 95% bootstrap intervals over tasks, overall and per kind."""
    rows = []
    for task, group in zip(tasks, groups, strict=True):
        turns = [len(t.turns) for t in group.valid]
        rows.append(
            {
                "task": task.id,
                "kind": task.kind,
                "n": len(group.valid),
                "c": sum(t.success for t in group.valid),
                "excluded": len(group.trajectories) - len(group.valid),
                "turns": sum(turns) / len(turns) if turns else None,
            }
        )
    kinds = {"all": rows} | {k: [r for r in rows if r["kind"] == k] for k in sorted({t.kind for t in tasks})}
    return {"trials": trials, "kinds": {k: _scores(r, trials, seed) for k, r in kinds.items()}, "tasks": rows}


def _scores(rows: Sequence[dict[str, Any]], trials: int, seed: int) -> dict[str, Any]:
    counts = [(r["n"], r["c"]) for r in rows]
    scores: dict[str, Any] = {"tasks": len(rows), "excluded": sum(r["excluded"] for r in rows)}
    for k in range(1, trials + 1):
        scores[f"pass@{k}"] = dataclasses.asdict(statistics.estimate(statistics.pass_at_k, counts, k, seed=seed))
        scores[f"pass^{k}"] = dataclasses.asdict(statistics.estimate(statistics.pass_hat_k, counts, k, seed=seed))
    return scores


async def evaluate(player: rollout.Player, tasks: Sequence[Task], config, on_episode: Callable[[], None] | None = None):
    """Plays every task `eval.trials` times; returns (summary, groups)."""
    temperature = config.eval.temperature
    sampling = config.sampling if temperature is None else config.sampling.model_copy(update={"temperature": temperature})
    groups = await player.collect(
        tasks, config.eval.trials, step=0, stream=SAMPLING_STREAM, sampling=sampling, on_episode=on_episode
    )
    return summarize(tasks, groups, config.eval.trials, config.seed), groups
