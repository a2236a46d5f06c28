"""Calls of tools checked against the tools' JSON schemas, before an environment sees them."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import referencing

from envs.base import AssistantTurn, ToolCall

SHOWN = 200  # characters of an error; it may quote a value of any length


class SchemaError(ValueError):
    """A tool's schema is no valid JSON schema: the environment's fault, never the policy's."""


class ToolSchemas:
    """Checks calls of the tools of an observation.

    Args:
      tools: in OpenAI format. A schema names its dialect by "$schema"; without, it is 2020-12.

    Raises:
      SchemaError: for a schema that is none.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]):
        functions = [tool["function"] for tool in tools]
        self._validators = {f["name"]: _validator(f["name"], _key(f.get("parameters"))) for f in functions}

    def check(self, turn: AssistantTurn) -> AssistantTurn:
        """The turn with `error` set in every call that names no tool or does not fit the tool's schema."""
        calls = tuple(dataclasses.replace(call, error=self._problem(call)) for call in turn.tool_calls)
        return dataclasses.replace(turn, tool_calls=calls)

    def _problem(self, call: ToolCall) -> str | None:
        if call.error is not None:
            return call.error
        if call.name not in self._validators:
            names = f"the tools are {', '.join(self._validators)}" if self._validators else "there are none here"
            return f"unknown tool {call.name[:SHOWN]}; {names}"
        try:
            error = jsonschema.exceptions.best_match(self._validators[call.name].iter_errors(call.arguments))
        except referencing.exceptions.Unresolvable as missing:
            raise SchemaError(
                f"the schema of tool {call.name} refers to {missing.ref}, which it does not hold"
            ) from None
        if error is None:
            return None
        text = error.message if len(error.message) <= SHOWN else f"{error.message[:SHOWN]} ..."
        where = error.json_path.removeprefix("$").removeprefix(".")
        return f"argument {where}: {text}" if where else f"arguments of {call.name}: {text}"


def _key(schema: Any) -> str:
    return json.dumps({"type": "object"} if schema is None else schema, sort_keys=True)


@functools.lru_cache(maxsize=1024)
def _validator(name: str, text: str) -> Any:
    schema = json.loads(text)
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SchemaError(f"the schema of tool {name} is no JSON schema: {error.message[:SHOWN]}") from None
    return cls(schema, registry=referencing.Registry())  # an empty registry: nothing is fetched
