"""Plays what is missing of an evaluation, and can be interrupted at any time."""

import asyncio
import pathlib
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envs.base import Task
from rti_jax import config as config_lib
from rti_jax import eval_setup, eval_store, policies, rollout, task_sets
from rti_jax.environments import EnvironmentSource
from rti_jax.limits import run_bounded
from rti_jax.types import Group, Trajectory

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
LINE_SECONDS = 60.0  # between two lines where there is no terminal


def sampling(config: config_lib.Config) -> config_lib.SamplingConfig:
    """How an evaluation samples: at `eval.temperature`, if there is one."""
    temperature = config.eval.temperature
    return config.sampling if temperature is None else config.sampling.model_copy(update={"temperature": temperature})


async def play(
    config: config_lib.Config,
    source: EnvironmentSource,
    tasks: task_sets.TaskSet,
    path: pathlib.Path,
    purpose: str,
    *,
    trials: int,
    step: int | None = None,
    restart: bool = False,
) -> tuple[list[Group], eval_setup.Identity]:
    """Plays what is missing of an evaluation whose numbers will be in `path`; returns the outcomes of all episodes.

    Args:
      purpose: names the random stream. step: play this checkpoint of the config's run. restart: begin anew.

    Raises:
      ConfigError: the episodes that are there are of another setup.
    """
    identity = await policies.identify(config, step)
    setup = eval_setup.Setup(purpose, config, identity, tuple(t.id for t in tasks.tasks), source.asked())
    seats = tasks.seats(config.seed, trials, purpose)
    with eval_store.opened(path, setup, restart) as store:
        if store.unreadable:
            print(f"{store.unreadable} lines of {store.path} cannot be read and are left out", file=sys.stderr)
        if missing := store.missing(seats):
            if len(missing) < len(seats):
                print(f"{len(seats) - len(missing)} of {len(seats)} episodes are there already", file=sys.stderr)
            async with policies.opened(config, source, step) as player:
                await _play(player, missing, store, len(seats), config)
        store.finish(seats)
        return store.groups(seats), identity


async def _play(player: rollout.Player, missing, store: eval_store.Store, total: int, config) -> None:
    with Watch(total, len(missing)) as watch:

        async def one(task: Task, seat: rollout.Seat) -> None:
            trajectory = await player.play(task, seat, sampling=sampling(config))
            store.add(trajectory)
            watch(trajectory)

        await run_bounded([lambda t=t, s=s: one(t, s) for t, s in missing], player.concurrency)


class Watch:
    """Episodes as they end: a bar with the time that is left, or a line a minute where there is no terminal."""

    def __init__(self, total: int, missing: int, console: Console | None = None):
        self._total, self._missing = total, missing
        self._won = self._valid = self._ended = 0
        self._console = console or Console(stderr=True)
        self._started = self._said = time.monotonic()
        self._progress = Progress(*COLUMNS, console=self._console, disable=not self._console.is_terminal)
        self._bar = self._progress.add_task("episodes", total=total, completed=total - missing)

    def __enter__(self) -> "Watch":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def __call__(self, trajectory: Trajectory) -> None:
        self._won, self._valid = self._won + trajectory.success, self._valid + trajectory.valid
        self._ended += 1
        now, won = time.monotonic(), f"{self._won} of {self._valid} won"
        self._progress.update(self._bar, advance=1, description=f"episodes, {won}")
        if not self._console.is_terminal and (now > self._said + LINE_SECONDS or self._ended == self._missing):
            self._said = now
            done = self._total - self._missing + self._ended
            left = (now - self._started) / self._ended * (self._missing - self._ended) / 60
            text = f"{done} of {self._total} episodes, {won}, about {left:.0f} minutes left"
            self._console.print(text, highlight=False, soft_wrap=True)


def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Runs it; says how to go on if it is interrupted or terminated."""

    async def guarded() -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        return await work

    try:
        return asyncio.run(guarded())
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except asyncio.CancelledError:
        code = 128 + signal.SIGTERM
    print("\ninterrupted; the same command plays the episodes that are missing", file=sys.stderr)
    return code
