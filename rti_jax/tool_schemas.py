"""Calls of tools checked against the tools' JSON schemas, before an environment sees them.

A policy may write anything, and the check runs where all episodes wait for it. So arguments are bounded first
(`plain_json.unbounded`), a pattern has a time limit, and items are compared by their hashes.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import referencing
import regex

from envs.base import AssistantTurn, ToolCall
from rti_jax.plain_json import unbounded

SECONDS = 1.0  # of one search for a pattern
SHOWN = 200  # characters of an error; it may quote a value of any length


class SchemaError(ValueError):
    """A tool's schema is no valid JSON schema: the environment's fault, never the policy's."""


class ToolSchemas:
    """Checks calls of the tools of an observation.

    Args:
      tools: in OpenAI format. A schema names its dialect by "$schema"; without, it is 2020-12. Beside
        "patternProperties", "unevaluatedProperties" is not checked.

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
        if problem := unbounded(call.arguments):
            return problem
        try:
            error = jsonschema.exceptions.best_match(self._validators[call.name].iter_errors(call.arguments))
        except referencing.exceptions.Unresolvable as missing:
            raise SchemaError(
                f"the schema of tool {call.name} refers to {missing.ref}, which it does not hold"
            ) from None
        except TimeoutError:
            return f"arguments of {call.name}: comparing a text with its pattern takes too long"
        except Exception as failed:  # whatever a check stumbles over, it stumbled over these arguments
            return f"arguments of {call.name} cannot be checked: {type(failed).__name__}: {str(failed)[:SHOWN]}"
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
    if isinstance(schema, dict):
        schema.pop("$schema", None)  # by which a reference to the whole would find the class without our keywords
    keywords = KEYWORDS | ({"unevaluatedProperties": _unchecked} if '"patternProperties"' in text else {})
    checks = jsonschema.validators.extend(cls, {k: v for k, v in keywords.items() if k in cls.VALIDATORS})
    return checks(schema, registry=referencing.Registry())  # an empty registry: nothing is fetched


def _found(pattern: str, text: str) -> bool:
    return regex.search(pattern, text, timeout=SECONDS) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for key, value in instance.items():
                if _found(pattern, key):
                    yield from validator.descend(value, inner, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, extra: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """The library's, on the keys that no pattern takes: it would search for them without a limit."""
    if isinstance(instance, dict) and (patterns := schema.get("patternProperties")):
        instance = {k: v for k, v in instance.items() if not any(_found(p, k) for p in patterns)}
        schema = {k: v for k, v in schema.items() if k != "patternProperties"}
    yield from jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](validator, extra, instance, schema)


def _unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if unique and isinstance(instance, list) and len(set(map(_hashable, instance))) < len(instance):
        yield jsonschema.ValidationError(f"elements are not unique: {instance!r}")


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    return None


def _hashable(value: Any) -> Any:
    """Equal for what JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return isinstance(value, bool), value


KEYWORDS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
