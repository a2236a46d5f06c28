"""The processes that play a study's jobs, and what a person sees meanwhile.

Each worker (rti_jax/study_worker.py) is fed by a thread here. A worker that dies costs the job that it played; a new
one takes the next. Closing a worker's input is what ends it, also if this process is killed.
"""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rti_jax.metrics import read_metrics
from rti_jax.study import Job

WORKER = (sys.executable, "-m", "rti_jax.study_worker")
EVALUATION_UNITS = 10  # evaluations and export of a run, in steps' worth of time
POLL_SECONDS = 1.0
REPORT_SECONDS = 60.0  # between lines about what is running
END_SECONDS = 90.0  # for workers to save their last whole step


class Log:
    """Lines for a person: on standard error, and in a file with the time of day."""

    def __init__(self, path: pathlib.Path, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self._path, self._started = path, time.monotonic()

    def __call__(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"[{minutes:3d}:{seconds:02d}] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        with open(self._path, "a", encoding="utf-8") as out:
            print(time.strftime("%H:%M:%S"), line, file=out)


class Crew:
    """Plays jobs in `workers` processes.

    Args:
      pinned: each worker on a core of its own; a single one has them all.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: int,
        output: pathlib.Path,
        log: Log,
        *,
        pinned: bool,
    ):
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            self._jobs.put(job)
        self._all, self._workers, self._output, self._log = list(jobs), min(workers, len(jobs)), output, log
        self._pinned = pinned
        self._ended: queue.SimpleQueue[tuple[Job, str, float]] = queue.SimpleQueue()
        self._running: dict[str, Job] = {}
        self._processes: set[subprocess.Popen] = set()
        self._stopping = False

    def run(self, on_end: Callable[[], None]) -> dict[str, str]:
        """Plays all jobs; returns the errors of those that failed, by name. An interruption ends the workers first.

        Args:
          on_end: called whenever a job has ended, e.g. to write the tables so far.
        """
        cores = sorted(os.sched_getaffinity(0)) if self._pinned and self._workers > 1 else []
        arguments = [[str(cores[i % len(cores)])] if cores else [] for i in range(self._workers)]
        threads = [threading.Thread(target=self._work, args=(a,), daemon=True) for a in arguments]
        errors: dict[str, str] = {}
        with self._shown() as progress:
            try:
                for thread in threads:
                    thread.start()
                while any(t.is_alive() for t in threads) or not self._ended.empty():
                    with contextlib.suppress(queue.Empty):
                        job, error, seconds = self._ended.get(timeout=POLL_SECONDS)
                        errors |= {job.name: error} if error else {}
                        progress.ended(job, error, seconds)
                        on_end()
                    progress.update(self._running.copy())
            finally:
                self._stop()
        return errors

    def _work(self, arguments: Sequence[str]) -> None:
        """One thread: jobs from the queue to its process, replies back."""
        process = None
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                job = self._jobs.get_nowait()
                process = process or self._start(arguments)
                self._running[job.name] = job
                started = time.monotonic()
                error = self._play(process, job)
                if process.poll() is not None or process.stdout.closed:
                    process = None
                self._running.pop(job.name)
                if not self._stopping:
                    self._ended.put((job, error, time.monotonic() - started))
        if process:
            _close(process)
            process.wait()

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen:
        """A process with a session of its own: Ctrl-C reaches it by the closing of its input, after this one."""
        with open(self._output / "workers.log", "a") as errors:
            process = subprocess.Popen(
                [*WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**self._environment(), **os.environ},
            )
        self._processes.add(process)
        return process

    def _environment(self) -> dict[str, str]:
        """Runs of a study share nearly all of their programs: each is compiled once, not once a run."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str((self._output / "compiled").resolve()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        }

    def _play(self, process: subprocess.Popen, job: Job) -> str:
        """The error of a job, or an empty string."""
        line = json.dumps(
            {
                "name": job.name,
                "source": str(job.source),
                "overrides": job.overrides,
                "evaluation": job.evaluation,
            }
        )
        try:
            print(line, file=process.stdin, flush=True)
            reply = process.stdout.readline()
            if reply:
                return json.loads(reply)["error"]
        except (OSError, ValueError) as problem:  # it went away, or something else wrote to its replies
            self._log(f"{job.name}: {type(problem).__name__}: {problem}")
        _close(process)
        process.stdout.close()
        return f"its process ended with exit code {process.wait()}; see {self._output / 'workers.log'}"

    def _stop(self) -> None:
        """Ends what runs: workers save their last whole step when their input closes."""
        self._stopping = True
        for process in self._processes:
            _close(process)
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    @contextlib.contextmanager
    def _shown(self):
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        console = self._log.console
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
            yield _Progress(self._all, self._log, bar)


class _Progress:
    """How far all jobs are, and how long the rest will take at the pace so far."""

    def __init__(self, jobs: Sequence[Job], log: Log, bar: Progress):
        self._left = {job.name: _units(job) - _played(job) for job in jobs}
        self._total = self._rest = sum(self._left.values())
        self._log, self._bar, self._count, self._ended = log, bar, len(jobs), 0
        self._started = self._said = time.monotonic()
        self._task = bar.add_task("starting", total=self._total)

    def update(self, running: dict[str, Job]) -> None:
        left = {name: _units(job) - _played(job) for name, job in running.items()}
        self._rest = sum((self._left | left).values())
        at = ", ".join(f"{n} {min(_played(j), j.config.steps)}/{j.config.steps}" for n, j in running.items())
        self._bar.update(self._task, completed=self._total - self._rest, description=at or "ending")
        if at and not self._log.console.is_terminal and time.monotonic() - self._said > REPORT_SECONDS:
            self._say(f"running: {at}")

    def ended(self, job: Job, error: str, seconds: float) -> None:
        self._left[job.name] = 0
        self._ended += 1
        self._rest = sum(self._left.values())
        what = f"FAILED: {error}" if error else f"done in {seconds / 60:.1f} minutes{_scores(job)}"
        self._say(f"{self._ended} of {self._count}  {job.name} {what}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        done = self._total - self._rest
        pace = (self._said - self._started) / done if done else 0.0
        rest = f"; about {pace * self._rest / 60:.0f} minutes left" if self._rest and done else ""
        self._log(text + rest)


def _units(job: Job) -> int:
    return job.config.steps + EVALUATION_UNITS


def _played(job: Job) -> int:
    return len(read_metrics(job.config.run_dir / "metrics.jsonl"))


def _scores(job: Job) -> str:
    """Pass@1 of each split, in brief."""
    splits = json.loads(job.final.read_text())["splits"]
    means = [
        f"{split} {kind} {100 * scores['pass@1']['mean']:.1f}"
        for split, result in splits.items()
        for kind, scores in result["kinds"].items()
        if scores["pass@1"]["mean"] is not None and (kind != "all" or len(result["kinds"]) == 1)
    ]
    return ": " + ", ".join(means) if means else ""


def _close(process: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()
