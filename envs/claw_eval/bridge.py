"""The benchmark's synchronous code, in threads of its own, with our endpoints behind the client that it asks.

Its graders, its judge and its simulated user call an OpenAI client and retry for minutes on whatever goes wrong, to end
with a made-up value. Here they get a client whose failure is no `Exception`: none of their handlers can turn it into a
score, and `Client.failure` tells of it even where a handler catches everything.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import threading
import types
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Ask = Callable[[Sequence[dict[str, Any]]], Awaitable[str]]  # messages -> an answer's text, without its thinking

PROSE = re.compile(r"""\{[^{}"':]+\}""")  # braces that hold no JSON, as in "the set {a, b}"


class Unanswered(BaseException):
    """An endpoint gave no usable answer: on purpose no Exception, see above."""


class Overdue(Exception):
    """A thread took longer than it may; it is left to itself."""


class Client:
    """What the benchmark uses of an `openai.OpenAI`: `chat.completions.create`; for one thread at a time.

    Args:
      ask: answers a request, on the event loop `loop`.

    Attributes:
      failure: what went wrong first, "" if nothing did.
      read: makes a usable answer of a text, or raises ValueError; then it is asked again, `tries` times in all.
      asked: number of answers.
    """

    def __init__(self, ask: Ask, loop: asyncio.AbstractEventLoop, tries: int = 1):
        self.failure, self.asked = "", 0
        self.read: Callable[[str], str] = str
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self._create))
        self._ask, self._loop, self._tries = ask, loop, tries
        self._pending: concurrent.futures.Future | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def stop(self, reason: str) -> None:
        """Ends what is being waited for, and every later request; from the event loop."""
        self.failure = self.failure or reason
        if (pending := self._pending) is not None:
            pending.cancel()

    def _create(self, *, messages: Sequence[dict[str, Any]], **_: Any) -> Any:
        """An answer. Model and sampling are the endpoint's: those that the benchmark names are its own."""
        problem = ""
        for _ in range(self._tries):
            text = self._wait(messages)
            try:
                text = self.read(text)
            except ValueError as error:
                problem = f"{error}: {text[:100]!r}"
                continue
            self.asked += 1
            message = types.SimpleNamespace(content=text, tool_calls=None)
            return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message, finish_reason="stop")])
        self.failure = problem
        raise Unanswered(problem)

    def _wait(self, messages: Sequence[dict[str, Any]]) -> str:
        if self.failure:
            raise Unanswered(self.failure)
        try:
            self._pending = asyncio.run_coroutine_threadsafe(self._answer(messages), self._loop)
            if self.failure:  # stopped in between
                self._pending.cancel()
            return self._pending.result()
        except BaseException as error:  # what the endpoint raises, or that it was stopped
            self.failure = self.failure or str(error) or type(error).__name__
            raise Unanswered(self.failure) from error
        finally:
            self._pending = None

    async def _answer(self, messages: Sequence[dict[str, Any]]) -> str:
        return await self._ask(messages)


async def in_thread(function: Callable[[], T], seconds: float) -> T:
    """Calls a function in a thread of its own that keeps no process alive.

    Raises:
      Overdue: after `seconds`. Otherwise what the function raises.
    """
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="claw-eval", daemon=True).start()
    await asyncio.wait({future}, timeout=seconds)
    if not future.done():
        raise Overdue(f"not finished after {seconds:g} s")
    result, error = future.result()
    if error is not None:
        raise error
    return result


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a text, in order; what is inside one is not listed again.

    Raises:
      ValueError: one is broken, so that what looks like an object may be a piece of it.
    """
    decoder, found, at = json.JSONDecoder(strict=False), [], text.find("{")
    while at >= 0:
        if prose := PROSE.match(text, at):
            end = prose.end()
        else:
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise ValueError("a broken JSON object") from error
            found.append(value)
        at = text.find("{", end)
    return found
