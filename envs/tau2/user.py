"""The simulated user: τ²'s prompt and messages, answered by any OpenAI-compatible endpoint."""

from collections.abc import Sequence
from typing import Any, Protocol

from envs.base import Message, UserError
from envs.endpoint import Endpoint, EndpointConfig, Reply


class User(Protocol):
    """Plays the user. `messages` are in OpenAI format from the user's side: its own messages are the assistant's."""

    async def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply: ...


class EndpointUser:
    """A user simulator behind an endpoint."""

    def __init__(self, config: EndpointConfig):
        self._endpoint = Endpoint(config, "user", UserError)

    async def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Raises UserError where the endpoint fails, or gives nothing that can be used, after all retries."""
        return await self._endpoint.ask(messages, tools)
