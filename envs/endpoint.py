"""Another model that episodes ask (a simulated user, a judge) behind an OpenAI-compatible endpoint, without threads.

Clients and limits on concurrency belong to an event loop and are shared by its episodes: an episode owns nothing here.
"""

import asyncio
import dataclasses
import json
import os
import weakref
from collections.abc import Sequence
from typing import Any

import pydantic

from envs.base import EnvironmentError, Message


class EndpointConfig(pydantic.BaseModel):
    """An OpenAI-compatible endpoint. What is left empty comes from environment variables, the key always does."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = ""  # base URL, with /v1; empty = the environment variable
    model: str = ""  # name there; empty = the environment variable, else the endpoint's first model
    temperature: float | None = pydantic.Field(0.0, ge=0)  # null leaves it to the endpoint
    max_tokens: int | None = pydantic.Field(None, ge=1)  # of a reply, thinking included; null leaves it to the endpoint
    timeout: float = pydantic.Field(60.0, gt=0)  # seconds, of one request
    retries: int = pydantic.Field(2, ge=0)  # of a failed request, and of a reply that cannot be used
    concurrency: int = pydantic.Field(128, ge=1)  # requests at once
    extra_body: dict[str, Any] = {}  # more fields of the request, e.g. {chat_template_kwargs: {enable_thinking: false}}


def resolve(config: EndpointConfig, role: str) -> tuple[str, str, str]:
    """(url, model, key) of an endpoint: config first, then $RTI_<ROLE>_URL, _MODEL and _API_KEY; url may be empty."""
    prefix = f"RTI_{role.upper()}"
    key = os.environ.get(f"{prefix}_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    return config.url or os.environ.get(f"{prefix}_URL", ""), config.model or os.environ.get(f"{prefix}_MODEL", ""), key


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a user says, or does on its device: (id, tool, arguments) of each call."""

    content: str | None
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()


class Endpoint:
    """Asks a chat endpoint for one usable reply.

    Args:
      role: "user" or "judge", whose environment variables fill in what the config leaves out.
      error: what is raised when there is no usable reply.
    """

    def __init__(self, config: EndpointConfig, role: str, error: type[EnvironmentError]):
        self._config, self._role, self._error = config, role, error
        self._url, self._model, self._key = resolve(config, role)

    async def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        if not self._url:
            raise self._error(
                f"no endpoint for the {self._role}: set env.{self._role}.url or RTI_{self._role.upper()}_URL"
            )
        problem = ""
        for _ in range(self._config.retries + 1):
            try:
                return _read(await self._request(messages, tools))
            except _Unusable as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no answer within {self._config.timeout:g} s"
            except Exception as error:  # openai's, httpx's
                problem = f"{type(error).__name__}: {error}"
                if getattr(error, "status_code", 500) in (400, 401, 403, 404, 422):
                    break  # the same request will fail again
                await asyncio.sleep(0.5)
        raise self._error(f"{self._role} at {self._url}: {' '.join(problem.split())[:300]}")

    async def _request(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Any:
        client, slots, models = _shared(self._url, self._key, self._config.concurrency)
        async with slots, asyncio.timeout(self._config.timeout):  # waiting for a slot is nobody's fault
            model = self._model or models.get("first")
            if not model:
                model = models["first"] = (await client.models.list()).data[0].id
            fields: dict[str, Any] = {"temperature": self._config.temperature, "max_tokens": self._config.max_tokens}
            if tools:
                fields |= {"tools": list(tools), "tool_choice": "auto"}
            answer = await client.chat.completions.create(
                model=model,
                messages=list(messages),
                extra_body=self._config.extra_body or None,
                **{k: v for k, v in fields.items() if v is not None},
            )
        if not answer.choices:
            raise _Unusable("an answer without a choice")
        return answer.choices[0].message


class _Unusable(Exception):
    pass


def _read(message: Any) -> Reply:
    """An answer without its thinking. Raises _Unusable if nothing is left, or a call cannot be read."""
    content = (message.content or "").rpartition("</think>")[2].strip()
    calls = []
    for i, call in enumerate(message.tool_calls or []):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            raise _Unusable(f"arguments of {call.function.name} are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise _Unusable(f"arguments of {call.function.name} are not an object")
        calls.append((call.id or f"call_{i}", call.function.name, arguments))
    if not content and not calls:
        raise _Unusable("an empty answer")
    return Reply(content or None, tuple(calls))


# Per event loop: a client of one loop cannot be used in another.
_clients: weakref.WeakKeyDictionary[Any, dict[tuple, tuple]] = weakref.WeakKeyDictionary()


def _shared(url: str, key: str, concurrency: int) -> tuple[Any, asyncio.Semaphore, dict[str, str]]:
    import openai

    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    place = (url, key, concurrency)
    if place not in clients:
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        clients[place] = client, asyncio.Semaphore(concurrency), {}
    return clients[place]
