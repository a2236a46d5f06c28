"""Plays what is missing of an evaluation, and can be interrupted at any time."""

import asyncio
import pathlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envs.base import Task
from rti_jax import config as config_lib
from rti_jax import eval_setup, eval_store, policies, rollout, task_sets
from rti_jax.environments import EnvironmentSource
from rti_jax.limits import run_bounded
from rti_jax.types import Group

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


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
    setup = eval_setup.Setup(purpose, config, identity, tuple(t.id for t in tasks.tasks))
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
    won = ended = 0
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        bar = progress.add_task("episodes", total=total, completed=total - len(missing))

        async def one(task: Task, seat: rollout.Seat) -> None:
            nonlocal won, ended
            trajectory = await player.play(task, seat, sampling=sampling(config))
            store.add(trajectory)
            won, ended = won + trajectory.success, ended + trajectory.valid
            progress.update(bar, advance=1, description=f"episodes, {won} of {ended} won")

        await run_bounded([lambda t=t, s=s: one(t, s) for t, s in missing], policies.concurrency(config))


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
