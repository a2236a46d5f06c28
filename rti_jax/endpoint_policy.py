"""A policy behind an OpenAI-compatible endpoint: episodes in messages, for evaluating reference models.

The endpoint renders its own template and parses its own tool calls, so nothing here has token ids, and nothing of it
can be trained. The environment sees what it would see of any policy: text and calls, never thinking. Calls are read
from the structured field alone; one whose arguments are no JSON object comes back to the model as a tool error.
"""

import abc
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from envs import base as env_base
from envs.base import AssistantTurn, Environment, Message, Task, ToolCall
from envs.chat_api import encodable, split_thinking
from rti_jax.config import Config, ConfigError
from rti_jax.config_sections import PolicyEndpointConfig, SamplingConfig
from rti_jax.endpoints import ChatEndpoint
from rti_jax.engine_errors import EngineError
from rti_jax.environments import EnvironmentSource
from rti_jax.plain_json import unbounded
from rti_jax.rollout import Episode, Player, Revise, Seat
from rti_jax.supervised import Supervised
from rti_jax.types import Status

Tools = tuple[dict[str, Any], ...]


class MessageEpisode(Episode, abc.ABC):
    """An episode in messages alone; `say` gives the assistant's."""

    def __init__(self, task: Task, seat: Seat, sampling: SamplingConfig, step_seconds: float):
        super().__init__(task, seat, None, None, sampling, step_seconds)

    @abc.abstractmethod
    async def say(self, index: int, tools: Tools) -> tuple[AssistantTurn, Message]:
        """The turn at `index` after `self.messages`, and the message that is recorded for it."""

    async def _play(self, environment: Environment, revise: Revise | None) -> tuple[Status, float | None, dict]:
        supervised = Supervised(environment, self.step_seconds)
        start = await supervised.reset(self.task)
        self.messages.extend(start.messages)
        for index in range(environment.max_turns):
            turn, message = await self.say(index, tuple(start.tools))
            self.replies += 1
            self.messages.append(message)
            result = await supervised.step(turn)
            self.messages.extend(result.messages)
            if result.done:
                break
            if not result.messages:
                raise env_base.EnvironmentError("the environment answered a turn with nothing and is not done")
        return self.outcome(await supervised.score())


class EndpointEpisode(MessageEpisode):
    """An episode that an endpoint plays."""

    def __init__(self, task: Task, seat: Seat, config: Config, sampling: SamplingConfig, endpoint: ChatEndpoint):
        super().__init__(task, seat, sampling, config.rollout.step_timeout)
        self._endpoint, self._extra, self._reason = endpoint, config.eval.endpoint.extra_body, ""

    @property
    def cut(self) -> bool:
        return self._reason == "length"

    async def say(self, index: int, tools: Tools) -> tuple[AssistantTurn, Message]:
        fields = {
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_tokens,
            "seed": self.seat.seed_of(index, "policy"),
            **({"tools": list(tools)} if tools else {}),
        } | self._extra
        reply, self._reason = await self._endpoint.reply(
            [as_api(m) for m in self.messages], **{k: v for k, v in fields.items() if v is not None}
        )
        if self._reason == "content_filter":
            raise EngineError(f"endpoint {self._endpoint.url} withheld a reply: content_filter")
        message = recorded(reply, index)
        return read(message), message


class EndpointPlayer(Player):
    """A Player whose policy is an endpoint."""

    def __init__(self, source: EnvironmentSource, endpoint: ChatEndpoint, config: Config):
        super().__init__(source, None, None, config)
        self._endpoint = endpoint

    @property
    def concurrency(self) -> int:
        return min(self.config.eval.endpoint.concurrency, super().concurrency)

    def begin(self, task: Task, seat: Seat, sampling: SamplingConfig) -> Episode:
        return EndpointEpisode(task, seat, self.config, sampling, self._endpoint)


def connect(config: PolicyEndpointConfig) -> ChatEndpoint:
    """The endpoint with its key. Raises ConfigError if the environment variable that was named is not set."""
    return ChatEndpoint(config.url, config.model, key=key(config), timeout=config.timeout, retries=config.retries)


def key(config: PolicyEndpointConfig) -> str:
    """What the environment variable holds; empty if it is not set and was not named. Raises ConfigError if it was."""
    found = os.environ.get(config.key_variable, "")
    if not found and config.key_variable != PolicyEndpointConfig().key_variable:
        raise ConfigError(f"eval.endpoint.key_variable={config.key_variable}: this environment variable is not set")
    return found


def recorded(reply: Mapping[str, Any], index: int) -> Message:
    """An endpoint's message as it is kept: thinking apart, arguments of calls as they were written, every call with an
    id."""
    thinking, text, _ = split_thinking(reply.get("content") or reply.get("refusal") or "")
    reasoning = reply.get("reasoning_content") or reply.get("reasoning") or thinking
    message: Message = {"role": "assistant", "content": text}
    calls = [
        {"type": "function", "id": call.get("id") or f"call_{index}_{i}", "function": _function(call)}
        for i, call in enumerate(reply.get("tool_calls") or ())
    ]
    message |= ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})
    return encodable(message)


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function") or {}
    return {"name": str(function.get("name") or ""), "arguments": str(function.get("arguments") or "")}


def read(message: Message) -> AssistantTurn:
    """The turn of a recorded message, as the environment sees it; malformed calls with their error."""
    return AssistantTurn(message["content"], tuple(_call(c) for c in message.get("tool_calls", ())))


def _call(call: Mapping[str, Any]) -> ToolCall:
    name, written = call["function"]["name"], call["function"]["arguments"]
    if not name:
        return ToolCall("", None, call["id"], "the tool call has no name")
    arguments, problem = _arguments(written)
    return ToolCall(name, arguments, call["id"], problem)


def _arguments(written: str) -> tuple[dict[str, Any] | None, str | None]:
    """(arguments, None), or (None, what is wrong)."""
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        return None, f"the arguments of the tool call are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return None, "the arguments of the tool call are not an object"
    if problem := unbounded(arguments):
        return None, problem
    return encodable(arguments), None


def as_api(message: Mapping[str, Any]) -> Message:
    """A message for the endpoint: its API's fields alone, without earlier thinking, arguments as JSON text.

    Arguments that are no JSON object would make servers refuse the conversation, so they stand in one, as text.
    """
    kept = {key: message[key] for key in ("role", "content", "tool_call_id") if message.get(key) is not None}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            {"type": "function", "id": c["id"], "function": c["function"] | {"arguments": _text(c["function"])}}
            for c in calls
        ]
    return kept


def _text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    if not arguments:
        return "{}"
    return json.dumps({"unreadable": arguments}, ensure_ascii=False) if _arguments(arguments)[1] else arguments


def assistant_messages(messages: Sequence[Message], replies: int) -> list[Message]:
    """The policy's own messages of an episode: the last ones, since an environment may open in the assistant's name."""
    mine = [m for m in messages if m.get("role") == "assistant"]
    return mine[len(mine) - replies :]
