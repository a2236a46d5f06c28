"""Where a run's numbers go: metrics.jsonl, TensorBoard files, the sinks of `logging.sinks`, and the terminal.

metrics.jsonl has exactly one line for each step, also when a run is killed and continued: lines after the restored
step are cut off before the first new one. Names are described in rti_jax/metric_names.py (docs/metrics.md).
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from rti_jax import live
from rti_jax.board import Board
from rti_jax.config import Config
from rti_jax.disk import writing
from rti_jax.redaction import redact
from rti_jax.trackers import Trackers

QUIET = ("rollout", "intervention", "teacher", "update", "sync", "probe")  # phases of every step: no line of their own


class Stopwatch:
    """Wall time of a step by phase. Phases do not overlap; what none of them accounts for is "other".

    Args:
      clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._started = clock, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds to the seconds of a phase."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - started

    def metrics(self) -> dict[str, float]:
        """`time/PHASE` of each phase and `time/other`; their sum is the time since the stopwatch was made."""
        other = self._clock() - self._started - sum(self._seconds.values())
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {"time/other": max(0.0, other)}


def over_hosts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`engine/...` metrics of all hosts' engines: counts and seconds add up, a share is the hosts' mean."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part and math.isfinite(part[name])]
        total = math.fsum(values)
        found[name] = total if not name.endswith("_share") else total / len(values) if values else math.nan
    return found


def jsonable(value: float) -> float | int | None:
    """A number as JSON has it: integers stay, what is not finite becomes None."""
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl in the order of their steps; a half-written last line of a killed run is left out."""
    lines: dict[int, dict[str, Any]] = {}
    if not path.is_file():
        return []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines[int(line["step"])] = line
        except (ValueError, KeyError, TypeError):
            continue
    return [lines[step] for step in sorted(lines)]


def truncate(path: pathlib.Path, step: int) -> None:
    """Leaves the lines up to and including `step`; whole or not at all."""
    if not path.is_file():
        return
    partial = path.with_name(path.name + ".partial")
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


class Recorder:
    """Records steps and shows progress: a display on a terminal (rti_jax/live.py), plain lines elsewhere.

    Args:
      folder: the run folder. steps: of the run in all.
      step: steps that are done already; lines after it are of steps that will be made again, and are cut off.
      console: where progress is shown; default standard error. trackers: where the numbers go as well.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        steps: int,
        step: int = 0,
        console: Console | None = None,
        trackers: Trackers | None = None,
    ):
        self._steps, self._trackers = steps, trackers
        self._path = folder / "metrics.jsonl"
        self._console = console or Console(stderr=True)
        self._started, self._seen = time.monotonic(), set[str]()
        folder.mkdir(parents=True, exist_ok=True)
        with writing(self._path):
            truncate(self._path, step)
            self._file = self._path.open("a", encoding="utf-8")
            self._board = Board(folder / "tensorboard", step + 1)
        self._display = None
        if live.animated(self._console):
            self._display = live.Display(self._console, steps, step, read_metrics(self._path))

    @classmethod
    def of(cls, config: Config, folder: pathlib.Path, step: int, console: Console | None = None) -> "Recorder":
        """The recorder of a run, with the sinks that its config names. Raises ConfigError if one does not start."""
        trackers = Trackers(config, folder)
        try:
            return cls(folder, config.steps, step, console, trackers)
        except BaseException:  # its files cannot be opened: nobody else has the sinks
            trackers.finish()
            raise

    def __enter__(self) -> "Recorder":
        if self._display:
            self._display.start()
        return self

    def __exit__(self, *_) -> None:
        if self._display:
            self._display.stop()
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # lines are written as they come: all that can be left has failed before
                file.close()
        if self._trackers:
            self._trackers.finish()

    def watch(self, usage: Callable[[], live.Usage], at_once: int) -> None:
        """Tells the display where it sees what each role costs, and how many episodes run at once."""
        if self._display:
            self._display.watch(usage, at_once)

    def collected(self, step: int, usage: live.Usage) -> None:
        """Tells the display what the groups of a step have cost, whose line comes after its update."""
        if self._display:
            self._display.collected(step, usage)

    def warn(self, text: str) -> None:
        """A line that should not be missed."""
        self._say(f"warning: {text}", style="bold yellow")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of one step. It is on disk when this returns."""
        line = {"step": step} | {name: jsonable(value) for name, value in metrics.items()}
        with writing(self._path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        self._scalars(step, line)
        if self._display:
            self._display.step(step, line)
        self._say(f"step {step}/{self._steps}  {summary_line(line)}")

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """Scores of an evaluation (`rti_jax.evaluate.summarize`), for TensorBoard and the terminal."""
        means = {
            f"eval/{kind}/{name.replace('@', '_at_').replace('^', '_hat_')}": estimate["mean"]  # TensorBoard's alphabet
            for kind, scores in result["kinds"].items()
            for name, estimate in scores.items()
            if isinstance(estimate, Mapping)
        }
        self._scalars(step, means)
        shown = [f"{kind} {s['pass@1']['mean']:.3f}" for kind, s in result["kinds"].items() if _has_mean(s)]
        self._say(f"evaluation after {step} steps: Pass@1 {', '.join(shown)}")

    def roles(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rates of the three roles (`rti_jax.role_eval.metrics`), for TensorBoard and the terminal."""
        self._scalars(step, metrics)
        shown = ", ".join(f"{k.removeprefix('roles/').replace('_', ' ')} {v:.3f}" for k, v in metrics.items())
        self._say(f"roles after {step} steps: {shown}")

    def phase(self, name: str) -> None:
        """Says what is going on now; phases of every step have no line of their own outside a terminal."""
        if self._display:
            self._display.phase(name)
        elif name not in QUIET:
            self._say(name)

    @contextlib.contextmanager
    def episodes(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Gives a function to call, with the episode or with anything, when one of `total` episodes is done."""
        if self._display:
            with self._display.episodes(name, total) as seen:
                yield seen
            return
        if name not in self._seen:  # once: every step has rollouts
            self._seen.add(name)
            self._say(f"{name}: {total} episodes")
        yield lambda *_: None

    def _say(self, text: str, style: str | None = None) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"[{minutes:3d}:{seconds:02d}] {redact(text)}"
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        with writing(self._path):
            for name, value in values.items():
                if value is not None and name != "step":
                    self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._trackers:
            self._trackers.log(step, values)


class Unrecorded:
    """What a host that writes nothing has in the place of a `Recorder`."""

    def __enter__(self) -> "Unrecorded":
        return self

    def __exit__(self, *_) -> None:
        pass

    def _nothing(self, *_) -> None:
        pass

    write = evaluation = roles = phase = watch = collected = warn = _nothing

    @contextlib.contextmanager
    def episodes(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        yield self._nothing


def _has_mean(scores: Mapping[str, Any]) -> bool:
    return scores.get("pass@1", {}).get("mean") is not None


def summary_line(line: Mapping[str, float | None]) -> str:
    """The numbers of a step that a person watches, as far as it has them."""
    get, prefix = line.get, "rollout/pre_success_"
    parts = []
    if (success := get("rollout/pre_success")) is not None:
        kinds = [
            f"{k.removeprefix(prefix)} {v:.2f}"
            for k, v in sorted(line.items())
            if k.startswith(prefix) and v is not None
        ]
        parts.append(f"success {success:.3f}" + (f" ({', '.join(kinds)})" if len(kinds) > 1 else ""))
    if get("rollout/groups") is not None:
        parts.append(f"failed groups {get('rollout/groups_all_failed') or 0:.0f}/{get('rollout/groups'):.0f}")
    if get("rti/attempts"):
        admitted, attempts = get("rti/replaced") or 0, get("rti/attempts")
        parts.append(f"corrections {get('rti/accepted') or 0:.0f}/{get('rti/proposals') or 0:.0f}")
        parts.append(f"admitted {admitted:.0f}/{attempts:.0f}")
    norm = get("optimizer/grad_norm")
    parts.append("no gradient" if norm is None else f"gradient {norm:.3f}")
    if (gap := get("mismatch/after_max")) is not None:
        parts.append(f"engine gap {gap:.1e}")
    seconds = sum(value for name, value in line.items() if name.startswith("time/") and value)  # the whole step
    return "  ".join([*parts, f"{seconds:.1f} s"] if seconds else parts)
