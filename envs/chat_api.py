"""What an OpenAI-compatible endpoint answers, read with care: proxies, overloaded servers and models send anything."""

import json
from typing import Any, TypeVar

from envs.base import Message

T = TypeVar("T")
WRONG_URL = "is the base URL right? it usually ends with /v1"


class UnusableAnswer(ValueError):
    """An answer that is none; one line that says why."""


def read(body: str) -> tuple[Message, str]:
    """(the assistant's message, finish reason) of a chat completion.

    The message has `content` (text, maybe empty) and, where they are given, `tool_calls` (each with a `function` of
    `name` and `arguments`, the latter as text) and the texts `refusal`, `reasoning` and `reasoning_content`. All text
    can be encoded.

    Raises:
      UnusableAnswer: it is no JSON, or not of the API's form.
    """
    data = _parse(body)
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableAnswer(f"an answer without a choice: {_start(body)}")
    given, reason = choices[0].get("message"), choices[0].get("finish_reason")
    if not isinstance(given, dict):
        raise UnusableAnswer(f"an answer without a message: {_start(body)}")
    message: Message = {"role": "assistant", "content": _text(given.get("content"))}
    message |= {k: given[k] for k in ("refusal", "reasoning", "reasoning_content") if isinstance(given.get(k), str)}
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"])
    return message, reason if isinstance(reason, str) else ""


def read_models(body: str) -> list[str]:
    """The names in an answer of /models. Raises UnusableAnswer if it is none."""
    try:
        names = [m["id"] for m in _parse(body)["data"]]
    except (TypeError, KeyError) as error:
        raise UnusableAnswer(f"/models answers with no list of models: {_start(body)}; {WRONG_URL}") from error
    except UnusableAnswer as error:
        raise UnusableAnswer(f"/models: {error}") from error
    if not all(isinstance(name, str) and name for name in names):
        raise UnusableAnswer(f"/models names a model that has no name: {_start(body)}")
    return names


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(thinking, the rest, whether the thinking is left open) of a reply whose server does not take it out.

    All before the last </think> is thinking, and so is all after a <think> that is never closed.
    """
    before, closed, after = text.rpartition("</think>")
    rest, opened, unfinished = after.partition("<think>")
    thinking = (before.replace("<think>", "") + unfinished).strip("\n")
    return thinking, rest.lstrip("\n") if closed else rest, bool(opened)


def encodable(value: T) -> T:
    """A JSON value, each half of a surrogate pair (which no file or request can hold) replaced by U+FFFD.

    JSON can write such a thing ("\\ud800"), and neither tokenizers nor files take it. Where there is nothing to replace
    it is the very same object.

    Raises:
      TypeError, ValueError, RecursionError: for what is no JSON.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return value


def without_key(text: str, key: str) -> str:
    """A text for a person, on one line, without a key that a server may have echoed; an empty key is none."""
    return " ".join((text.replace(key, "***") if key else text).split())[:300]


def _parse(body: str) -> Any:
    try:
        return encodable(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise UnusableAnswer(f"the answer is not JSON: {_start(body)}; {WRONG_URL}") from error


def _start(body: str) -> str:
    return ascii(" ".join(body.split())[:100])


def _text(content: Any) -> str:
    """The text of a message's content: a string, or parts of which all but the thinking are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UnusableAnswer(f"content that is no text: {_start(json.dumps(content))}")
    texts = [part.get("text") for part in content if part.get("type") not in ("thinking", "reasoning")]
    if not all(isinstance(text, str) for text in texts):
        raise UnusableAnswer(f"content with a part that is no text: {_start(json.dumps(content))}")
    return "".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UnusableAnswer(f"tool calls that are none: {_start(json.dumps(calls))}")
    return [_call(call) for call in calls]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise UnusableAnswer(f"a tool call without a function: {_start(json.dumps(call))}")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):  # some servers have parsed them
        arguments = json.dumps(arguments, ensure_ascii=False)
    made = {"type": "function", "function": {"name": function.get("name"), "arguments": arguments or ""}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
