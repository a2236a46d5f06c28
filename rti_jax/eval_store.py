"""Episodes of an evaluation on disk, a JSON line each, appended as they end: what an interrupted one goes on from.

    X.jsonl        every episode, as `rti view` reads it
    X.setup.yaml   what they were made with: config, policy and tasks; another one may not add to them
    X.json         the numbers, once all episodes are there

A line is whole or cut off by what ended the process; then its episode is played again. When all episodes are there the
file is put in order, so an evaluation that was interrupted leaves the bytes that an unbroken one leaves.
"""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO

from envs.base import Task
from rti_jax import runs
from rti_jax.config import ConfigError
from rti_jax.eval_setup import Setup, setup_file
from rti_jax.recorded import read_trajectory
from rti_jax.rollout import Seat
from rti_jax.types import Group, Trajectory


class Store:
    """The recorded episodes of one evaluation; made by `opened`."""

    def __init__(self, path: pathlib.Path, file: IO[str]):
        self.path = path
        self._file = file
        self._lines: dict[str, str] = {}
        self._episodes: dict[str, Trajectory] = {}
        self.unreadable = 0
        for line in filter(None, path.read_text(encoding="utf-8", errors="replace").split("\n")):
            try:
                self._keep(read_trajectory(json.loads(line)), line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.unreadable += 1

    def add(self, trajectory: Trajectory) -> None:
        """Appends an episode; it is on disk when this returns."""
        line = runs.trajectory_line(trajectory)
        line = line.encode("utf-8", "replace").decode()  # a model may write half a surrogate pair
        self._file.write(line + "\n")
        self._file.flush()
        self._keep(trajectory, line)

    def missing(self, seats: Sequence[tuple[Task, Seat]]) -> list[tuple[Task, Seat]]:
        """Those that have not been played, or ended in an error that says nothing about the policy."""
        return [(t, s) for t, s in seats if not (s.id in self._episodes and self._episodes[s.id].status.valid)]

    def episode(self, seat_id: str) -> Trajectory:
        return self._episodes[seat_id]

    def groups(self, seats: Sequence[tuple[Task, Seat]]) -> list[Group]:
        """The episodes of each task, in the order of the seats, all of which were played."""
        members: dict[str, list[Trajectory]] = {}
        for _, seat in seats:
            members.setdefault(seat.group_id, []).append(self._episodes[seat.id])
        return [Group(name, m[0].task_id, tuple(m)) for name, m in members.items()]

    def finish(self, seats: Sequence[tuple[Task, Seat]]) -> None:
        """Puts the file in the order of tasks and trials, each episode once; trials beyond the seats' are kept."""
        places = {s.group_id: i for i, (_, s) in enumerate(seats)}
        known = [e for e in self._episodes.values() if e.group_id in places]
        ordered = sorted(known, key=lambda e: (places[e.group_id], e.member))
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(self._lines[e.id] + "\n" for e in ordered), encoding="utf-8")
        partial.replace(self.path)

    def _keep(self, trajectory: Trajectory, line: str) -> None:
        old = self._episodes.get(trajectory.id)
        if old is None or trajectory.status.valid or not old.status.valid:
            self._episodes[trajectory.id], self._lines[trajectory.id] = trajectory, line


@contextlib.contextmanager
def opened(path: pathlib.Path, setup: Setup, restart: bool = False) -> Iterator[Store]:
    """The store of the evaluation whose numbers will be in `path`, for this process alone.

    Args:
      restart: forget what is recorded there.

    Raises:
      ConfigError: episodes of another setup are there, or another process adds to them, or `path` is no .json.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--output {path}: expected a name that ends in .json")
    path.parent.mkdir(parents=True, exist_ok=True)
    episodes = path.with_suffix(".jsonl")
    with episodes.open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{episodes} is being written by another process; give another --output") from error
        if restart:
            file.truncate(0)
            path.unlink(missing_ok=True)
        elif path.exists() or file.tell():
            _check(path, setup)
        setup.write(setup_file(path))
        _mend(file)
        yield Store(episodes, file)


def _check(path: pathlib.Path, setup: Setup) -> None:
    file = setup_file(path)
    another = "give another --output, or --restart to begin anew"
    if not file.is_file():
        raise ConfigError(f"{path} is there and nothing says what it was made with ({file.name} is missing); {another}")
    try:
        changed = Setup.read(file).differences(setup)
    except ConfigError as error:
        raise ConfigError(f"{error}; {another}") from error
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConfigError(f"{path} is of another evaluation; give these keys back, {another}:\n{lines}")


def _mend(file: IO[str]) -> None:
    """Ends a line that was cut off, so that the next one is a line of its own."""
    file.seek(0)
    text = file.read()
    if text and not text.endswith("\n"):
        file.write("\n")
        file.flush()
