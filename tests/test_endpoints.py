"""Endpoints that play roles, against a fake server."""

import asyncio

import pytest
from fake_server import FakeServer

from rti_jax.endpoints import ChatEndpoint
from rti_jax.engine_errors import CutOffError, EngineError


@pytest.fixture
def fakes():
    servers = [FakeServer()]
    yield servers
    for server in servers:
        server.close()


class TestChatEndpoint:
    def complete(self, endpoint, **arguments):
        messages = [{"role": "user", "content": "Where is Rome?"}]
        try:
            return asyncio.run(endpoint.complete(messages, temperature=0.5, max_tokens=9, **arguments))
        finally:
            asyncio.run(endpoint.close())

    def test_returns_text_and_takes_the_first_model(self, fakes):
        assert self.complete(ChatEndpoint(f"{fakes[0].url}/v1"), seed=3) == "Looking."
        (body,) = [body for path, body in fakes[0].calls if path == "/v1/chat/completions"]
        assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("policy", 0.5, 9, 3)

    def test_parsed_calls_come_back_as_text(self, fakes):
        tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
        text = self.complete(ChatEndpoint(f"{fakes[0].url}/v1", "m"), tools=tools)
        assert text == 'Looking.\n<tool_call>\n{"name": "search", "arguments": {"keyword": "Rome"}}\n</tool_call>'

    def test_a_failure_names_the_endpoint(self, fakes):
        fakes[0].overrides["/v1/chat/completions"] = (400, {"error": {"message": "no such model"}})
        with pytest.raises(EngineError, match=f"endpoint {fakes[0].url}/v1: .*no such model"):
            self.complete(ChatEndpoint(f"{fakes[0].url}/v1", "m"))

    @pytest.mark.parametrize("body", ["<html>", "null", {"choices": [{"message": None}]}])
    def test_what_is_no_answer_names_the_endpoint(self, fakes, body):
        fakes[0].overrides["/v1/chat/completions"] = (200, body)
        with pytest.raises(EngineError, match=f"endpoint {fakes[0].url}/v1: "):
            self.complete(ChatEndpoint(f"{fakes[0].url}/v1", "m", retries=0))
        fakes[0].overrides["/v1/models"] = (200, body)
        with pytest.raises(EngineError, match="is the base URL right"):
            self.complete(ChatEndpoint(f"{fakes[0].url}/v1", retries=0))

    def test_a_cut_answer_is_none(self, fakes):
        choice = {"message": {"content": '<think>perhaps {"verdict": "valid"}'}, "finish_reason": "length"}
        fakes[0].overrides["/v1/chat/completions"] = (200, {"choices": [choice]})
        with pytest.raises(CutOffError, match="cut off at 9 tokens"):
            self.complete(ChatEndpoint(f"{fakes[0].url}/v1", "m"))
