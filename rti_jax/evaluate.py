"""`rti eval CONFIG`: Pass@k and Pass^k, k = 1..trials, of a policy on held-out tasks, with intervals.

    rti eval configs/quickstart.yaml                                  the policy in model.path
    rti eval configs/quickstart.yaml model.path=runs/quickstart/export --output after.json
    rti eval runs/quickstart --step 20                                a checkpoint of a run, with the run's config
    rti eval configs/quickstart.yaml --endpoint http://host:8000/v1   another model, for reference
    rti eval configs/quickstart.yaml --split test,ood                 each split and all of them in one table
    rti eval configs/quickstart.yaml --roles --output roles.json      how well it plays the three roles

Each task is played `eval.trials` times at the evaluation temperature, without any intervention. Episodes that ended in
an infrastructure error are excluded and counted beside every number. Every episode is on disk when it ends
(eval_store.py): the same command, typed again, plays what is missing and what was excluded.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.base import Task
from rti_jax import config as config_lib
from rti_jax import eval_play, eval_report, measure_roles, policies, rollout, runs, statistics, task_sets
from rti_jax.environments import environment_source
from rti_jax.hosts import Hosts, only_one
from rti_jax.types import Group, Trajectory

SAMPLING_STREAM = "eval"  # evaluation draws from a random stream of its own


def summarize(tasks: Sequence[Task], groups: Sequence[Group], trials: int, seed: int) -> dict[str, Any]:
    """Counts per task and Pass@k / Pass^k with 95% bootstrap intervals over tasks, overall and per kind."""
    rows = []
    for task, group in zip(tasks, groups, strict=True):
        turns = [t.length for t in group.valid]
        rows.append(
            {
                "task": task.id,
                "kind": task.kind,
                "n": len(group.valid),
                "c": sum(t.success for t in group.valid),
                "excluded": len(group.trajectories) - len(group.valid),
                "turns": sum(turns) / len(turns) if turns else None,
                "turns_each": turns,
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


def by_split(rows: Sequence[Mapping[str, Any]], tasks: task_sets.TaskSet, trials: int, seed: int) -> dict[str, Any]:
    """Scores of each split and of their union, of which a task of two splits is one task.

    Beside those of `summarize`, `pass^mean` is the mean of Pass^1 to Pass^trials.
    """
    ids = {name: {t.id for t in split} for name, split in tasks.splits.items()}
    union = eval_report.UNION if eval_report.UNION not in ids else f"all of {tasks.name}"
    ids[union] = {t.id for t in tasks.tasks}
    chosen = {name: [r for r in rows if r["task"] in wanted] for name, wanted in ids.items()}
    return {name: _scores(r, trials, seed) | _mean_pass_hat(r, trials, seed) for name, r in chosen.items()}


def _mean_pass_hat(rows: Sequence[Mapping[str, Any]], trials: int, seed: int) -> dict[str, Any]:
    def mean(n: int, c: int) -> float:
        return sum(statistics.pass_hat_k(n, c, k) or 0.0 for k in range(1, trials + 1)) / trials

    values = [mean(r["n"], r["c"]) for r in rows if r["n"] >= trials]
    return {"pass^mean": dataclasses.asdict(statistics.mean_interval(values, seed=seed))}


def check_disjoint(trained: Sequence[Task], evaluated: Sequence[Task]) -> None:
    """Raises ConfigError if a task is both trained and evaluated."""
    if both := sorted({t.id for t in trained} & {t.id for t in evaluated}):
        raise config_lib.ConfigError(
            f"{len(both)} tasks are both trained (env.split) and evaluated (eval.split), e.g. {both[0]}; "
            "choose splits that share none"
        )


async def evaluate(
    player: rollout.Player,
    tasks: Sequence[Task],
    config,
    on_episode: Callable[[Trajectory], None] | None = None,
    hosts: Hosts | None = None,
):
    """Plays every task `eval.trials` times; returns (summary, groups).

    On several hosts each plays its share of the tasks; process 0 returns what concerns all, the others (None, theirs).
    """
    hosts = hosts or Hosts()
    own = hosts.share(len(tasks))
    played = await player.collect(
        [tasks[i] for i in own],
        config.eval.trials,
        step=0,
        stream=SAMPLING_STREAM,
        numbers=own,
        sampling=eval_play.sampling(config),
        on_episode=on_episode,
    )
    groups = hosts.in_order(hosts.collect(played))
    return summarize(tasks, groups, config.eval.trials, config.seed) if hosts.first else None, groups


def main(
    config: config_lib.Config,
    output: pathlib.Path | None = None,
    step: int | str | None = None,
    roles: bool = False,
    turns: pathlib.Path | None = None,
    *,
    restart: bool = False,
    per_task: bool = False,
    table: pathlib.Path | None = None,
) -> int:
    """Evaluates the policy that `policies.identify` names; writes one JSON file. Returns the exit code.

    Args:
      step: of a checkpoint of the config's run, or "newest".
      roles: measure the policy as validator, corrector and verifier (rti_jax/role_eval.py) instead of its success.
      turns: with roles, judge the turns of this earlier measurement.
      restart: forget the episodes that an earlier evaluation left in the same place.
      per_task: print every task, not only the worst. table: also write the tasks to this .csv or .md file.
    """
    if turns and not roles:
        raise config_lib.ConfigError("--turns goes with --roles")
    only_one(config.hosts, "rti eval")
    if table:
        eval_report.check_table(table)
    if output:
        runs.check_output(output)
    step = policies.chosen_step(config, step)
    if roles:
        if restart or per_task or table:
            raise config_lib.ConfigError("--restart, --per-task and --table do not go with --roles")
        return measure_roles.main(config, output, step, turns)
    return eval_play.interruptible(_main(config, output, step, restart, per_task, table))


async def _main(config, output, step, restart: bool, per_task: bool, table) -> int:
    source = environment_source(config.env)
    source.check()
    tasks = task_sets.evaluated(source, config)
    path = output or default_output(config, tasks, step)
    trials = config.eval.trials
    groups, identity = await eval_play.play(
        config, source, tasks, path, SAMPLING_STREAM, trials=trials, step=step, restart=restart
    )
    result = {
        "model": identity.name if config.eval.endpoint.url else config.model.path,
        "step": step,
        "split": tasks.name,
        "policy": dataclasses.asdict(identity),
        **summarize(tasks.tasks, groups, trials, config.seed),
    }
    if len(tasks.splits) > 1:
        result["splits"] = by_split(result["tasks"], tasks, trials, config.seed)
        for row in result["tasks"]:
            row["splits"] = [name for name, split in tasks.splits.items() if any(t.id == row["task"] for t in split)]
    runs.write_json(path, result)
    eval_report.show(result, per_task)
    if table:
        eval_report.write_table(result, table)
        print(f"wrote {table}")
    return closing(groups, path)


def closing(groups: Sequence[Group], path: pathlib.Path) -> int:
    """Says where it is and what was excluded; returns the exit code, 1 if no episode could be played."""
    broken = [t for g in groups for t in g.trajectories if not t.status.valid]
    print(f"wrote {path} and its episodes beside it (rti view {path})")
    if broken:
        why = f"{broken[0].status}: {broken[0].info.get('error', 'no reason given')}"
        print(f"{len(broken)} episodes are excluded ({why}); the same command plays them again", file=sys.stderr)
    return int(not any(g.valid for g in groups))


def default_output(config: config_lib.Config, tasks: task_sets.TaskSet, step: int | None) -> pathlib.Path:
    """In the run's evals/: SPLITS_POLICY.json."""
    endpoint = config.eval.endpoint
    policy = "model" if step is None else f"step_{step:06d}"
    if endpoint.url:
        policy = f"endpoint_{endpoint.model}" if endpoint.model else "endpoint"
    subset = f"_{pathlib.Path(config.eval.tasks).stem}" if config.eval.tasks else ""
    name = "".join(c if c.isalnum() or c in "+.-_" else "_" for c in f"{tasks.name}{subset}_{policy}")
    return config.run_dir / "evals" / f"{name}.json"  # a split may be called anything
