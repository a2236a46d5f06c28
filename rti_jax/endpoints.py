"""Any OpenAI-compatible endpoint: messages and tools in, a role's text or a policy's turn out."""

import asyncio
import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread


class ChatEndpoint:
    """A model behind an OpenAI-compatible endpoint: messages and tools in, a role's text or a policy's turn out.

    Args:
      url: base URL, with /v1. model: name there; empty takes the endpoint's first.
      key: API key; empty is $OPENAI_API_KEY, or none. It is in no message of an error.
      retries: of a request that is refused for now (408, 409, 429, 5xx), not answered, or not connected; after waiting
        as long as the answer asks for, or else ever longer.
    """

    def __init__(self, url: str, model: str = "", *, key: str = "", timeout: float = 300.0, retries: int = 2):
        import openai

        self.url, self.model = url, model
        self._loop = LoopThread()
        self._key = key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.AsyncOpenAI(base_url=url, api_key=self._key, timeout=timeout, max_retries=retries)
        self._finalizer = weakref.finalize(self, _close, self._loop, [self._client])

    async def connect(self) -> str:
        """The model's name; asks the endpoint for its models, which some endpoints do not tell.

        Raises:
          EngineDiedError: it cannot be reached, refuses the key, or no model is named and it names none.
        """
        return await self._loop.wrap(self._connect())

    async def reply(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> tuple[dict[str, Any], str]:
        """(the assistant's message as the endpoint gives it, finish reason).

        Args:
          fields: of the request, e.g. tools, temperature, max_tokens, seed.

        Raises:
          ContextLengthError: the conversation is longer than the model's context.
          EngineDiedError: no request will be answered: the key is refused, or there is no such model.
          EngineError: this one failed, after retries.
        """
        return await self._loop.wrap(self._reply(list(messages), fields))

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
    ) -> str:
        """The reply's text; calls that the endpoint has parsed come back as <tool_call> blocks after it.

        Raises:
          EngineError: the endpoint failed, after retries; one line that names it.
        """
        arguments: dict[str, Any] = {
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({"tools": list(tools)} if tools else {}),
            **({"seed": seed} if seed is not None else {}),
        }
        return await self._loop.wrap(self._complete(arguments))

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    async def _complete(self, arguments: dict[str, Any]) -> str:
        import openai

        try:
            if not self.model:
                self.model = (await self._client.models.list()).data[0].id
            reply = await self._client.chat.completions.create(model=self.model, **arguments)
        except openai.OpenAIError as error:
            raise EngineError(self._words(error)) from error
        message = reply.choices[0].message
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n'
            "</tool_call>"
            for call in message.tool_calls or []
        ]
        return "\n".join([*([message.content] if message.content else []), *calls])

    async def _connect(self) -> str:
        import openai

        try:
            models = (await self._client.models.list()).data
        except (openai.APIConnectionError, openai.AuthenticationError) as error:
            raise EngineDiedError(self._words(error)) from error
        except openai.OpenAIError as error:
            if not self.model:
                raise EngineDiedError(f"{self._words(error)}; it does not say which models it has: name one") from error
            return self.model
        if not self.model and not models:
            raise EngineDiedError(f"endpoint {self.url} has no model")
        self.model = self.model or models[0].id
        return self.model

    async def _reply(self, messages: list[Mapping[str, Any]], fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
        import openai

        try:
            answer = await self._client.chat.completions.create(model=self.model, messages=messages, extra_body=fields)
        except (openai.AuthenticationError, openai.NotFoundError) as error:
            raise EngineDiedError(self._words(error)) from error
        except openai.BadRequestError as error:
            kind = ContextLengthError if _TOO_LONG.search(str(error)) else EngineError
            raise kind(self._words(error)) from error
        except openai.OpenAIError as error:
            raise EngineError(self._words(error)) from error
        if not answer.choices:
            raise EngineError(f"endpoint {self.url}: an answer without a choice")
        choice = answer.choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason or ""

    def _words(self, error: Exception) -> str:
        return f"endpoint {self.url}: {_one_line(str(error).replace(self._key, '***'))}"


# How endpoints say it: OpenAI's error code, and the sentences of vLLM, SGLang and others.
_TOO_LONG = re.compile("context_length|context length|context window|maximum context|prompt is too long", re.IGNORECASE)


def _one_line(text: Any) -> str:
    return " ".join((str(text) or repr(text)).split())[:300]


def _close(loop: LoopThread, clients: list) -> None:
    for client in clients:
        loop.call(client.close())
    loop.stop()
