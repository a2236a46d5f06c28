"""An event loop in a thread of its own, for clients that are used from any loop, or from none."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

JOIN_SECONDS = 10.0


class LoopThread:
    """Runs coroutines in its loop, whichever thread or loop asks. Connections and locks made there stay there."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="rti_jax engine", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine) -> Any:
        """Runs to the end; blocks the calling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def wrap(self, coroutine: Coroutine) -> Any:
        """Runs to the end; a cancellation of the caller cancels it there. RuntimeError after stop()."""
        if self._stopped:
            coroutine.close()
            raise RuntimeError("closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def stop(self) -> None:
        """Cancels what runs, and ends the thread."""
        self._stopped = True
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(JOIN_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_SECONDS)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
