"""An environment as everything here drives it: calls and answers checked, waits limited, every error its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from envs.base import AssistantTurn, CallTimeout, Environment, EnvironmentError, Observation, Outcome, StepResult, Task
from rti_jax import answers
from rti_jax.limits import CLOSE_SECONDS, EpisodeTimeout, within
from rti_jax.tool_schemas import ToolSchemas

T = TypeVar("T")


class Supervised:
    """Drives one episode of an environment.

    Args:
      seconds: limit of one `reset`, `step` or `score`, and of `close` if it is less than `CLOSE_SECONDS`; it holds
        wherever the environment awaits something.

    Every method raises EnvironmentError, whatever the environment raises or wrongly gives, and CallTimeout, which names
    the method. Here messages enter an episode, so here their text is made encodable.
    """

    def __init__(self, environment: Environment, seconds: float):
        self.environment = environment
        self._seconds = seconds
        self._schemas: ToolSchemas | None = None

    async def reset(self, task: Task) -> Observation:
        start = answers.observation(await self._await("reset", lambda: self.environment.reset(task)))
        if self.environment.check_arguments:
            try:
                self._schemas = ToolSchemas(start.tools)
            except Exception as error:  # a schema that is none
                raise EnvironmentError(f"tools of the observation: {type(error).__name__}: {error}") from error
        return start

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Plays a turn; a call that does not fit its tool arrives with `error` set."""
        return answers.step_result(await self._await("step", lambda: self.environment.step(self.checked(turn))))

    async def score(self) -> Outcome:
        return answers.outcome(await self._await("score", lambda: self.environment.score()))

    async def close(self) -> None:
        await self._await("close", lambda: self.environment.close(), min(self._seconds, CLOSE_SECONDS))

    def checked(self, turn: AssistantTurn) -> AssistantTurn:
        """The turn as the environment gets it."""
        if self._schemas is None or not turn.tool_calls:
            return turn
        try:
            return self._schemas.check(turn)
        except ValueError as error:
            raise EnvironmentError(str(error)) from error

    async def _await(self, name: str, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        seconds = self._seconds if seconds is None else seconds
        try:
            return await within(seconds, call())
        except EpisodeTimeout:
            raise CallTimeout(f"{name} took longer than {seconds:g} s") from None
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # from outside: the episode itself ends
                raise
            raise EnvironmentError(f"{name} raised CancelledError, though nobody cancelled it") from error
        except EnvironmentError:
            raise
        except Exception as error:
            raise EnvironmentError(f"{type(error).__name__}: {error}") from error
