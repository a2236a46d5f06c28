"""A teacher's servers: what they are asked, and where when one of them fails. Scoring is in test_distillation.py."""

import asyncio
import contextlib

import pytest
from fake_server import FakeServer
from tiny_models import byte_tokenizer

from rti_jax import frozen_servers
from rti_jax.engine import GenerateRequest
from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.frozen_servers import COMPLETIONS, FrozenServers

REQUEST = GenerateRequest((5, 6, 7), 600, 0.7, 11, (2, 3))
ANSWER = {"token_ids": [9, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -1.0]}}


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(frozen_servers, "BACKOFF_SECONDS", 0.0)
    tokenizer, servers = byte_tokenizer(), [FakeServer(), FakeServer()]
    for server in servers:
        server.answers = {
            "/tokenize": lambda body: {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)},
            COMPLETIONS: lambda body: {"choices": [ANSWER]},
        }
    yield servers
    for server in servers:
        server.close()


@contextlib.contextmanager
def connected(fakes):
    servers = FrozenServers([f"{fake.url}/v1" for fake in fakes], byte_tokenizer(), concurrency=4)
    try:
        yield servers
    finally:
        asyncio.run(servers.close())


def asked(fake):
    return [body for path, body in fake.calls if path == COMPLETIONS]


def test_ids_and_settings_are_sent_in_turn(fakes):
    with connected(fakes) as servers:
        results = [asyncio.run(servers.generate(REQUEST)) for _ in range(4)]
    assert {(r.ids, r.logprobs, r.finish_reason) for r in results} == {((9, 2), (-0.5, -1.0), "stop")}
    assert [len(asked(fake)) for fake in fakes] == [2, 2]
    expected = {
        "prompt": [5, 6, 7], "max_tokens": 509, "temperature": 0.7, "seed": 11, "stop_token_ids": [2, 3],
        "ignore_eos": True, "return_token_ids": True, "logprobs": 0, "top_p": 1.0, "top_k": 0,
    }  # fmt: skip
    assert {key: asked(fakes[0])[0][key] for key in expected} == expected


@pytest.mark.parametrize("answer", [(500, {"error": "broken"}), (503, {}), (200, "no JSON")])
def test_another_server_is_asked_and_a_request_that_none_answers_is_not_the_end(fakes, answer):
    fakes[0].overrides[COMPLETIONS] = answer
    with connected(fakes) as servers:
        assert asyncio.run(servers.generate(REQUEST)).ids == (9, 2)
        fakes[1].overrides[COMPLETIONS] = answer
        with pytest.raises(EngineError) as error:
            asyncio.run(servers.generate(REQUEST))
    assert not isinstance(error.value, EngineDiedError) and len(asked(fakes[0])) + len(asked(fakes[1])) == 2 + 3


def test_servers_that_are_gone_are(fakes):
    with connected(fakes) as servers:
        for fake in fakes:
            fake.kill()
        with pytest.raises(EngineDiedError, match="cannot be reached"):
            asyncio.run(servers.generate(REQUEST))


def test_a_refused_request_is_not_repeated(fakes):
    fakes[0].overrides[COMPLETIONS] = (400, {"error": "too\nlong"})
    with connected(fakes) as servers, pytest.raises(EngineError, match=f"{COMPLETIONS}: 400 .*too"):
        asyncio.run(servers.generate(REQUEST))
    assert not asked(fakes[1])
    with connected(fakes) as servers, pytest.raises(ContextLengthError):
        asyncio.run(servers.generate(GenerateRequest((1,) * 512, 1, 1.0, 0, ())))
