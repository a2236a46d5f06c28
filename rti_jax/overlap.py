"""Sampling the next batch while the update runs (`rollout.staleness: 1`).

    step n    update n, weights n -> n + 1                        in a thread
              collect n + 1, engine and scorer under weights n    in the event loop, beside it
              both are done -> weights n + 1 to the engine -> probe, metrics, checkpoint (with batch n + 1)

A batch is one update behind the weights that it trains, never more; the weights are handed over when no request runs,
so no turn mixes two versions. Which weights sample a batch does not depend on timing: it stays a function of the seed
and the step. The loss corrects by what was recorded when the batch was sampled (docs/loss.md).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Computed = TypeVar("Computed")


class Beside(Generic[T]):
    """Work of the event loop that goes on while a thread computes; leaving the context ends it.

    Args:
      work: begins when the caller awaits something. clock: gives seconds.
    """

    def __init__(self, work: Coroutine[Any, Any, T], clock: Callable[[], float] = time.monotonic):
        self._clock, self._started, self._ended = clock, clock(), 0.0
        self._computed = 0.0  # when the thread was done
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(self._end)

    def _end(self, _) -> None:
        self._ended = self._clock()

    async def compute(self, function: Callable[[], Computed]) -> Computed:
        """Runs the function in a thread; see `whole`."""
        try:
            return await whole(asyncio.to_thread(function))
        finally:
            self._computed = self._clock()

    async def result(self) -> T:
        """What the work gives, or raises; waits for it."""
        return await self._task

    async def __aenter__(self) -> "Beside[T]":
        return self

    async def __aexit__(self, *_) -> None:
        """Its errors are nobody's if nobody has asked for the result."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        """Seconds of the work, and those of them in which the thread computed too. Both have ended."""
        hidden = min(self._ended, self._computed) - self._started
        return {"overlap/sampling_seconds": self._ended - self._started, "overlap/hidden_seconds": max(0.0, hidden)}


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Awaits what must not be interrupted; a cancellation meanwhile comes at the caller's next await."""
    task, caller, cancellations = asyncio.ensure_future(work), asyncio.current_task(), 0
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            caller.uncancel()  # else asyncio.run would not see that Ctrl-C alone cancelled it
            cancellations += 1
    if cancellations:
        caller.cancel()
    return task.result()
