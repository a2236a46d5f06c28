"""Limits on time and on what runs at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

CLOSE_SECONDS = 10.0  # for an environment to close, and for a cancelled episode to stop
T = TypeVar("T")


class EpisodeTimeout(Exception):
    """What was awaited took longer than its limit."""


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Awaits with a time limit that holds even for a coroutine that does not let itself be cancelled.

    Raises:
      EpisodeTimeout: after `seconds`, and `CLOSE_SECONDS` more at most for it to clean up.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise EpisodeTimeout
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # a late error is nobody's
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)


async def run_bounded(jobs: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """Runs jobs, at most `limit` at once; results in order. The first error cancels the others and is raised.

    Raises:
      ValueError: a limit below 1, with which no job would ever begin.
    """
    if limit < 1:
        raise ValueError(f"at most {limit} at once: nothing would ever run")
    slots = asyncio.Semaphore(limit)

    async def run(job: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await job()

    tasks = [asyncio.create_task(run(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
