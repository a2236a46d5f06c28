"""Scoring while episodes are played: on several hosts the scorer needs all of them, whenever any has rows.

The learner's scorer is a program over the whole mesh, and which rows a host wants scored depends on its episodes. So
hosts meet in rounds: each brings the rows that its episodes wait for, perhaps none, all score them together, and the
last round is the one in which every host's work is done.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from rti_jax.hosts import Hosts

T = TypeVar("T")
Row = tuple[tuple[int, ...], tuple[int, ...]]


class JointScorer:
    """Called with rows it gives their log-probabilities; on several hosts within `during` only.

    Args:
      score: the learner's scorer; on several hosts all must pass it the same rows.
      patience: seconds after which a host meets the others although it has nothing to ask; None: once it asks or is
        done. With a limit, an episode that asks in its middle need not wait for the other hosts' next question.
    """

    def __init__(self, hosts: Hosts, score: Callable[[Sequence[Row]], list[np.ndarray]], patience: float | None = None):
        self._hosts, self._score, self._patience = hosts, score, patience
        self._waiting: list[tuple[Sequence[Row], asyncio.Future]] = []
        self._asked = asyncio.Event()

    async def __call__(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities of responses under the current weights, [len(response)] each."""
        if self._hosts.alone:
            return await asyncio.to_thread(self._score, rows)
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((list(rows), answer))
        self._asked.set()
        return await answer

    async def during(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        """Awaits work that may ask for scores. Every host calls this at the same point of its program."""
        if self._hosts.alone:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while True:
                await self._something(task)
                if task.done():
                    task.result()  # a failure ends this host before the others wait for it
                if await self._round(task.done()):
                    return task.result()
        finally:
            task.cancel()

    async def _something(self, task: asyncio.Future) -> None:
        """Returns when this host has rows, is done, or has been patient enough."""
        asked = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait({task, asked}, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()

    async def _round(self, done: bool) -> bool:
        """Scores what all hosts ask for; returns whether all are done."""
        mine, self._waiting = self._waiting, []
        self._asked.clear()
        rows = [row for asked, _ in mine for row in asked]
        rounds = await asyncio.to_thread(self._hosts.exchange, (rows, done))
        everyone = [row for part, _ in rounds for row in part]
        if everyone:
            values = await asyncio.to_thread(self._score, everyone)
            start = sum(len(part) for part, _ in rounds[: self._hosts.index])
            for asked, answer in mine:
                answer.set_result(values[start : start + len(asked)])
                start += len(asked)
        return all(finished for _, finished in rounds)
