"""Tool calls against JSON schemas: which fit, and what the policy is told about those that do not."""

import pytest

from envs.base import AssistantTurn, ToolCall
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
