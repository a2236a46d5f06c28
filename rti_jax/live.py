"""What a terminal shows while a run goes on; it is redrawn in place, and step lines pass above it.

Everything is shown as of now: the totals of the steps that are recorded, what those come to whose groups are there and
wait for their update, and what the one in progress has come to.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rti_jax.types import SAMPLERS, RoleUsage, Status

ERRORS = {
    "rollout/truncated": "truncated",
    "rollout/environment_error": "environment",
    "rollout/user_error": "user simulator",
    "rollout/judge_error": "judge",
    "rollout/timeout": "timeout",
    "rti/attempts_in_error": "interventions",
    "engine/retried_requests": "requests retried",
    "engine/restarts": "engine restarts",
    "optimizer/skipped": "updates skipped",
}
Usage = Mapping[str, RoleUsage]
Counts = collections.Counter[str]


class Display:
    """Steps, the phase of now with its queue, success, cost by role, errors and alarms.

    Args:
      steps: of the run in all. step: steps that are done already. lines: of metrics.jsonl, of these.
    """

    def __init__(self, console: Console, steps: int, step: int = 0, lines: Iterable[Mapping[str, Any]] = ()):
        columns = TextColumn("{task.description}"), BarColumn()
        times = TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()
        # The estimate is over all steps of this process: one may take an hour.
        self._whole = Progress(*columns, MofNCompleteColumn(), *times, console=console, speed_estimate_period=1e9)
        self._now = Progress(*columns, TextColumn("{task.fields[queue]}"), console=console)
        self._steps = self._whole.add_task("steps", total=steps, completed=step)
        self._phase = self._now.add_task("", total=None, queue="", visible=False)
        self._totals: Counts = collections.Counter()
        self._broken: Counts = collections.Counter()  # of the step in progress
        self._waiting: dict[int, tuple[Usage, Counts]] = {}  # cost and the same of steps that wait for their line
        self._last: Mapping[str, Any] = {}
        self._usage: Callable[[], Usage] = dict
        self._at_once = 0
        for line in lines:
            self._add(line)
        self._live = Live(get_renderable=self.render, console=console, transient=True)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def watch(self, usage: Callable[[], Usage], at_once: int) -> None:
        """From now on shows what each role has cost since the last step, and how many of `at_once` episodes run."""
        self._usage, self._at_once = usage, at_once

    def phase(self, name: str, total: int | None = None) -> None:
        """What is going on now, in `total` parts if that is known."""
        self._now.remove_task(self._phase)  # one that had a total cannot be without again
        self._phase = self._now.add_task(name, total=total, queue=self._queue(0, total) if total else "")

    @contextlib.contextmanager
    def episodes(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Gives a function to call with an episode that is done, or with anything.

        The count goes on when another phase begins meanwhile: with rollout.staleness these may be beside an update.
        """
        self.phase(name, total)
        count = 0

        def done(episode: Any = None, *_) -> None:
            nonlocal count
            status = getattr(episode, "status", Status.SUCCESS)
            if status not in (Status.SUCCESS, Status.FAILURE):
                self._broken[f"rollout/{status}"] += 1
            count += 1
            self._now.update(self._phase, completed=count, total=total, queue=self._queue(count, total))

        yield done

    def collected(self, step: int, usage: Usage) -> None:
        """The groups of a step are there, at this cost, which `watch`'s function no longer counts."""
        self._waiting[step] = usage, self._broken.copy()
        self._broken.clear()

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """A step is recorded."""
        self._waiting.pop(step, None)
        self._add(line)
        self._broken.clear()
        self._whole.update(self._steps, completed=step)
        self._live.refresh()

    def render(self) -> RenderableType:
        """The picture of now."""
        shown = [self._whole, self._now, self._facts(), self._ledger(), self._errors()]
        raised = [n.partition("/")[2].replace("_", " ") for n, v in self._last.items() if n.startswith("alarms/") and v]
        if raised:
            shown.append(Text(f"alarms: {', '.join(raised)}", style="bold red"))
        return Group(*shown)

    def _add(self, line: Mapping[str, Any]) -> None:
        self._totals.update({name: v for name, v in line.items() if isinstance(v, int | float)})
        self._last = line

    def _queue(self, done: int, total: int) -> str:
        left = max(0, total - done)
        running = min(left, self._at_once or left)
        return f"{done}/{total}" + (f"   {running} in flight, {left - running} waiting" if left else "")

    def _facts(self) -> Text:
        before, after = (self._last.get(f"rollout/{end}_success") for end in ("pre", "post"))
        seconds = sum(v for name, v in self._last.items() if name.startswith("time/") and v)
        tokens, parts = self._last.get("rollout/sampled_tokens") or 0.0, []
        if before is not None:
            parts.append(f"success {before:.3f}" + (f" -> {after:.3f} after intervention" if after is not None else ""))
        if seconds:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if sampled := self._totals["rollout/sampled_tokens"]:
            parts.append(f"{sampled:,.0f} tokens so far")
        return Text("   ".join(parts) or "no step is done yet", style="bold")

    def _ledger(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("role", "calls", "tokens", "seconds"):
            table.add_column(name, justify="left" if name == "role" else "right", header_style="dim")
        parts = [self._usage(), *(usage for usage, _ in list(self._waiting.values()))]
        for role in SAMPLERS:
            new = [usage[role] for usage in parts if role in usage]
            cells = (self._so_far(role, k) + sum(getattr(u, k) for u in new) for k in ("calls", "tokens", "seconds"))
            table.add_row(role, *(f"{value:,.0f}" for value in cells))
        return table

    def _so_far(self, role: str, kind: str) -> float:
        return self._totals[f"{'rollout' if role == 'policy' else 'rti'}/{role}_{kind}"]

    def _errors(self) -> Text:
        new = sum((broken for _, broken in list(self._waiting.values())), self._broken)
        counts = {word: self._totals[name] + new[name] for name, word in ERRORS.items()}
        found = ", ".join(f"{word} {count:,.0f}" for word, count in counts.items() if count)
        return Text(f"errors so far: {found or 'none'}", style="yellow" if found else "dim")


def animated(console: Console) -> bool:
    """Whether a console can redraw: a terminal that is not a dumb one."""
    return console.is_terminal and not console.is_dumb_terminal
