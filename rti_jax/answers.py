"""What an environment may answer: its observation, steps and outcome by their types, before anything is built on them.

Each check gives back what it was given, with text that is encodable, or raises EnvironmentError, in words.
"""

import dataclasses
import json
import math
import numbers
from typing import Any

import numpy as np

from envs.base import EnvironmentError, Message, Observation, Outcome, StepResult
from envs.chat_api import encodable
from rti_jax.types import Status

ROLES = ("system", "user", "assistant", "tool")


def observation(start: Any) -> Observation:
    _require(start, Observation, "reset gave")
    messages = _messages(start.messages, "reset")
    if not messages:
        raise EnvironmentError("reset gave no messages")
    return dataclasses.replace(start, messages=messages, tools=_tools(start.tools))


def step_result(result: Any) -> StepResult:
    _require(result, StepResult, "step gave")
    _require(result.done, bool, "step gave as done")
    return dataclasses.replace(result, messages=_messages(result.messages, "step"))


def outcome(given: Any) -> Outcome:
    """With a known status, a reward that agrees with it (None after an error), and `info` in JSON's types."""
    _require(given, Outcome, "score() gave")
    try:
        status = Status(given.status)
    except ValueError:
        known = ", ".join(Status)
        raise EnvironmentError(f"score() gave the unknown status {given.status!r}; known: {known}") from None
    _require(given.info, dict, "score() gave as info")
    try:
        info = json.loads(encodable(json.dumps(given.info, ensure_ascii=False, default=_from_numpy)))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentError(f"score() gave info that is no JSON: {error}") from None
    return Outcome(status.value, _reward(status, given.reward), info)


def _reward(status: Status, reward: Any) -> float | None:
    if not status.valid:
        return None
    _require(reward, numbers.Real | np.bool_, f"score() gave {status} with a reward that is", "number")
    if not math.isfinite(reward):
        raise EnvironmentError(f"score() gave {status} with reward {reward}")
    if status is Status.SUCCESS and not reward > 0 or status is not Status.SUCCESS and not reward < 1:
        raise EnvironmentError(
            f"score() gave {status} with reward {reward}, which contradict each other: success is reward 1, failure 0"
        )
    return float(reward)


def _messages(messages: Any, source: str) -> list[Message]:
    _require(messages, list | tuple, f"{source} gave as messages", "list")
    for i, message in enumerate(messages):
        what = f"{source} gave as message {i}"
        _require(message, dict, what)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise EnvironmentError(f"{what} one with role {role!r}, which is none of {', '.join(ROLES)}")
        if not (isinstance(content, str | list) or (content is None and role == "assistant")):
            raise EnvironmentError(f"{what} one whose content is {_kind(content)}, not text")
        _require(calls := message.get("tool_calls") or [], list | tuple, f"{what} one whose tool_calls are", "list")
        if not all(_name(call) for call in calls):
            raise EnvironmentError(f'{what} one with a tool call that is not {{"function": {{"name": ...}}}}')
    return list(_encodable(messages, f"{source} gave messages"))


def _tools(tools: Any) -> list[dict[str, Any]]:
    _require(tools, list | tuple, "reset gave as tools", "list")
    names = []
    for i, tool in enumerate(tools):
        if not (name := _name(tool)):
            raise EnvironmentError(
                f'reset gave as tool {i} one without a name: it is {{"type": "function", "function": {{"name": ...}}}}'
            )
        if name in names:
            raise EnvironmentError(f"reset gave two tools with the name {name}")
        names.append(name)
    return list(_encodable(tools, "reset gave tools"))


def _name(tool: Any) -> str:
    """The name of a tool, or of a call, in OpenAI format; empty if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _encodable(value: Any, what: str) -> Any:
    try:
        return encodable(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentError(f"{what} that are no JSON: {error}") from None


def _require(value: Any, kind: Any, what: str, name: str = "") -> None:
    if not isinstance(value, kind):
        raise EnvironmentError(f"{what} {_kind(value)}, not {_article(name or kind.__name__)}")


def _kind(value: Any) -> str:
    return "None" if value is None else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"there is {_kind(value)} in it")
