"""Which tasks are evaluated: splits, files of task ids, limits; and the seats of their episodes."""

import collections
import dataclasses
import difflib
import pathlib
from collections.abc import Mapping, Sequence

from envs.base import Task
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.rollout import Seat


def limited(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """The first `limit` tasks of each kind."""
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for task in tasks:
        seen[task.kind] += 1
        if limit is None or seen[task.kind] <= limit:
            kept.append(task)
    return kept


@dataclasses.dataclass(frozen=True)
class TaskSet:
    """The tasks of one or several splits. A task of two splits is one task, and counts once in their union."""

    splits: Mapping[str, Sequence[Task]]

    @property
    def tasks(self) -> list[Task]:
        """Each task once, in the order of the splits."""
        return list({task.id: task for tasks in self.splits.values() for task in tasks}.values())

    @property
    def name(self) -> str:
        return "+".join(self.splits)

    def seats(self, seed: int, trials: int, stream: str) -> list[tuple[Task, Seat]]:
        """An episode's place for each trial of each task.

        Its seeds are a function of the run's seed, the stream, the task's place in its split and the trial: a split
        has the episodes that it has alone, and that an evaluation within a training run of that seed has.
        """
        placed: dict[str, tuple[Task, str, str]] = {}
        for split, tasks in self.splits.items():
            prefix = f"{stream}/0" + (f"/{split}" if len(self.splits) > 1 else "")
            for i, task in enumerate(tasks):
                placed.setdefault(task.id, (task, f"{prefix}/{i}", f"{stream}/0/{i}"))
        return [
            (task, Seat(seed, 0, group_id, member, drawn_as))
            for task, group_id, drawn_as in placed.values()
            for member in range(trials)
        ]


def evaluated(source: EnvironmentSource, config: Config) -> TaskSet:
    """The tasks of `eval.splits`, else of `eval.split`, of them those that `eval.tasks` lists, up to `eval.limit`.

    Raises:
      ConfigError: an unknown split, a file that cannot be read, an id that is in no split, or a split left with none.
    """
    names = list(dict.fromkeys(config.eval.splits or [config.eval.split]))
    key = "eval.splits" if config.eval.splits else "eval.split"
    found = {name: source.tasks(name, key) for name in names}
    if config.eval.tasks:
        found = subset(found, config.eval.tasks, "eval.tasks")
    return TaskSet({name: limited(tasks, config.eval.limit) for name, tasks in found.items()})


def held_out(source: EnvironmentSource, config: Config) -> list[Task]:
    """What a training run evaluates: `eval.split`, of it what `eval.tasks` lists."""
    split = config.eval.split
    tasks = source.tasks(split, "eval.split")
    return list(subset({split: tasks}, config.eval.tasks, "eval.tasks")[split]) if config.eval.tasks else tasks


def trained(source: EnvironmentSource, config: Config) -> list[Task]:
    """What a training run trains on: `env.split`, of it what `rollout.tasks` lists."""
    split = config.env.split
    tasks = source.tasks(split)
    return list(subset({split: tasks}, config.rollout.tasks, "rollout.tasks")[split]) if config.rollout.tasks else tasks


def subset(splits: Mapping[str, Sequence[Task]], file: str, key: str) -> dict[str, list[Task]]:
    """Of each split the tasks that a file lists, in the split's order.

    Raises:
      ConfigError: a file that cannot be read or lists nothing, an id of none of the splits, or a split without any.
    """
    wanted = read_ids(file, key)
    known = {task.id for tasks in splits.values() for task in tasks}
    where = " or ".join(splits)
    for task_id, line in wanted.items():
        if task_id not in known:
            close = difflib.get_close_matches(task_id, sorted(known), n=1, cutoff=0)
            raise ConfigError(f"{key}={file}, line {line}: no task {task_id} in {where}; did you mean {close[0]}?")
    chosen = {name: [task for task in tasks if task.id in wanted] for name, tasks in splits.items()}
    if empty := [name for name, tasks in chosen.items() if not tasks]:
        raise ConfigError(f"{key}={file}: none of its tasks is in {empty[0]}")
    return chosen


def read_ids(file: str, key: str) -> dict[str, int]:
    """Task id -> its line in a file that has one a line; empty lines and lines that begin with # are none."""
    try:
        lines = pathlib.Path(file).read_text(encoding="utf-8-sig").splitlines()  # a BOM is no part of the first id
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ConfigError(f"{key}={file}: {reason}") from error
    ids: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            ids.setdefault(line, number)
    if not ids:
        raise ConfigError(f"{key}={file}: lists no task (one id a line)")
    return ids
