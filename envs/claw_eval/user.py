"""The simulated user of `multi_turn` tasks: the benchmark's prompt, answered by any OpenAI-compatible endpoint."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from envs.base import UserError
from envs.claw_eval import bridge
from envs.claw_eval.checkout import Checkout
from envs.claw_eval.config import UserConfig
from envs.endpoint import Endpoint

MARK = "[user_agent]\n"  # how the benchmark begins such a message; its graders look for it


class User(Protocol):
    """Plays the user of a task."""

    async def reply(self, checkout: Checkout, persona: str, messages: Sequence[Any]) -> str | None: ...


class EndpointUser:
    """A simulated user behind an endpoint."""

    def __init__(self, config: UserConfig):
        self._endpoint = Endpoint(config, "user", UserError)
        self._seconds = (config.timeout + 1.0) * (config.retries + 1) * 10  # waiting for a place included

    async def reply(self, checkout: Checkout, persona: str, messages: Sequence[Any]) -> str | None:
        """What the user says to the benchmark's `messages`, None once it has no more to say.

        Raises:
          UserError: the endpoint failed after all retries. (The benchmark would take that for a satisfied user.)
        """
        official = checkout.module("runner.user_agent").UserAgent
        agent = official.__new__(official)
        agent.client = client = bridge.Client(self._ask, asyncio.get_running_loop())
        agent.model_id = "user"
        try:
            return await bridge.in_thread(lambda: agent.generate_response(persona, list(messages)), self._seconds)
        except (Exception, bridge.Unanswered) as error:
            raise UserError(f"user: {client.failure or error}") from error
        finally:
            client.stop("the reply is no longer wanted")

    async def _ask(self, messages: Sequence[dict[str, Any]]) -> str:
        return (await self._endpoint.ask(messages)).content or ""


class SilentUser:
    """A user with nothing to add: for rehearsals."""

    async def reply(self, checkout: Checkout, persona: str, messages: Sequence[Any]) -> str | None:
        return None
