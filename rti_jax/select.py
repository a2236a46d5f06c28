"""`rti select CONFIG`: a hard subset, the tasks that a policy almost never solves.

    rti select configs/navigation_qwen3_8b.yaml --attempts 8 --output hard.txt         never solved in 8 attempts
    rti select CONFIG --attempts 4 --max-solved 1 --split train --output hard.txt
    rti train CONFIG rollout.tasks=hard.txt                                             train on them

As the paper's Hard20 (RTI, arXiv 2610.13438) they can be run and have stable graders: of a task none of the attempts
ended in an error, and each graded attempt, whose turns are played again in a fresh instance, gets the same grade again.
Of tasks that the environment calls a family (`Environment.family`), the hardest is taken. The list is sorted, an id a
line; beside it are the numbers (.json) and every attempt (.jsonl, `rti view`).
"""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from envs.base import Task
from rti_jax import eval_play, eval_setup, eval_store, evaluate, policies, regrade, runs, task_sets
from rti_jax.chat import Chat
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource, environment_source
from rti_jax.hosts import only_one
from rti_jax.rollout import Seat
from rti_jax.types import Group, Trajectory

SELECT = "select"  # random stream of its own: an evaluation on the subset draws anew
ERRORS, UNGRADED, UNSTABLE = "attempts ended in errors", "no attempt was graded", "graded otherwise the second time"
SOLVED, FAMILY = "solved too often", "another one of its family is taken"


@dataclasses.dataclass(frozen=True)
class Hardness:
    """What a task is chosen for, or why it is left out."""

    attempts: int
    max_solved: int

    def check(self, output: pathlib.Path) -> None:
        """Raises ConfigError for a choice that every task or none would pass, or a file of another kind."""
        if not 0 <= self.max_solved < self.attempts:
            raise ConfigError(f"--max-solved {self.max_solved}: expected 0 to {self.attempts - 1} of --attempts")
        if output.suffix != ".txt":
            raise ConfigError(f"--output {output}: expected a name that ends in .txt")

    def reason(self, row: Mapping[str, Any], first: Sequence[Trajectory], second: Mapping[str, Trajectory]) -> str:
        """Why a task is left out, empty for none; `second` has the episodes that were graded again."""
        if row["c"] > self.max_solved:
            return SOLVED
        if row["excluded"]:
            return ERRORS
        if not any(map(regrade.graded, first)):
            return UNGRADED
        again = [(e, second[e.id]) for e in first if e.id in second]
        if not all(s.status.valid for _, s in again):
            return ERRORS
        return "" if all(regrade.same_grade(*pair) for pair in again) else UNSTABLE


def main(
    config: Config,
    output: pathlib.Path,
    *,
    attempts: int = 4,
    max_solved: int = 0,
    limit: int | None = None,
    step: int | str | None = None,
    stable: bool = True,
    restart: bool = False,
) -> int:
    """Plays what is missing, grades again, writes the list; returns the exit code, 1 if no task is that hard.

    Args:
      output: the list, a .txt. attempts: at each task. max_solved: of them, at most. limit: tasks of each kind.
      step: of a checkpoint of the config's run that plays, or "newest". stable: whether grades are checked.
      restart: forget the attempts that were made before.
    """
    hardness = Hardness(attempts, max_solved)
    hardness.check(output)
    runs.check_output(output)
    only_one(config.hosts, "rti select")
    splits = config.eval.splits or [config.env.split]
    chosen = config.eval.model_copy(update={"splits": splits, "limit": limit, "tasks": ""})
    config = config.model_copy(update={"eval": chosen})
    work = _main(config, output, hardness, policies.chosen_step(config, step), stable, restart)
    return eval_play.interruptible(work)


async def _main(config: Config, output: pathlib.Path, hardness: Hardness, step, stable: bool, restart: bool) -> int:
    source = environment_source(config.env)
    source.check()
    tasks = task_sets.evaluated(source, config)
    again = output.with_suffix(".regrades.json")
    if restart:
        again.with_suffix(".jsonl").unlink(missing_ok=True)
    groups, policy = await eval_play.play(
        config, source, tasks, output.with_suffix(".json"), SELECT, trials=hardness.attempts, step=step, restart=restart
    )
    rows = evaluate.summarize(tasks.tasks, groups, hardness.attempts, config.seed)["tasks"]
    second: dict[str, Trajectory] = {}
    if stable:
        hard = [g for row, g in zip(rows, groups, strict=True) if not hardness.reason(row, g.trajectories, second)]
        setup = eval_setup.Setup("regrade", config, policy, tuple(t.id for t in tasks.tasks), source.asked())
        seats = tasks.seats(config.seed, hardness.attempts, SELECT)
        second = await _regrade(config, source, hard, seats, output.with_suffix(".jsonl"), again, setup)
    for task, row, group in zip(tasks.tasks, rows, groups, strict=True):
        row["family"] = source.cls.family(source.config, task)
        row["left_out"] = hardness.reason(row, group.trajectories, second)
    take_one_of_each_family(rows)
    result = {
        "policy": dataclasses.asdict(policy),
        "split": tasks.name,
        **dataclasses.asdict(hardness),
        "grades_checked": stable,
        "chosen": sorted(r["task"] for r in rows if not r["left_out"]),
        "left_out": dict(collections.Counter(r["left_out"] for r in rows if r["left_out"])),
        "tasks": rows,
    }
    runs.write_json(output.with_suffix(".json"), result)
    return _write(config, output, result)


async def _regrade(
    config: Config,
    source: EnvironmentSource,
    hard: Sequence[Group],
    seats: Sequence[tuple[Task, Seat]],
    attempts: pathlib.Path,
    path: pathlib.Path,
    setup: eval_setup.Setup,
) -> dict[str, Trajectory]:
    """The graded attempts at hard tasks, played again; by id."""
    wanted = {t.id for g in hard for t in g.trajectories if regrade.graded(t)}
    episodes = eval_store.read(attempts, wanted)
    ids = any(t.turns for t in episodes.values())
    chat = Chat.from_folder(config.model.path, thinking=config.sampling.thinking) if ids else None
    player = regrade.ReplayPlayer(source, config, episodes, chat)
    with (
        eval_store.opened(path, setup) as store,
        Progress(*eval_play.COLUMNS, console=Console(stderr=True)) as progress,
    ):
        places = [(task, seat) for task, seat in seats if seat.id in episodes]
        bar = progress.add_task("graded again", total=len(places), completed=len(places) - len(store.missing(places)))
        return await regrade.regrade(player, places, store, lambda: progress.advance(bar))


def take_one_of_each_family(rows: Sequence[dict[str, Any]]) -> None:
    """Leaves out all but the hardest of the tasks of a family that are left; of equally hard ones the first by id."""
    taken: set[str] = set()
    for row in sorted((r for r in rows if not r["left_out"]), key=lambda r: (r["c"], r["task"])):
        if row["family"] in taken:
            row["left_out"] = FAMILY
        taken.add(row["family"])


def _write(config: Config, output: pathlib.Path, result: Mapping[str, Any]) -> int:
    chosen, total = result["chosen"], len(result["tasks"])
    why = ", ".join(f"{n} {reason}" for reason, n in sorted(result["left_out"].items()))
    temperature = eval_play.sampling(config).temperature
    head = [
        f"{len(chosen)} of {total} tasks of {result['split']}, won at most {result['max_solved']} times in "
        f"{result['attempts']} attempts",
        f"by {result['policy']['name']}, temperature {temperature:g}, seed {config.seed}"
        + ("" if result["grades_checked"] else "; grades were not checked"),
        f"left out: {why or 'none'}",
    ]
    for line in head:
        print(line)
    if result["left_out"].get(ERRORS):
        print(f"{result['left_out'][ERRORS]} tasks had errors; the same command plays those attempts again")
    if not chosen:
        print(f"no task is that hard; {output} is not written")
        return 1
    output.write_text("".join(f"# {line}\n" for line in head) + "".join(f"{t}\n" for t in chosen), encoding="utf-8")
    print(f"wrote {output}; train on it with rollout.tasks={output}, evaluate on it with eval.tasks={output}")
    return 0
