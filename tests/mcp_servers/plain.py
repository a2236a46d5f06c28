"""A small MCP server without the SDK: it starts in hundredths of a second and speaks the handshake of 2025 only.

    python plain.py [FOLDER]        leaves a file named by its process id in FOLDER

A shelf with one drawer a key. `dump` is for the reward side; the rest misbehaves in one way each.
"""

import json
import os
import pathlib
import signal
import sys
import time

SHELF: dict[str, str] = {}
TEXT = {"type": "string"}
TOOLS = {
    "put": {"key": TEXT, "value": TEXT},
    "get": {"key": TEXT},
    "dump": {},
    "fail": {},
    "refuse": {},
    "nothing": {},
    "picture": {},
    "hang": {},
    "die": {},
    "deaf": {},
}


def tool(name):
    properties = TOOLS[name]
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"name": name, "description": f"{name} on the shelf", "inputSchema": schema}


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def call(name, arguments):
    if name == "put":
        SHELF[arguments["key"]] = arguments["value"]
        return text("put")
    if name == "get":
        return text(SHELF.get(arguments["key"], "empty"))
    if name == "dump":
        return text(json.dumps(SHELF))
    if name == "fail":
        return text("the drawer is stuck", isError=True)
    if name == "nothing":
        return {"content": []}
    if name == "picture":
        image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
        inside = {"type": "resource", "resource": {"uri": "shelf://a", "text": "a note"}}
        link = {"type": "resource_link", "uri": "shelf://b", "name": "b"}
        return {"content": [{"type": "text", "text": "see:"}, image, inside, link]}
    if name == "die":
        sys.exit("the shelf fell down")
    if name == "deaf":  # neither the end of its input nor a polite signal ends it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    time.sleep(600)


def answer(method, params):
    if method == "initialize":
        server = {"name": "plain", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":  # two pages
        names, first = list(TOOLS), params.get("cursor") is None
        page = {"tools": [tool(name) for name in (names[:4] if first else names[4:])]}
        return page | ({"nextCursor": "more"} if first else {})
    if method == "tools/call":
        return call(params["name"], params.get("arguments") or {})
    return None


def main():
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        params = message.get("params") or {}
        if params.get("name") == "refuse":
            outcome = {"error": {"code": -32602, "message": "not like this"}}
        elif (result := answer(message["method"], params)) is not None:
            outcome = {"result": result}
        else:
            outcome = {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)


if __name__ == "__main__":
    main()
