"""Turns validation errors into lines a person acts on: which key, what was got, what was expected, what was meant."""

import difflib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pydantic


def known_keys(schema: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of a schema, sections included, in the order of their definition."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The schema of a section, also of an optional one; None for a plain value."""
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, pydantic.BaseModel)), None)


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


# What other trainers call a key of ours.
SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "num_generations": "rollout.group_size",
    "n_rollouts": "rollout.group_size",
    "batch_size": "rollout.groups_per_step",
    "max_steps": "steps",
    "total_steps": "steps",
    "beta": "loss.kl_beta",
    "kl_coef": "loss.kl_beta",
    "epsilon": "loss.clip_low",
    "clip_ratio": "loss.clip_low",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "model_path": "model.path",
    "model_name": "model.path",
    "max_new_tokens": "sampling.max_tokens",
    "max_length": "sampling.max_context",
    "max_model_len": "sampling.max_context",
    "run_name": "name",
    "output_dir": "runs_dir",
    "gpu_memory_utilization": "engine.memory_fraction",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "async_level": "rollout.staleness",
    "max_async_level": "rollout.staleness",
    "max_head_offpolicyness": "rollout.staleness",
    "async_generation_ratio": "rollout.staleness",
    "report_to": "logging.sinks",
    "wandb_project": "logging.project",
    "max_hours": "stop.hours",
}


def nearest(key: str, known: list[str]) -> list[str]:
    """The valid keys that a mistyped one most likely means, best first; empty if none is near.

    A misspelt name beside its siblings comes first, then the same name in another section, then a misspelt section.
    """
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(leaf, siblings, n=1):
        return [siblings[close[0]]]
    if SYNONYMS.get(leaf) in known:
        return [SYNONYMS[leaf]]
    if elsewhere := [k for k in known if k.rpartition(".")[2] == leaf]:
        return elsewhere[:3]
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
        return close
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}
    return [leaves[c] for c in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]


def unknown_key(key: str, known: list[str]) -> str:
    """`unknown key rti.enabeld; did you mean rti.enabled?`"""
    if key in known:
        return f"unknown key {key!r} with a dot in its name; write it nested, {nested(key)}"
    if close := nearest(key, known):
        return f"unknown key {key}; did you mean {' or '.join(close)}?"
    parent = key.rpartition(".")[0]
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    return f"unknown key {key}; valid here: {', '.join(siblings)}" if siblings else f"unknown key {key}"


def nested(key: str) -> str:
    """`rti: {enabled: ...}` for rti.enabled."""
    section, *rest = key.split(".")
    return f"{section}: {{{nested('.'.join(rest))}}}" if rest else f"{section}: ..."


EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
}


def problem(error: dict[str, Any], key: str, known: list[str]) -> str:
    """One line for one of pydantic's errors. Errors of a model validator speak for themselves."""
    if error["type"] == "extra_forbidden":
        return unknown_key(key, known)
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return (
            f"{key}.{message}" if message.partition("=")[0] in {k[len(key) + 1 :] for k in known} and key else message
        )
    if error["type"] == "missing":
        return f"{key} is required"
    got = shown(error["input"])
    if error["type"] in EXPECTED:
        hint = " (quote it)" if error["type"] == "string_type" and isinstance(error["input"], int | float) else ""
        return f"{key}: expected {EXPECTED[error['type']]}, got {got}{hint}"
    expected = error["msg"].removeprefix("Input should be ")
    if error["type"] == "literal_error":
        options = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        close = difflib.get_close_matches(str(error["input"]), options, n=1)
        return f"{key}: expected {expected}, got {got}" + (f"; did you mean {close[0]}?" if close else "")
    if expected == error["msg"]:  # about length and the like: a sentence of its own
        return f"{key}: {expected}, got {got}"
    return f"{key}: expected {expected if expected.startswith('a ') else f'a value {expected}'}, got {got}"


def shown(value: Any) -> str:
    """A value as a user wrote it, shortened."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def explain(
    error: pydantic.ValidationError,
    schema: type[pydantic.BaseModel],
    *,
    prefix: str = "",
    shared: type[pydantic.BaseModel] | None = None,
    origin: Callable[[str], str] = lambda key: "",
) -> str:
    """All problems, one line each, unknown keys first.

    Args:
      schema: what was validated; its keys are what an unknown one is compared with.
      prefix: dotted place of the schema within the config, e.g. "env.".
      shared: another schema whose keys are valid in the same place.
      origin: tells where a key was given, e.g. "configs/a.yaml: " or "command line: ".
    """
    schemas = [schema, shared] if shared else [schema]
    known = [prefix + k for s in schemas for k in known_keys(s)]
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    lines = []
    for e in errors:
        key = (prefix + ".".join(str(part) for part in e["loc"] if part != "[key]")).rstrip(".")
        lines.append(origin(key) + problem(e, key, known))
    return "\n".join(dict.fromkeys(lines))
