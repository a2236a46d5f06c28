"""`rti eval CONFIG`: Pass@k and Pass^k, k = 1..trials, of a policy on held-out tasks, with intervals.

    rti eval configs/quickstart.yaml                                  the policy in model.path
    rti eval configs/quickstart.yaml model.path=runs/quickstart/export --output after.json
    rti eval configs/quickstart.yaml --roles --output roles.json      how well it plays the three roles

Each task is played `eval.trials` times at the evaluation temperature, without any intervention. Episodes that ended in
an infrastructure error are excluded and counted beside every number.
"""

import asyncio
import collections
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envs.base import Task
from rti_jax import config as config_lib
from rti_jax import role_eval, rollout, runs, statistics, summary, weight_sync
from rti_jax import roles as roles_lib
from rti_jax.chat import Chat
from rti_jax.checkpoint import restore_params
from rti_jax.engine import make_engine
from rti_jax.environments import environment_source
from rti_jax.hosts import Hosts, join, own_servers
from rti_jax.logprobs import Scorer
from rti_jax.runtime import Policy, check_folder, load_policy
from rti_jax.types import Group, Trajectory

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
    temperature = config.eval.temperature
    sampling = (
        config.sampling if temperature is None else config.sampling.model_copy(update={"temperature": temperature})
    )
    own = hosts.share(len(tasks))
    played = await player.collect(
        [tasks[i] for i in own],
        config.eval.trials,
        step=0,
        stream=SAMPLING_STREAM,
        numbers=own,
        sampling=sampling,
        on_episode=on_episode,
    )
    groups = hosts.in_order(hosts.collect(played))
    return summarize(tasks, groups, config.eval.trials, config.seed) if hosts.first else None, groups


def main(
    config: config_lib.Config,
    output: pathlib.Path | None = None,
    step: int | None = None,
    roles: bool = False,
    turns: pathlib.Path | None = None,
) -> int:
    """Evaluates `model.path`, or the checkpoint of `step` of the config's run; writes one JSON file.

    Args:
      roles: measure the policy as validator, corrector and verifier (rti_jax/role_eval.py) instead of its success.
      turns: with roles, judge the turns of this earlier measurement.
    """
    if turns and not roles:
        raise config_lib.ConfigError("--turns goes with --roles")
    recorded = role_eval.read_turns(turns) if turns else []
    if roles and config.hosts.coordinator:
        raise config_lib.ConfigError("--roles measures on one host: leave hosts.coordinator empty")
    with join(config.hosts) as hosts:
        return asyncio.run(_main(own_servers(config, hosts), output, step, roles, recorded, hosts))


async def _main(
    config: config_lib.Config,
    output: pathlib.Path | None,
    step: int | None,
    roles: bool,
    recorded: Sequence[role_eval.Recorded],
    hosts: Hosts,
) -> int:
    source = environment_source(config.env)
    source.check()
    if roles:
        role_eval.check(source.cls)
    tasks = source.tasks(config.eval.split)
    tasks = tasks if recorded else limited(tasks, config.eval.limit)
    check_folder(config.model.path)
    chat = Chat.from_folder(config.model.path, thinking=config.sampling.thinking)
    policy = load_policy(config) if roles or step is not None else None
    if step is not None:
        restored = restore_params(config.run_dir / "checkpoints", policy.params, step)[1]
        policy = dataclasses.replace(policy, params=restored)
    engine = await asyncio.to_thread(make_engine, config.model.path, config)
    try:
        if step is not None:
            await weight_sync.sync(engine, policy.model, policy.params, version=max(1, step))
        player = rollout.Player(source, chat, engine, config)
        with Progress(*COLUMNS, console=Console(stderr=True), disable=not hosts.first) as progress:
            here = len(hosts.share(len(tasks)))
            count = len(recorded) or here * (1 if roles else config.eval.trials)
            bar = progress.add_task("turns" if recorded else "episodes", total=count)

            def seen(*_) -> None:
                hosts.alive()
                progress.advance(bar)

            if roles:
                result, lines = await _measure_roles(player, policy, tasks, config, recorded, seen)
            else:
                result, groups = await evaluate(player, tasks, config, on_episode=seen, hosts=hosts)
    finally:
        await engine.close()
    if not hosts.first:
        return 0
    what = f"{config.eval.split}{'_roles' if roles else ''}"
    name = f"{what}_{'model' if step is None else f'step_{step:06d}'}.json"
    path = output or config.run_dir / "evals" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(path, {"model": config.model.path, "step": step, "split": config.eval.split, **result})
    if roles:
        runs.write_lines(path.with_suffix(".jsonl"), map(dataclasses.asdict, lines))
        Console().print(role_eval.table(result))
        print(f"wrote {path} and every judged turn beside it")
    else:
        runs.write_groups(path.with_suffix(".jsonl"), groups, {})
        Console().print(summary.score_table({"": result}))
        print(f"wrote {path} and its episodes beside it")
    return 0


async def _measure_roles(player: rollout.Player, policy: Policy, tasks: Sequence[Task], config, recorded, on_episode):
    """(summary, judged turns); see role_eval."""
    scorer = Scorer(policy.model, policy.mesh, config.sampling.temperature, config.batch.buckets)

    async def score(rows):
        return await asyncio.to_thread(scorer.score, policy.params, rows)

    team = roles_lib.Roles(player.chat, player.engine, config.sampling, config.rti, roles_lib.connect(config.rti))
    return await role_eval.measure(player, team, score, tasks, recorded=recorded, on_episode=on_episode)
