"""Tool calls against JSON schemas: which fit, and what the policy is told about those that do not."""

import pytest

from envs.base import AssistantTurn, ToolCall
from rti_jax import tool_schemas
from rti_jax.plain_json import DEPTH, VALUES
from rti_jax.tool_schemas import SchemaError, ToolSchemas

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "stops": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name="plan", **function):
    return {"type": "function", "function": {"name": name, **function}}


def error(arguments, tools=None, name="plan"):
    tools = [tool(parameters=PARAMETERS)] if tools is None else tools
    turn = AssistantTurn("text", (ToolCall(name, arguments, "c1"),))
    checked = ToolSchemas(tools).check(turn)
    assert checked.content == "text" and checked.tool_calls[0].arguments == arguments
    return checked.tool_calls[0].error


@pytest.mark.parametrize(
    "arguments", [{"city": "Ulm"}, {"city": "Ulm", "days": 2}, {"city": "", "stops": [{"name": "x"}, {}]}]
)
def test_what_fits(arguments):
    assert error(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": 3}, "argument city: 3 is not of type 'string'"),
        ({"city": "Ulm", "days": "2"}, "argument days: '2' is not of type 'integer'"),
        ({"city": "Ulm", "days": True}, "argument days: True is not of type 'integer'"),
        ({"city": "Ulm", "days": 0}, "argument days: 0 is less than the minimum of 1"),
        ({"city": "Ulm", "stops": [{}, {"name": 1}]}, "argument stops[1].name: 1 is not of type 'string'"),
        ({}, "arguments of plan: 'city' is a required property"),
        (
            {"city": "Ulm", "town": 1},
            "arguments of plan: Additional properties are not allowed ('town' was unexpected)",
        ),
    ],
)
def test_the_field_is_named(arguments, text):
    assert error(arguments) == text


def test_a_long_value_is_not_quoted_whole():
    assert len(error({"city": ["x" * 10_000]})) < 300


def test_unknown_tools_and_what_could_not_be_parsed():
    assert error({}, name="plam") == "unknown tool plam; the tools are plan"
    assert error({}, tools=[]) == "unknown tool plan; there are none here"
    bad = AssistantTurn("", (ToolCall("plan", None, error="not JSON"),))
    assert ToolSchemas([tool(parameters=PARAMETERS)]).check(bad) == bad


def test_a_tool_without_a_schema_takes_any_object():
    assert error({"x": [1]}, tools=[tool()]) is None


def test_an_older_dialect_is_read_as_such():
    """Draft 4: exclusiveMinimum is a flag beside minimum; in 2020-12 that is no schema at all."""
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"n": {"minimum": 1, "exclusiveMinimum": True}},
    }
    assert error({"n": 2}, [tool(parameters=schema)]) is None
    assert error({"n": 1}, [tool(parameters=schema)]).startswith("argument n: 1 is less than or equal to the minimum")


def test_references_within_a_schema_and_none_beyond_it(monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: fetched.append(args))
    inside = {"$defs": {"n": {"type": "integer"}}, "properties": {"n": {"$ref": "#/$defs/n"}}}
    assert error({"n": "1"}, [tool(parameters=inside)]) == "argument n: '1' is not of type 'integer'"
    outside = {"properties": {"n": {"$ref": "http://localhost:9/n.json"}}}
    with pytest.raises(SchemaError, match="refers to http://localhost:9/n.json"):
        error({"n": 1}, [tool(parameters=outside)])
    assert fetched == []


def test_what_is_no_schema():
    with pytest.raises(SchemaError, match="the schema of tool plan is no JSON schema"):
        ToolSchemas([tool(parameters={"type": "objekt"})])


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


class TestWhatAPolicyMayWrite:
    """Nothing of it raises or takes long; each is an error of its call."""

    tools = (
        tool(
            parameters={
                "properties": {
                    "n": {"type": "number", "multipleOf": 0.01},
                    "all": {"type": "array", "uniqueItems": True},
                    "word": {"type": "string", "pattern": "^(a|a)*$"},
                },
            }
        ),
    )

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 10**400, [{"x": -(10**400)}]])
    def test_numbers_that_are_none(self, number):
        assert error({"n": number}, self.tools) == "the arguments hold a number that is not finite, or too large"

    def test_the_largest_numbers_are_checked(self):
        whole = [tool(parameters={"properties": {"n": {"multipleOf": 2}}})]
        assert error({"n": 1e308}, whole) is None and error({"n": 10**308}, whole) is None
        assert error({"n": 0.001}, self.tools) == "argument n: 0.001 is not a multiple of 0.01"

    def test_depth(self):
        assert error({"all": nested(DEPTH - 1)}, self.tools) is None
        assert error({"all": nested(DEPTH)}, self.tools) == f"the arguments are nested more than {DEPTH} deep"
        assert (
            error({"all": [nested(900), nested(900)]}, self.tools) == f"the arguments are nested more than {DEPTH} deep"
        )

    def test_size(self):
        many = [[i] for i in range(VALUES // 2 - 1)]
        assert error({"all": many}, self.tools) is None
        assert "elements are not unique" in error({"all": [*many[:-1], [0]]}, self.tools)
        assert error({"all": [*many, *many]}, self.tools) == f"the arguments hold more than {VALUES} values"

    @pytest.mark.parametrize(
        ("items", "unique"),
        [
            ([1, 2], True),
            ([1, 1.0], False),
            ([1, True], True),
            ([0, False, None, "", [], {}], True),
            ([[1], [True]], True),
            ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], False),
            ([[0, 1], [1, 0]], True),
        ],
    )
    def test_unique_as_the_standard_has_it(self, items, unique):
        assert (error({"all": items}, self.tools) is None) == unique

    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": {"a": {"pattern": "^(a|a)*$"}}},
            {"$schema": "http://json-schema.org/draft-07/schema#", "anyOf": [{"patternProperties": {"^(a|a)*$": {}}}]},
            {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
        ],
    )
    def test_a_pattern_that_never_ends(self, schema, monkeypatch):
        monkeypatch.setattr(tool_schemas, "SECONDS", 0.02)
        text = "a" * 40 + "b"
        arguments = {"a": text} if "properties" in schema else {text: 1}
        words = "arguments of plan: comparing a text with its pattern takes too long"
        assert error(arguments, [tool(parameters=schema)]) == words

    def test_patterns(self):
        assert error({"word": "aaa"}, self.tools) is None
        assert error({"word": "b"}, self.tools) == "argument word: 'b' does not match '^(a|a)*$'"
        keyed = {
            "patternProperties": {"^x": {"type": "string"}},
            "properties": {"y": {}},
            "additionalProperties": False,
        }
        assert error({"x1": "", "y": 1}, [tool(parameters=keyed)]) is None
        assert error({"x1": 1}, [tool(parameters=keyed)]) == "argument x1: 1 is not of type 'string'"
        assert "('z' was unexpected)" in error({"x1": "", "z": 1}, [tool(parameters=keyed)])
        beside = {"patternProperties": {"^x": {}}, "unevaluatedProperties": False}
        assert error({"z": 1}, [tool(parameters=beside)]) is None
        assert "unexpected" in error({"z": 1}, [tool(parameters={"unevaluatedProperties": False})])

    def test_whatever_else_the_check_raises(self):
        endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
        text = error({}, [tool(parameters=endless)])
        assert text.startswith("arguments of plan cannot be checked: RecursionError")

    def test_a_reference_to_the_whole_keeps_the_limits(self, monkeypatch):
        monkeypatch.setattr(tool_schemas, "SECONDS", 0.02)
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "properties": {"inner": {"$ref": "#"}, "a": {"pattern": "^(a|a)*$"}},
        }
        assert "takes too long" in error({"inner": {"a": "a" * 40 + "b"}}, [tool(parameters=schema)])
