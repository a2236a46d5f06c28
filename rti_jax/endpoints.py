"""Any OpenAI-compatible endpoint: messages and tools in, a role's text or a policy's turn out."""

import asyncio
import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from envs import chat_api
from rti_jax.engine_errors import ContextLengthError, CutOffError, EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread

PAUSE = 0.5  # seconds before an answer that is none is asked for again


class ChatEndpoint:
    """A model behind an OpenAI-compatible endpoint: messages and tools in, a role's text or a policy's turn out.

    Args:
      url: base URL, with /v1. model: name there; empty takes the endpoint's first.
      key: API key; empty is $OPENAI_API_KEY, or none. It is in no message of an error.
      retries: of a request that is refused for now (408, 409, 429, 5xx), not answered, or not connected; after waiting
        as long as the answer asks for, or else ever longer. As often, an answer that is none is asked for again.
    """

    def __init__(self, url: str, model: str = "", *, key: str = "", timeout: float = 300.0, retries: int = 2):
        import openai

        self.url, self.model = url, model
        self._loop = LoopThread()
        self._key, self._retries = key or os.environ.get("OPENAI_API_KEY", ""), retries
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=self._key or "none", timeout=timeout, max_retries=retries
        )
        self._finalizer = weakref.finalize(self, _close, self._loop, [self._client])

    async def connect(self) -> str:
        """The model's name; asks the endpoint for its models, which some endpoints do not tell.

        Raises:
          EngineDiedError: it cannot be reached, refuses the key, or no model is named and it names none that can be
            read.
        """
        return await self._loop.wrap(self._connect())

    async def reply(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> tuple[dict[str, Any], str]:
        """(the assistant's message as the endpoint gives it, finish reason).

        Args:
          fields: of the request, e.g. tools, temperature, max_tokens, seed.

        Raises:
          ContextLengthError: the conversation is longer than the model's context.
          EngineDiedError: no request will be answered: the key is refused, or there is no such model.
          EngineError: this one failed or its answer is none, after retries.
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
          CutOffError: the answer was cut off at `max_tokens`.
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
                self.model = _first(await self._models())
            message, reason = await self._answer(arguments)
        except openai.OpenAIError as error:
            raise self._failure(EngineError, error) from None
        except chat_api.UnusableAnswer as error:
            raise EngineError(self._words(str(error))) from None
        if reason == "length":
            raise CutOffError(self._words(f"an answer was cut off at {arguments['max_tokens']} tokens"))
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": '
            f"{call['function']['arguments'] or '{}'}}}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        return "\n".join([*([message["content"]] if message["content"] else []), *calls])

    async def _connect(self) -> str:
        import openai

        try:
            models = await self._models()
        except (openai.APIConnectionError, openai.AuthenticationError) as error:
            raise self._failure(EngineDiedError, error) from None
        except (openai.OpenAIError, chat_api.UnusableAnswer) as error:
            if not self.model:
                says = f"{self._words(str(error))}; it does not say which models it has: name one"
                raise EngineDiedError(says) from None
            return self.model
        if not self.model and not models:
            raise EngineDiedError(f"endpoint {self.url} has no model")
        self.model = self.model or models[0]
        return self.model

    async def _reply(self, messages: list[Mapping[str, Any]], fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
        import openai

        try:
            return await self._answer({"messages": messages, "extra_body": fields})
        except (openai.AuthenticationError, openai.NotFoundError) as error:
            raise self._failure(EngineDiedError, error) from None
        except openai.BadRequestError as error:
            kind = ContextLengthError if _TOO_LONG.search(str(error)) else EngineError
            raise self._failure(kind, error) from None
        except openai.OpenAIError as error:
            raise self._failure(EngineError, error) from None
        except chat_api.UnusableAnswer as error:
            raise EngineError(self._words(str(error))) from None

    async def _models(self) -> list[str]:
        return chat_api.read_models((await self._client.models.with_raw_response.list()).text)

    async def _answer(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """(message, finish reason). Raises openai's errors, and UnusableAnswer, after retries."""
        arguments = arguments | {"model": self.model, "messages": chat_api.encodable(arguments["messages"])}
        left = self._retries
        while True:
            response = await self._client.chat.completions.with_raw_response.create(**arguments)
            try:
                return chat_api.read(response.text)
            except chat_api.UnusableAnswer:
                if not left:
                    raise
            left -= 1
            await asyncio.sleep(PAUSE)

    def _failure(self, kind: type[EngineError], error: Exception) -> EngineError:
        """Ours for openai's, whose own words may hold the key: raise it from None, so that no traceback shows them."""
        failure = kind(self._words(str(error) or repr(error)))
        failure.http_status = getattr(error, "status_code", None)
        return failure

    def _words(self, problem: str) -> str:
        return f"endpoint {self.url}: {chat_api.without_key(problem, self._key)}"


# How endpoints say it: OpenAI's error code, and the sentences of vLLM, SGLang and others.
_TOO_LONG = re.compile("context_length|context length|context window|maximum context|prompt is too long", re.IGNORECASE)


def _first(models: Sequence[str]) -> str:
    if not models:
        raise chat_api.UnusableAnswer("it has no model")
    return models[0]


def _close(loop: LoopThread, clients: list) -> None:
    for client in clients:
        loop.call(client.close())
    loop.stop()
