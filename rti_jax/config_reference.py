"""Writes docs/config.md from the schema: every key with its type, default and the comment beside it in the source.

python -m rti_jax.config_reference > docs/config.md
"""

import inspect
import io
import re
import tokenize
import typing
from typing import Any

import pydantic

from rti_jax import config, strict_yaml
from rti_jax.config_errors import is_union, section_of

HEADER = """# Configuration

A config is a sparse YAML file of the keys that differ from the defaults below; any key can be set after it on the
command line, `rti train CONFIG optimizer.lr=3e-6 gate.delta=inf`. An unknown key or a wrong type is an error that names
the nearest valid key. `--dry-run` prints every key with its value; a run saves that as `config.yaml`.

Defaults are the method's (arXiv 2610.13438): "paper" marks what the paper gives, "ours" a choice where its summary
gives no number. Keys beside `env.name`, `env.split` and `env.max_turns` belong to the environment.
"""


def comments(schema: type[pydantic.BaseModel]) -> dict[str, str]:
    """Field name -> the comment that ends its line in the source, the last one of a field that has several."""
    source = inspect.getsource(schema)
    found, field = {}, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        begins = re.match(r"    (?:(\w+)\s*:|\))", token.line)
        field = begins[1] or field if begins else field
        if token.type == tokenize.COMMENT and begins:
            found[field] = token.string.lstrip("# ")
    return found


def type_name(annotation: Any) -> str:
    """A type as a user of YAML calls it."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(arguments[0])
    if is_union(annotation):
        return " or ".join(type_name(a) for a in arguments)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    names = {int: "integer", float: "number", str: "string", bool: "true/false", type(None): "null", Any: "any"}
    if annotation in names:
        return names[annotation]
    if typing.get_origin(annotation) in (list, tuple):
        one = type_name(arguments[0])
        return f"list of {one}s" if one.isalpha() else f"list of {one.replace(', ', ' or ')}"
    return "mapping"


def default(value: Any) -> str:
    """A default as YAML."""
    text = strict_yaml.dump({"x": value}).removeprefix("x:").strip()
    return f"`{text}`" if text and "\n" not in text else f"`{value!r}`"


def rows(schema: type[pydantic.BaseModel], prefix: str, values: pydantic.BaseModel) -> list[str]:
    """Table rows of a schema's keys and of its sections', with the values that the defaults have there."""
    notes, lines = comments(schema), []
    for name, field in schema.model_fields.items():
        value, section = getattr(values, name), section_of(field.annotation)
        if section:
            lines += rows(section, f"{prefix}{name}.", value)
        else:
            lines.append(row(f"{prefix}{name}", field, value, notes))
    return lines


def row(key: str, field: Any, value: Any, notes: dict[str, str]) -> str:
    """One line of a table."""
    note = notes.get(key.rpartition(".")[2], "").replace("|", "\\|").replace("None", "null")
    return f"| `{key}` | {type_name(field.annotation)} | {default(value)} | {note} |"


def reference() -> str:
    """The text of docs/config.md: a table for the top level, then one for each section."""
    defaults, notes = config.Config(), comments(config.Config)
    head = ["", "| key | type | default | |", "|---|---|---|---|"]
    top, sections = [HEADER, "## Top level", *head], []
    for name, field in config.Config.model_fields.items():
        value, section = getattr(defaults, name), section_of(field.annotation)
        if section:
            sections += ["", f"## {name}", *head, *rows(section, f"{name}.", value)]
        else:
            top.append(row(name, field, value, notes))
    return "\n".join(top + sections) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
