"""What a reward function sees of an episode."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from envs.base import Task
from envs.mcp.server import Result


@dataclasses.dataclass(frozen=True)
class PlayedCall:
    """A call of the policy and what it was answered; `is_error` also for one that never reached the server."""

    name: str
    arguments: dict[str, Any] | None
    text: str
    is_error: bool


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode at its end.

    Attributes:
      task: with `data` of the task file. calls: of all turns, in order.
      answer: text of the turn without calls that ended the episode, or None at the turn limit.
    """

    task: Task
    calls: tuple[PlayedCall, ...]
    answer: str | None
    _call: Callable[[str, dict[str, Any]], Awaitable[Result]] = dataclasses.field(repr=False)

    async def call(self, name: str, **arguments: Any) -> Result:
        """Calls a tool of the episode's own server, also one that `env.tools` hides from the policy."""
        return await self._call(name, arguments)
