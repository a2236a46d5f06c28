"""The run folder runs/NAME: config.yaml, metrics.jsonl, trajectories/, checkpoints/, evals/, export/, report.html."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rti_jax import config as config_lib
from rti_jax import config_diff, redaction
from rti_jax.disk import writing
from rti_jax.types import Group, IntervenedRollout, Trajectory


@dataclasses.dataclass(frozen=True)
class Run:
    """Paths of a run; nothing here is held open."""

    folder: pathlib.Path

    @property
    def config(self) -> pathlib.Path:
        return self.folder / "config.yaml"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.folder / "checkpoints"

    @property
    def export(self) -> pathlib.Path:
        return self.folder / "export"

    @property
    def best(self) -> pathlib.Path:
        """The policy of the best evaluation so far, with eval.keep_best."""
        return self.folder / "best"

    @property
    def report(self) -> pathlib.Path:
        return self.folder / "report.html"

    @property
    def begun(self) -> bool:
        """True if there is anything to go on from; before that another config may take the folder."""
        return any(any((self.folder / part).glob("*")) for part in ("checkpoints", "evals", "trajectories"))

    def evaluation(self, step: int) -> pathlib.Path:
        """Where the evaluation after `step` updates is kept."""
        return self.folder / "evals" / f"step_{step:06d}.json"

    def roles(self, step: int) -> pathlib.Path:
        """Where the measurement of the three roles after `step` updates is kept."""
        return self.folder / "evals" / f"roles_{step:06d}.json"

    def trajectories(self, step: int) -> pathlib.Path:
        return self.folder / "trajectories" / f"step_{step:06d}.jsonl"

    def finished(self, steps: int) -> bool:
        """True if `steps` updates were made, evaluated and exported."""
        return self.evaluation(steps).is_file() and (self.export / "config.json").is_file() and self.report.is_file()


def open_run(config: config_lib.Config) -> Run:
    """Makes the folder, or checks that the run in it may go on under this config.

    Raises:
      ConfigError: a key that changes the algorithm differs, or the folder is something else's.
    """
    run = Run(config.run_dir)
    config = config_lib.without_secrets(config)
    if run.config.is_file() and run.begun:
        old = config_lib.without_secrets(config_lib.load_config(run.config))
        config_diff.check_resume(old, config)
        for difference in config_diff.differences(old, config):
            print(f"changed since this run was started: {difference}")
    elif run.folder.is_dir() and not run.config.is_file() and any(p.name != "evals" for p in run.folder.iterdir()):
        raise config_lib.ConfigError(f"{run.folder} is not empty and holds no run (no config.yaml); give another name=")
    for folder in ("trajectories", "checkpoints", "evals"):
        (run.folder / folder).mkdir(parents=True, exist_ok=True)
    config_lib.save_resolved(config, run.config)
    return run


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Holds the folder: a second trainer in it would cut the first one's files.

    Raises:
      ConfigError: another process holds it.
    """
    with open(run.folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise config_lib.ConfigError(
                f"{run.folder} is being trained by another process; give another name="
            ) from error
        yield


def check_output(path: pathlib.Path) -> None:
    """Raises ConfigError where `--output` cannot be written, before the work that it is for; leaves nothing there."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
        for file in (path, path.with_suffix(".jsonl")):
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise config_lib.ConfigError(f"--output {path}: {error.strerror}") from error


def write_json(path: pathlib.Path, data: Any) -> None:
    """Writes whole or not at all."""
    with _partial(path) as partial:
        partial.write_text(json.dumps(plain(data), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_groups(path: pathlib.Path, groups: Sequence[Group], advantages: dict[str, float]) -> None:
    """One line per trajectory, on-policy or intervened, for `rti view` and for whoever looks with jq.

    Lines of intervened rollouts hold what the roles saw, evidence included; nothing here is read by training.
    """
    write_lines(path, group_lines(groups, advantages))


def group_lines(groups: Sequence[Group], advantages: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """What `write_groups` writes, line by line; made `plain`, `recorded.groups` reads it."""
    for group in groups:
        members = [*group.trajectories, *([group.replaced] if group.replaced else [])]
        intervened = {a.trajectory.id: a for a in group.attempts}
        extra = [a.trajectory for a in group.attempts if a.trajectory not in members]
        for trajectory in (*members, *extra):
            line = _line(trajectory, intervened.get(trajectory.id), advantages.get(trajectory.id))
            yield line | {"replaced": trajectory is group.replaced}


def write_lines(path: pathlib.Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSON line each, the whole file or nothing."""
    with _partial(path) as partial, open(partial, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(plain(line), ensure_ascii=False) + "\n" for line in lines)


@contextlib.contextmanager
def _partial(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where a file is written until it is whole; removed if it never is."""
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            yield partial
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def trajectory_line(trajectory: Trajectory) -> str:
    """The line that `write_groups` writes for a trajectory without an intervention or an advantage."""
    return json.dumps(plain(_line(trajectory, None, None) | {"replaced": False}), ensure_ascii=False)


def _line(trajectory: Trajectory, attempt: IntervenedRollout | None, advantage: float | None) -> dict[str, Any]:
    line = _fields(trajectory) | {"advantage": advantage}
    return line | ({"interventions": attempt.interventions, "decision": attempt.decision} if attempt else {})


def _fields(value: Any) -> dict[str, Any]:
    """Of a dataclass; its values as they are, where `dataclasses.asdict` would copy each token."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def plain(value: Any) -> Any:
    """JSON's types without known secrets; what is not a finite number becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _fields(value)
    if isinstance(value, Mapping):
        return {
            str(k): redaction.redact(v) if k == "error" and isinstance(v, str) else plain(v) for k, v in value.items()
        }
    if isinstance(value, str):
        return redaction.known_hidden(value)
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # of ids and log-probabilities there are many
        if kinds == {int}:
            return list(value)
        return [v if math.isfinite(v) else None for v in value] if kinds == {float} else [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
