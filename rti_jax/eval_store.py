"""Episodes of an evaluation on disk, a JSON line each, appended as they end: what an interrupted one goes on from.

    X.jsonl        every episode, as `rti view` reads it
    X.setup.yaml   what they were made with: config, policy and tasks; another one may not add to them
    X.json         the numbers, once all episodes are there

A line is whole or cut off by what ended the process; then its episode is played again. When all episodes are there the
file is put in order, so an evaluation that was interrupted leaves the bytes that an unbroken one leaves.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
from collections.abc import Container, Iterator, Sequence
from typing import IO

from envs.base import Task
from rti_jax import runs
from rti_jax.config import ConfigError
from rti_jax.eval_setup import Setup, setup_file
from rti_jax.recorded import read_trajectory
from rti_jax.rollout import Seat
from rti_jax.types import Group, Trajectory


class Store:
    """The recorded episodes of one evaluation; made by `opened`.

    In memory are their outcomes alone: token ids and messages of a long evaluation would fill it.
    """

    def __init__(self, path: pathlib.Path, file: IO[bytes]):
        self.path = path
        self._file = file
        self._outcomes: dict[str, Trajectory] = {}
        self._places: dict[str, tuple[int, int]] = {}  # (offset, bytes) of the line
        self.unreadable = self._end = 0
        file.seek(0)
        line = b"\n"
        for line in file:
            try:
                self._keep(_episode(line), len(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.unreadable += 1
            self._end += len(line)
        if not line.endswith(b"\n"):  # it was cut off: the next one is a line of its own
            self._write(b"\n")

    def add(self, trajectory: Trajectory) -> None:
        """Appends an episode; it is on disk when this returns."""
        line = (runs.trajectory_line(trajectory) + "\n").encode("utf-8", "replace")  # half a surrogate pair, say
        self._keep(trajectory, len(line))
        self._write(line)

    def missing(self, seats: Sequence[tuple[Task, Seat]]) -> list[tuple[Task, Seat]]:
        """Those that have not been played, or ended in an error that says nothing about the policy."""
        return [(t, s) for t, s in seats if not (s.id in self._outcomes and self._outcomes[s.id].status.valid)]

    def outcome(self, episode_id: str) -> Trajectory:
        """An episode without its turns and messages; `length` counts the turns."""
        return self._outcomes[episode_id]

    def groups(self, seats: Sequence[tuple[Task, Seat]]) -> list[Group]:
        """The outcomes of each task, in the order of the seats, all of which were played."""
        members: dict[str, list[Trajectory]] = {}
        for _, seat in seats:
            members.setdefault(seat.group_id, []).append(self.outcome(seat.id))
        return [Group(name, m[0].task_id, tuple(m)) for name, m in members.items()]

    def finish(self, seats: Sequence[tuple[Task, Seat]]) -> None:
        """Puts the file in the order of tasks and trials, each episode once; trials beyond the seats' are kept."""
        groups = {s.group_id: i for i, (_, s) in enumerate(seats)}
        known = [e for e in self._outcomes.values() if e.group_id in groups]
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("wb") as out:
            for episode in sorted(known, key=lambda e: (groups[e.group_id], e.member)):
                offset, size = self._places[episode.id]
                self._file.seek(offset)
                out.write(self._file.read(size).rstrip(b"\n") + b"\n")
        partial.replace(self.path)

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def _keep(self, trajectory: Trajectory, size: int) -> None:
        """Of two lines of an episode the later one counts, unless it is an error and the earlier one is not."""
        old = self._outcomes.get(trajectory.id)
        if old is None or trajectory.status.valid or not old.status.valid:
            outcome = dataclasses.replace(trajectory, turns=(), messages=(), replies=trajectory.length)
            self._outcomes[trajectory.id], self._places[trajectory.id] = outcome, (self._end, size)


def read(path: pathlib.Path, ids: Container[str]) -> dict[str, Trajectory]:
    """The whole episodes of these ids in a file that is in order."""
    with path.open("rb") as file:
        return {e.id: e for e in map(_episode, file) if e.id in ids}


def _episode(line: bytes) -> Trajectory:
    return read_trajectory(json.loads(line.decode("utf-8", "replace")))


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
    with episodes.open("a+b") as file:
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
