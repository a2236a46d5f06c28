"""Servers behind HTTP: a fake one for what can go wrong, and a real vLLM server for what must be equal."""

import asyncio
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from test_engine import config, request, sample
from tiny_models import ReferenceModel, make_qwen3

from models import hf
from rti_jax import weight_sync
from rti_jax.config import ConfigError
from rti_jax.endpoints import ChatEndpoint
from rti_jax.engine import make_engine
from rti_jax.engine_errors import EngineDiedError, EngineError, StaleVersionError


class FakeServer:
    """Answers vLLM's routes: every completion is the ids (version, order of arrival), log-probabilities -0.5 and -1."""

    def __init__(self):
        self.version, self.calls, self.overrides, self.delay = "default", [], {}, 0.0
        self.answers = {}  # route -> function of the request's body
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path: str, body: dict):
        self.calls.append((path, body))
        route = path.partition("?")[0]
        if route in self.overrides:
            return self.overrides[route]
        if route in self.answers:
            return self.answers[route](body)
        if route == "/v1/completions":
            version = 0 if self.version == "default" else int(self.version)
            time.sleep(self.delay)
            choice = {"token_ids": [version, len(self.calls)], "finish_reason": "length"}
            return {"choices": [choice | {"logprobs": {"token_logprobs": [-0.5, -1.0]}}]}
        if route == "/v1/chat/completions":
            function = {"name": "search", "arguments": '{"keyword": "Rome"}'}
            calls = [{"id": "1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": "Looking.", "tool_calls": calls if "tools" in body else None}
            return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        if route == "/finish_weight_update":
            self.version = body["weight_version"]
        settings = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": weight_sync.BACKEND},
        }
        return {
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/server_info": {"vllm_config": settings},
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
        }.get(route, {})


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        reply = self.fake.reply(self.path, body)
        status, reply = reply if isinstance(reply, tuple) else (200, reply)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
def fakes():
    servers = [FakeServer(), FakeServer()]
    yield servers
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def connect(folder, servers):
    return make_engine(folder, config(kind="server", urls=[f"{s.url}/v1" for s in servers]))


@contextlib.contextmanager
def connected(folder, servers):
    engine = connect(folder, servers)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def tensors(folder):
    return hf.to_hf(*hf.load(folder))


class TestServerEngine:
    def test_sends_ids_and_settings_and_shares_the_requests(self, folder, fakes):
        with connected(folder, fakes) as engine:
            r = request(0, 60, temperature=0.6, stop_token_ids=(258, 256))
            results = sample(engine, r, r, r, r)
            assert {(r.logprobs, r.finish_reason, r.policy_version) for r in results} == {((-0.5, -1.0), "length", 0)}
        sent = [[body for path, body in fake.calls if path == "/v1/completions"] for fake in fakes]
        assert [len(s) for s in sent] == [2, 2]
        expected = {
            "prompt": list(r.prompt_ids), "max_tokens": 4, "temperature": 0.6, "seed": 1000,
            "stop_token_ids": [258, 256], "ignore_eos": True, "return_token_ids": True, "logprobs": 0, "top_k": 0,
        }  # fmt: skip
        assert {key: sent[0][0][key] for key in expected} == expected

    def test_an_update_waits_for_running_requests_and_holds_new_ones(self, folder, fakes):
        for fake in fakes:
            fake.delay = 0.3

        async def together(engine):
            old = [asyncio.create_task(engine.generate(request(i))) for i in range(4)]
            await asyncio.sleep(0.1)
            update = asyncio.create_task(engine.update_weights(tensors(folder), 7))
            await asyncio.sleep(0.05)
            new = [asyncio.create_task(engine.generate(request(i))) for i in range(4)]
            return await asyncio.gather(*old), await update, await asyncio.gather(*new)

        with connected(folder, fakes) as engine:
            old, confirmed, new = asyncio.run(together(engine))
            assert [(r.policy_version, r.ids[0]) for r in old] == [(0, 0)] * 4
            assert [(r.policy_version, r.ids[0]) for r in new] == [(7, 7)] * 4
            assert (confirmed, engine.version) == (7, 7)
            with pytest.raises(StaleVersionError):
                asyncio.run(engine.update_weights(tensors(folder), 7))
        control = [path for path, _ in fakes[1].calls if not path.startswith(("/v1", "/server_info", "/weight_info"))]
        steps = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert control == [*steps, "/reset_prefix_cache", "/resume"]

    def test_a_restarted_server_is_noticed(self, folder, fakes):
        with connected(folder, fakes) as engine:
            asyncio.run(engine.update_weights(tensors(folder), 1))
            fakes[0].version = "default"
            with pytest.raises(EngineDiedError, match=f"{fakes[0].url} serves weights version 0, not 1: it was"):
                asyncio.run(engine.update_weights(tensors(folder), 2))

    def test_a_new_trainer_learns_what_the_servers_serve(self, folder, fakes):
        fakes[1].version = "40"
        with connected(folder, fakes) as engine:
            assert engine.version == 40

    def test_a_stale_prefix_cache_ends_the_service(self, folder, fakes):
        fakes[1].overrides["/reset_prefix_cache"] = {"success": False}
        with connected(folder, fakes) as engine:
            with pytest.raises(EngineDiedError, match="did not reset its prefix cache.*restart the servers"):
                asyncio.run(engine.update_weights(tensors(folder), 1))
            with pytest.raises(EngineDiedError, match="restart the servers"):
                sample(engine, request(0))

    def test_wrong_settings_are_named_with_the_flag(self, folder, fakes):
        fakes[0].overrides["/server_info"] = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            connect(folder, fakes)
        fakes[0].overrides["/server_info"] = (404, {})
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            connect(folder, fakes)

    def test_a_refusal_is_one_line(self, folder, fakes):
        fakes[0].overrides["/v1/completions"] = fakes[1].overrides["/v1/completions"] = (400, {"error": "too\nlong"})
        with (
            connected(folder, fakes) as engine,
            pytest.raises(EngineError, match=r"/v1/completions: 400 .*too") as error,
        ):
            sample(engine, request(0))
        assert "\n" not in str(error.value)

    def test_an_absent_server_is_named(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineDiedError, match=f"server {url} cannot be reached"):
            make_engine(folder, config(kind="server", urls=[url]))


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


@pytest.fixture
def server(folder, tmp_path):
    """A real vLLM server of the folder's model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = json.dumps({"backend": weight_sync.BACKEND})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "16384"]
    command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", transfer]
    quick = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | quick | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_a_real_server_equals_transformers_before_and_after_an_update(server, folder, tmp_path):
    other = make_qwen3(tmp_path / "other", seed=5)
    engine = make_engine(folder, config(kind="server", urls=[server]))
    requests = [request(i, 150, temperature=(1.0, 0.6)[i % 2]) for i in range(10)]
    for version, path in enumerate((folder, other)):
        if version:
            assert asyncio.run(weight_sync.sync(engine, *hf.load(path), version)) == version
        results, reference = sample(engine, *requests), ReferenceModel(path)
        for r, result in zip(requests, results, strict=True):
            assert (len(result.ids), result.policy_version) == (24, version)
            expected = reference.logprobs(r.prompt_ids, result.ids, r.temperature)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
        (stopped,) = sample(engine, request(0, 150, stop_token_ids=(results[0].ids[6],)))
        n = results[0].ids.index(results[0].ids[6]) + 1
        assert (stopped.ids, stopped.finish_reason) == (results[0].ids[:n], "stop")
    asyncio.run(engine.close())
