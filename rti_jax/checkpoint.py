"""Checkpoints: the learner's state by Orbax, the rest of a run as JSON, and a commit marker that is written last.

    <directory>/<step>/state/           parameters ("params") and the other state ("rest"), sharded, float32
    <directory>/<step>/extra.json       its run (resume.py), version of the weights, counts of stop.*, the next groups
    <directory>/<step>/COMMITTED.json   name, size and CRC-32 of every file above: without it, or with another size,
                                        the checkpoint does not count; with another CRC-32 it is not read

A save that is killed leaves a folder without a marker. Older checkpoints are deleted only after the marker is there.
"""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rti_jax.config import ConfigError
from rti_jax.disk import DiskFullError, writing
from rti_jax.learner import TrainState

log = logging.getLogger(__name__)
# Orbax logs the stack of each thread that fails, of a full disk and of what follows from it; `wait` raises it too.
logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "raised an exception" in str(record.msg)))

MARKER, EXTRA, STATE = "COMMITTED.json", "extra.json", "state"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held; `skipped` says in a line each why newer ones were passed over."""

    step: int
    state: TrainState
    extra: dict[str, Any]
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """Checkpoints of one run.

    Args:
      directory: created if needed.
      keep: committed checkpoints that are kept, newest first.
      background: a save returns once the arrays are copied off the devices and is written meanwhile; the next save,
        `wait` or leaving the context waits for it and raises what went wrong.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2, background: bool = False):
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.wait()

    def save(self, step: int, state: TrainState, extra: dict[str, Any]) -> None:
        """Saves one step, unless a committed checkpoint of it is there already. Every process must call it.

        Args:
          extra: JSON values; written by the first process only.
        """
        self.wait()
        text = json.dumps(extra)  # fails before anything is written
        folder = self.directory / str(step)
        if _as_first(fault(folder) is None):
            return
        if _first_process():
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        _barrier(f"clear {step}")
        _silence_late_writes()
        with writing(folder):
            writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            writer.save(folder / STATE, ocp.args.Composite(**_items(state)), force=True)
        if self._background:
            self._thread = threading.Thread(target=self._finish, args=(writer, folder, text), name="checkpoint")
            self._thread.start()
        else:
            self._finish(writer, folder, text)
            self.wait()
            _barrier(f"committed {step}")  # nobody goes on, or looks for it, before it counts

    def check(self) -> None:
        """Raises what went wrong in a save in the background, if that has ended."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until a save in the background is committed. Raises what went wrong in it."""
        if self._thread:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error:
            raise error

    def _finish(self, writer: ocp.AsyncCheckpointer, folder: pathlib.Path, extra: str) -> None:
        try:
            with writing(folder):
                writer.wait_until_finished()
                writer.close()
                if _first_process():
                    _write(folder / EXTRA, extra)
                    _write(folder / MARKER, json.dumps(_contents(folder)))
                    self._delete_old()
        except BaseException as error:  # raised by `wait`, in the thread that saves
            self._error = error
            if isinstance(error, DiskFullError) and _first_process():  # Orbax may still be writing, so not all may go
                shutil.rmtree(folder, ignore_errors=True)  # older ones stay, and there may be room for what is small

    def _delete_old(self) -> None:
        """Deletes all but the newest `keep` committed checkpoints, and folders of saves that never finished."""
        good = [s for s in steps(self.directory) if fault(self.directory / str(s)) is None]
        for step in set(steps(self.directory)) - set(good[: self.keep]):
            shutil.rmtree(self.directory / str(step), ignore_errors=True)


def save(directory: str | os.PathLike, step: int, state: TrainState, extra: dict[str, Any], keep: int = 2) -> None:
    """One save that is committed when it returns; see `Checkpoints` for saves in the background."""
    with Checkpoints(directory, keep) as checkpoints:
        checkpoints.save(step, state, extra)


def newest(directory: str | os.PathLike) -> int | None:
    """Step of the newest undamaged checkpoint, read for its checksums alone; None if no save was ever committed.

    For several hosts: one looks, all restore the step that it found. Raises ConfigError as `restore`.
    """
    found = _newest_readable(directory, None, lambda folder: None)
    return found and found[0]


def restore(directory: str | os.PathLike, target: TrainState, step: int | None = None) -> Restored | None:
    """The newest readable checkpoint, or that of `step`, on the shardings of `target`.

    Args:
      target: a state of arrays or `jax.ShapeDtypeStruct`s with shardings, of any mesh.

    Returns:
      None if no save was ever committed.

    Raises:
      ConfigError: `step` is not there or not readable, or no committed checkpoint is readable.
    """

    def read(folder: pathlib.Path) -> tuple[TrainState, dict[str, Any]]:
        return _read(folder, target), json.loads((folder / EXTRA).read_text())

    found = _newest_readable(directory, step, read)
    return found and Restored(found[0], *found[1], tuple(found[2]))


def restore_params(directory: str | os.PathLike, target: Any, step: int | None = None) -> tuple[int, Any]:
    """Step and parameters alone (for an export), on the shardings of `target`; no optimizer state is read.

    Raises:
      ConfigError: as `restore`, and no save was ever committed.
    """
    found = _newest_readable(directory, step, lambda folder: _restore_items(folder, {"params": target})["params"])
    if found is None:
        raise ConfigError(f"no readable checkpoint in {directory}: there is none")
    return found[0], found[1]


def _newest_readable(
    directory: str | os.PathLike, step: int | None, read: Callable[[pathlib.Path], Any]
) -> tuple[int, Any, list[str]] | None:
    """Step, what `read` made of its folder, and why newer ones were passed over; see `restore`."""
    directory = pathlib.Path(directory).absolute()
    found = steps(directory) if step is None else [step]
    skipped: list[str] = []
    for candidate in found:
        folder = directory / str(candidate)
        reason = fault(folder) or _damage(folder)
        if reason is None:
            try:
                return candidate, read(folder), skipped
            except Exception as error:  # any fault of a file: the one before it may be good
                reason = f"cannot be read: {_one_line(error)}"
        skipped.append(f"checkpoint {folder} skipped: {reason}")
        log.warning(skipped[-1])
    if step is None and not any((directory / str(s) / MARKER).exists() for s in found):
        return None
    good = [str(s) for s in steps(directory) if s not in found and fault(directory / str(s)) is None]
    others = f" (there are {', '.join(good)})" if good else ""
    raise ConfigError(f"no readable checkpoint in {directory}: " + "; ".join(skipped) + others)


def steps(directory: str | os.PathLike) -> list[int]:
    """Steps that have a folder, committed or not, newest first."""
    directory = pathlib.Path(directory)
    names = (p.name for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted((int(n) for n in names if n.isdecimal()), reverse=True)


def fault(folder: pathlib.Path) -> str | None:
    """Why the checkpoint in this folder does not count, or None; compares file sizes with the marker."""
    if not folder.is_dir():
        return "there is no such checkpoint"
    try:
        expected = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return "the save was interrupted before it was committed"
    except ValueError:
        return f"{MARKER} is damaged"
    actual = {name: path.stat().st_size for name, path in _files(folder).items()}
    for name, (size, _) in expected.items():
        if actual.get(name) != size:
            return f"{name} has {actual.get(name, 0)} of {size} bytes"
    return None


def _damage(folder: pathlib.Path) -> str | None:
    """Which file of a whole checkpoint holds other bytes than were written, or None; reads them all."""
    expected, actual = json.loads((folder / MARKER).read_text()), _contents(folder)
    return next((f"{name} is damaged" for name in expected if expected[name] != actual[name]), None)


def _items(state: TrainState) -> dict[str, Any]:
    rest = {"opt_state": state.opt_state, "step": state.step}
    return {"params": ocp.args.StandardSave(state.params), "rest": ocp.args.StandardSave(rest)}


def _read(folder: pathlib.Path, target: TrainState) -> TrainState:
    rest = {"opt_state": target.opt_state, "step": target.step}
    restored = _restore_items(folder, {"params": target.params, "rest": rest})
    return TrainState(restored["params"], restored["rest"]["opt_state"], restored["rest"]["step"])


def _restore_items(folder: pathlib.Path, targets: dict[str, Any]) -> Any:
    """Restores onto the targets' shardings; Orbax checks the trees' structure and we check shapes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), targets)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
        return reader.restore(folder / STATE, ocp.args.Composite(**arguments))


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    return {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MARKER}


def _contents(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file but the marker."""

    def crc(path: pathlib.Path) -> int:
        value = 0
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                value = zlib.crc32(block, value)
        return value

    files = _files(folder)
    with ThreadPoolExecutor() as pool:  # reading and CRC-32 leave the interpreter free
        checksums = list(pool.map(crc, files.values()))
    return {n: [p.stat().st_size, c] for (n, p), c in zip(files.items(), checksums, strict=True)}


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file that is whole or absent, also after a power cut."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _silence_late_writes() -> None:
    """Orbax closes its event loop when a write fails, and Python prints a traceback for each one that ends after that.

    `wait` raises what went wrong; everything else that cannot be raised goes to the hook that there was.
    """
    before = sys.unraisablehook
    if hasattr(before, "silences_late_writes"):
        return

    def hook(found: Any) -> None:
        closed = isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == "Event loop is closed"
        if not closed or found.object is not None:  # TensorStore's callback has no object
            before(found)

    hook.silences_late_writes = True
    sys.unraisablehook = hook


def _first_process() -> bool:
    return jax.process_index() == 0


def _as_first(value: bool) -> bool:
    """Process 0's value, in all: a shared file system may show the others a folder later."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"checkpoint {name}")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
