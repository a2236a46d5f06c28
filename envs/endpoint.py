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

from envs import chat_api
from envs.base import EnvironmentError, Message

NO_KEY = "none"


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
    key = os.environ.get(f"{prefix}_API_KEY") or os.environ.get("OPENAI_API_KEY") or NO_KEY
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
        for left in reversed(range(self._config.retries + 1)):
            try:
                return _read(*await self._request(messages, tools))
            except chat_api.UnusableAnswer as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no answer within {self._config.timeout:g} s"
            except Exception as error:  # openai's, httpx's
                problem = f"{type(error).__name__}: {error}"
                if getattr(error, "status_code", 500) in (400, 401, 403, 404, 422):
                    break  # the same request will fail again
                if left:
                    await asyncio.sleep(0.5)
        key = "" if self._key == NO_KEY else self._key
        raise self._error(f"{self._role} at {self._url}: {chat_api.without_key(problem, key)}")

    async def _request(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Message, str]:
        """(message, finish reason)."""
        client, slots, models = _shared(self._url, self._key, self._config.concurrency)
        async with slots, asyncio.timeout(self._config.timeout):  # waiting for a slot is nobody's fault
            model = self._model or models.get("first")
            if not model:
                names = chat_api.read_models((await client.models.with_raw_response.list()).text)
                if not names:
                    raise chat_api.UnusableAnswer("it has no model")
                model = models["first"] = names[0]
            fields: dict[str, Any] = {"temperature": self._config.temperature, "max_tokens": self._config.max_tokens}
            if tools:
                fields |= {"tools": list(tools), "tool_choice": "auto"}
            answer = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=chat_api.encodable(list(messages)),
                extra_body=self._config.extra_body or None,
                **{k: v for k, v in fields.items() if v is not None},
            )
        return chat_api.read(answer.text)


def _read(message: Message, reason: str) -> Reply:
    """An answer without its thinking.

    Raises:
      UnusableAnswer: it is not whole, nothing of it is left, or a call cannot be read.
    """
    if reason in ("length", "content_filter"):
        raise chat_api.UnusableAnswer(f"the answer is not whole (finish_reason {reason})")
    _, content, opened = chat_api.split_thinking(message["content"])
    if opened:
        raise chat_api.UnusableAnswer("an answer whose thinking is not closed")
    calls = tuple(_call(i, call) for i, call in enumerate(message.get("tool_calls", ())))
    if not (content := content.strip()) and not calls:
        raise chat_api.UnusableAnswer("an empty answer")
    return Reply(content or None, calls)


def _call(place: int, call: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    name, written = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str) or not name:
        raise chat_api.UnusableAnswer("a call without the name of a tool")
    try:
        arguments = chat_api.encodable(json.loads(written or "{}"))
    except (ValueError, RecursionError) as error:
        raise chat_api.UnusableAnswer(f"arguments of {name} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise chat_api.UnusableAnswer(f"arguments of {name} are not an object")
    return call.get("id") or f"call_{place}", name, arguments


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
