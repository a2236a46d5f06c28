"""YAML without surprises: what looks like a number is one, a key is given once, and nothing else is guessed.

PyYAML follows YAML 1.1, which reads `1e-6` as a string, `on` as True, `1:30` as 90 and `2026-01-01` as a date, and
lets the second of two equal keys win. Here scalars follow YAML 1.2's core schema (with `inf` and `nan` also accepted
bare), and a duplicate key is an error.
"""

import re
from typing import Any

import yaml

# YAML 1.2, section 10.3 (core schema): tag, pattern, first characters ("" stands for the empty scalar).
CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.?(?:inf|Inf|INF)|\.?(?:nan|NaN|NAN)",
        list("-+0123456789.iInN"),
    ),
    ("merge", r"<<", ["<"]),
)


class YamlError(ValueError):
    """One line: what is wrong and in which line."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # none of YAML 1.1's

    def construct_mapping(self, node, deep=False):
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise YamlError(f"line {line}: key {key!r} is not a word")
            if key in first_lines:
                raise YamlError(f"line {line}: key {key!r} was given before, in line {first_lines[key]}")
            first_lines[key] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node):
        text = self.construct_scalar(node).lower()
        return float(re.sub(r"\.(?=inf|nan)", "", text))

    def construct_yaml_int(self, node):
        return int(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would misread, so that other tools read it too."""

    def represent_str(self, text: str):
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None  # line breaks that PyYAML would fold to spaces
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in CORE_SCHEMA:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)
_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse(text: str) -> Any:
    """The value of a YAML document: dicts with string keys, lists and scalars. Raises YamlError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise YamlError(f"{line}{error.problem or error.context}".replace("\n", " ")) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None


def dump(value: Any) -> str:
    """YAML that `parse` reads back to an equal value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
