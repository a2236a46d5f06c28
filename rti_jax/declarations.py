"""What an environment declares about itself, checked without playing it: tasks, exceptions, tools' schemas."""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import referencing
import referencing.jsonschema

from envs.base import Task
from rti_jax.config import ConfigError
from rti_jax.environments import EnvironmentSource, said

NO_SCHEMAS = {"enum", "const", "default", "examples"}  # keywords whose values are data, also where it says "$ref"


def changed(source: EnvironmentSource, split: str, tasks: Sequence[Task]) -> str:
    """How the tasks differ from what the environment lists when it is asked once more; empty if they do not."""
    try:
        again = source.tasks(split)
    except ConfigError as error:
        return f"asked once more: {error}"
    now = {task.id: task for task in again}
    how = ""
    if gone := [task.id for task in tasks if task.id not in now]:
        how = f"{gone[0]} is not there any more"
    elif [task.id for task in again if task.id in {t.id for t in tasks}] != [task.id for task in tasks]:
        how = "they are in another order"
    elif other := [task.id for task in tasks if _text(task) != _text(now[task.id])]:
        how = f"{other[0]} has other contents"
    return f"they are not the same each time they are asked for: {how}" if how else ""


def exceptions(source: EnvironmentSource, split: str) -> tuple[frozenset[str], str]:
    """(ids that `idle_exceptions` names, what is wrong with them or empty)."""
    name = f"{source.cls.__name__}.idle_exceptions"
    try:
        given = source.cls.idle_exceptions(source.config, split)
        ids = None if isinstance(given, str) else frozenset(given)
        known = {task.id for task in source.tasks(split)}
    except Exception as error:
        return frozenset(), f"{name}: {said(error, source.cls)}"
    if ids is None:
        return frozenset(), f"{name} gives one string; expected a set of ids"
    if unknown := sorted(map(str, ids - known)):
        return ids, f"{name} names {len(unknown)} ids that are no tasks of the split, e.g. {unknown[0]}"
    return ids, ""


def dangling(tools: Sequence[dict[str, Any]]) -> list[str]:
    """References of the tools' schemas that lead nowhere; a call of such a tool would break the episode."""
    problems = []
    for tool in tools:
        function = tool.get("function", {})
        schema = json.dumps(function.get("parameters"), sort_keys=True, default=str)
        problems += [
            f"the schema of tool {function.get('name')} refers to {r}, which is not there" for r in _lost(schema)
        ]
    return problems


@functools.lru_cache(maxsize=1024)
def _lost(text: str) -> tuple[str, ...]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return ()
    dialect = referencing.jsonschema.specification_with(
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).META_SCHEMA["$schema"]
    )
    root = dialect.create_resource(schema)
    resolver = referencing.Registry().resolver_with_root(root)  # an empty registry: nothing is fetched
    lost = []
    for reference, base in _references(schema, resolver, dialect):
        try:
            base.lookup(reference)
        except referencing.exceptions.Unresolvable:
            lost.append(reference)
    return tuple(dict.fromkeys(lost))


def _references(schema: Any, resolver: Any, dialect: Any) -> Iterator[tuple[str, Any]]:
    """Every reference of a schema, with the resolver of the place where it stands."""
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each, resolver, dialect)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$id"), str):
            resolver = resolver.in_subresource(dialect.create_resource(schema))
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value, resolver
            elif key not in NO_SCHEMAS:
                yield from _references(value, resolver, dialect)


def _text(task: Task) -> str:
    """A task as JSON; what JSON does not know stands there by its type, since its text may be an address."""
    return json.dumps([task.id, task.kind, task.data], sort_keys=True, default=lambda value: type(value).__name__)
