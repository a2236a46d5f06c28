"""Answers of chat endpoints, well-formed and not."""

import json

import pytest

from envs import chat_api


def completion(message, reason="stop"):
    return json.dumps({"choices": [{"message": message, "finish_reason": reason}]})


NO_ANSWERS = {
    "html": "<html>Welcome</html>",
    "broken": '{"choices": [',
    "empty": "",
    "null": "null",
    "list": "[1, 2]",
    "deep": "[" * 100_000,
    "no choices": '{"error": {"message": "busy"}}',
    "null choice": '{"choices": [null]}',
    "no message": '{"choices": [{}]}',
    "null message": completion(None),
    "number": completion({"content": 5}),
    "list of numbers": completion({"content": [1]}),
    "image": completion({"content": [{"type": "image_url"}]}),
    "calls as text": completion({"tool_calls": "search"}),
    "null call": completion({"tool_calls": [None]}),
    "function as text": completion({"tool_calls": [{"function": "search"}]}),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_one_line(name):
    with pytest.raises(chat_api.UnusableAnswer) as error:
        chat_api.read(NO_ANSWERS[name])
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_what_is_one():
    call = {"id": 7, "function": {"name": "look", "arguments": {"a": 1}}}
    message, reason = chat_api.read(completion({"content": None, "tool_calls": [call], "reasoning": [1]}, "tool_calls"))
    function = {"name": "look", "arguments": '{"a": 1}'}
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert reason == "tool_calls"
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_api.read(completion({"content": parts}, None)) == ({"role": "assistant", "content": "ab"}, "")


def test_half_a_character_is_replaced():
    body = '{"choices": [{"message": {"content": "a\\ud800b \\ud83d\\ude00", "reasoning": "\\udfff"}}]}'
    assert chat_api.read(body)[0] == {"role": "assistant", "content": "a\ufffdb 😀", "reasoning": "\ufffd"}


@pytest.mark.parametrize("body", ["<html>", '{"data"', "null", '{"data": null}', '{"data": [1]}', '{"models": []}'])
def test_what_is_no_list_of_models(body):
    with pytest.raises(chat_api.UnusableAnswer, match=r"is the base URL right\? it usually ends with /v1"):
        chat_api.read_models(body)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hi.\n", ("", "Hi.\n", False)),
        ("<think>\na\n</think>\n\nb", ("a", "b", False)),
        ("a</think>b", ("a", "b", False)),
        ("<think>a", ("a", "", True)),
        ("b<think>a", ("a", "b", True)),
        ("<think>a</think>b<think>c", ("ac", "b", True)),
    ],
)
def test_thinking(text, parts):
    assert chat_api.split_thinking(text) == parts


def test_a_key_is_in_no_text():
    assert chat_api.without_key("Bearer k-1\n {'Authorization': 'Bearer k-1'}", "k-1") == (
        "Bearer *** {'Authorization': 'Bearer ***'}"
    )
    assert chat_api.without_key("none", "") == "none"
