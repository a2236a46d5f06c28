"""A stand-in for a vLLM server, with whatever can be wrong with one."""

import contextlib
import http.server
import json
import threading

from rti_jax import weight_sync

TOKENS = "/inference/v1/generate"


class FakeServer:
    """Answers vLLM's routes: every sample is [number of the weights version, order of arrival], the rest zeros.

    Attributes:
      calls: (path, body) of every request. overrides: route -> body, or (status, body), in the place of the answer.
      answers: route -> function of the request's body, the same.
      open: samples wait for it. dead: connections are cut without an answer, those that wait included.
      most: samples that ran at once.
    """

    def __init__(self, limit: int = 64):
        self.version, self.limit, self.calls, self.overrides, self.answers = "default", limit, [], {}, {}
        self.open, self.dead, self.running, self.most = threading.Event(), False, 0, 0
        self.open.set()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = _Listener(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.open.set()
        self.server.shutdown()
        self.server.server_close()

    def kill(self):
        """As kill -9 of its process; what comes after is a new one with the first weights."""
        self.dead = True
        self.open.set()

    def revive(self):
        self.version, self.dead = "default", False

    @property
    def samples(self) -> list[dict]:
        """Bodies of the samples it was asked for, those of looks at it excepted."""
        return [body for path, body in self.calls if path == TOKENS and body["token_ids"] != [0]]

    def reply(self, path: str, body: dict):
        with self._lock:
            self.calls.append((path, body))
        route = path.partition("?")[0]
        if route == TOKENS:
            return self._sample(body)
        if route in self.overrides:
            return self.overrides[route]
        if route in self.answers:
            return self.answers[route](body)
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
            "scheduler_config": {"max_num_seqs": self.limit},
        }
        return {
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 512}]},
            "/server_info": {"vllm_config": settings},
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
            "/weight_checker": {"checksums": {"w": self.version}},
        }.get(route, {})

    def _sample(self, body: dict):
        version = self.version
        if body["token_ids"] != [0]:  # not a look at it
            with self._lock:
                self.running += 1
                self.most = max(self.most, self.running)
            self.open.wait(60)
            with self._lock:
                self.running -= 1
        if TOKENS in self.overrides:
            return self.overrides[TOKENS]
        number = 0 if version == "default" else int(version.rpartition("-")[2])
        ids = [number, len(self.calls)][: body["sampling_params"]["max_tokens"]]
        content = [{"token_id": i, "logprob": -0.5 * (n + 1)} for n, i in enumerate(ids)]
        spans = [{"version": version, "start": 0, "end": len(ids)}]
        return answer(token_ids=ids, logprobs={"content": content}, weight_versions=spans)


def answer(**choice) -> dict:
    """An answer with one choice."""
    return {"choices": [{"index": 0, "finish_reason": "length", **choice}]}


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        reply = None if self.fake.dead else self.fake.reply(self.path, body)
        if self.fake.dead:
            self.close_connection = True
            return
        status, reply = reply if isinstance(reply, tuple) else (200, reply)
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asked has gone
            self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass
