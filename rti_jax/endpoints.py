"""Any OpenAI-compatible endpoint that plays a role: messages and tools in, text out."""

import asyncio
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rti_jax.engine_errors import EngineError
from rti_jax.loop_thread import LoopThread


class ChatEndpoint:
    """A model behind an OpenAI-compatible endpoint that plays a role: messages and tools in, text out.

    Args:
      url: base URL, with /v1. model: name there; empty takes the endpoint's first.
      key: API key; empty is $OPENAI_API_KEY, or none.
    """

    def __init__(self, url: str, model: str = "", *, key: str = "", timeout: float = 300.0, retries: int = 2):
        import openai

        self.url, self.model = url, model
        self._loop = LoopThread()
        key = key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries)
        self._finalizer = weakref.finalize(self, _close, self._loop, [self._client])

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
            raise EngineError(f"endpoint {self.url}: {_one_line(error)}") from error
        message = reply.choices[0].message
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n'
            "</tool_call>"
            for call in message.tool_calls or []
        ]
        return "\n".join([*([message.content] if message.content else []), *calls])


def _one_line(text: Any) -> str:
    return " ".join((str(text) or repr(text)).split())[:300]


def _close(loop: LoopThread, clients: list) -> None:
    for client in clients:
        loop.call(client.close())
    loop.stop()
