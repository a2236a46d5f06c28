"""Which host is stuck, and where: every host reports its progress, and each looks at the reports of all.

Hosts that wait for another one in a collective hang without a word. All of them pass the same marks (phases of a step,
exchanges) in the same order, so the host with the fewest marks is the one that the others wait for. If it shows no sign
of life for the limit, every host names it, with the step and the phase that it has not left, and ends.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

BEATS, FAILURES = "hosts/beats", "hosts/failures"
INTERVAL = 5.0  # seconds between two looks, at most


@dataclasses.dataclass(frozen=True)
class Beat:
    """What is known of one host.

    Attributes:
      process: its number. name: of its machine.
      marks: how many it has passed. place: of the last one, e.g. "step 3, rollout".
      idle: seconds without a new mark or another sign of life (an episode that ended), by the reader's clock.
    """

    process: int
    name: str
    marks: int
    place: str
    idle: float

    def __str__(self) -> str:
        return f"host {self.process} ({self.name})"


def stuck(beats: Sequence[Beat], limit: float) -> str | None:
    """One line that names the hosts that the others wait for and that show no sign of life; None if there are none."""
    last = min(b.marks for b in beats)
    found = [b for b in beats if b.marks == last and b.idle >= limit]
    if not found:
        return None
    waiting = [b for b in beats if b.marks > last]
    names, plural = ", ".join(map(str, found)), len(found) > 1
    line = f"{names} {'have' if plural else 'has'} not left {found[0].place} for {min(b.idle for b in found):.0f} s"
    if waiting:
        where = ", ".join(dict.fromkeys(b.place for b in waiting))
        line += f"; {', '.join(map(str, waiting))} {'wait' if len(waiting) > 1 else 'waits'} in {where}"
    return line


class Watchdog:
    """A thread that reports this host's progress and ends the process when a host is stuck or has failed.

    Args:
      client: key-value store that all hosts share (jax.distributed's).
      process, count: this host and how many there are.
      limit: seconds without a sign of life after which a host counts as stuck.
      end: called with the line that says why, in the thread.
    """

    def __init__(self, client: Any, process: int, count: int, limit: float, end: Callable[[str], None] | None = None):
        self._client, self._process, self._count, self._limit = client, process, count, limit
        self._end = end or self._exit
        self.interval = min(INTERVAL, limit / 4)
        self._marks, self._life, self._place = 0, 0, "the start"
        self._marking = threading.Lock()
        self._seen: dict[int, tuple[Any, float]] = {}  # last report of each host and when it was new
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        """Of this host's last mark."""
        return self._place

    def mark(self, place: str | None = None) -> None:
        """This host has come further; every host must pass the same marks. None: the place is the same."""
        with self._marking:  # what is sampled beside an update marks from a thread of its own
            self._place = place or self._place
            self._marks += 1

    def alive(self) -> None:
        """A sign of life between two marks."""
        self._life += 1

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def fail(self, reason: str) -> None:
        """Tells the other hosts that this one ends. In process 0 it returns when they have had the time to see it."""
        line = f"host {self._process} ({socket.gethostname()}) failed in {self._place}: {reason}"
        self.stop()
        with contextlib.suppress(Exception):  # the store may be gone, and this host ends anyway
            self._client.key_value_set(f"{FAILURES}/{self._process}", line)
            if self._process == 0:
                time.sleep(2 * self.interval)  # the store goes with it, and the others would only see that

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self.interval):
                if line := self._beat():
                    return self._end(line)
        except Exception as error:  # of the store, whatever its client raises
            return self._end(f"host 0, which keeps the hosts' reports, does not answer ({type(error).__name__})")

    def _beat(self) -> str | None:
        """Reports, and looks at the reports of all; returns why the run has to end, if it has."""
        report = json.dumps([socket.gethostname(), self._marks, self._place, self._life])
        self._client.key_value_set(f"{BEATS}/{self._process}", report, allow_overwrite=True)
        if failures := self._client.key_value_dir_get(FAILURES):
            return failures[0][1]
        return stuck(self._look(), self._limit)

    def _look(self) -> list[Beat]:
        """The newest report of every host; one that has never reported is at its start."""
        now = time.monotonic()
        reports = {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(BEATS)}
        beats = []
        for process in range(self._count):
            report = reports.get(process, '["unknown", 0, "the start", 0]')
            if self._seen.get(process, (None, 0.0))[0] != report:
                self._seen[process] = report, now
            name, marks, place, _ = json.loads(report)
            beats.append(Beat(process, name, marks, place, now - self._seen[process][1]))
        return beats

    def _exit(self, line: str) -> None:
        """Ends the process from this thread: the main one may hang in a collective for ever."""
        print(f"error: {line}; this is host {self._process}, in {self._place}: it ends", file=sys.stderr, flush=True)
        if self._process == 0:
            time.sleep(2 * self.interval)  # the others read their line from the store that lives here
        for child in multiprocessing.active_children():  # engines: nothing else would end them
            child.kill()
        os._exit(1)
