"""An HTTP server on localhost that answers JSON as a test says: models behind an endpoint, mostly."""

import http.server
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any


class JsonServer:
    """Serves until `close`, or to the end of a `with`.

    Args:
      answer: (path, body, authorization) -> (HTTP status, reply); called in a thread of each connection. A body that is
        not there is {}, a reply that is no string becomes JSON.
      headers: of every answer.

    Attributes:
      address: "HOST:PORT".
    """

    def __init__(self, answer: Callable[[str, Any, str], tuple[int, Any]], headers: Mapping[str, str] | None = None):
        handler = type("Handler", (_Handler,), {"answer": staticmethod(answer), "headers_of_all": dict(headers or {})})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "JsonServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def says(text: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    """An answer of the chat API."""
    message = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        status, reply = self.answer(self.path, body, self.headers.get("authorization", ""))
        data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        known = {"content-type": "application/json", "content-length": str(len(data))}
        for name, value in (known | self.headers_of_all).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass
