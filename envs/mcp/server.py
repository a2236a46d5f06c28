"""Connections to MCP servers: started within a time limit, called from any task, ended whatever happens.

The SDK's connection must be left by the task that entered it, and a native cancellation may interrupt the end of a
server's process. So each connection is owned by a task of its own that nothing else cancels: `close` asks it to end,
and it does so even if whoever asked is cancelled.
"""

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import weakref
from typing import Any

import anyio

from envs.base import CallTimeout, EnvironmentError
from envs.mcp.config import MCPConfig, filled

LOG_TAIL = 300  # characters of a lost server's stderr that an error quotes


@dataclasses.dataclass(frozen=True)
class Result:
    """A tool's answer as text. `is_error`: the tool itself says that it failed (MCP's isError)."""

    text: str
    is_error: bool = False


class Server:
    """One connection; a stdio server's process lives as long as it does."""

    def __init__(self, config: MCPConfig):
        self.tools: list[dict[str, Any]] = []  # in OpenAI format, once it has started
        self.lost = ""  # why it cannot be used any more
        self._config = config
        self._client: Any = None
        self._owner: asyncio.Task | None = None

    async def start(self) -> None:
        """Connects and lists the tools; may be awaited by several. Raises CallTimeout or EnvironmentError."""
        if self._owner is None:
            self._scope, self._started = anyio.CancelScope(), asyncio.Event()
            self._owner = asyncio.create_task(self._own())
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._started.wait()
        except TimeoutError:
            self.lost = f"the MCP server was not ready within {self._config.start_timeout:g} s{self._stderr()}"
            raise CallTimeout(self.lost) from None
        if self.lost:
            raise EnvironmentError(self.lost)

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """A tool's answer; an error that the tool or the protocol reports of the call itself is a Result.

        Raises:
          CallTimeout: the answer did not come within `call_timeout`. EnvironmentError: the server is gone or broken.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        if self._client is None:
            raise EnvironmentError(self.lost or "the MCP server was closed")
        try:
            async with asyncio.timeout(self._config.call_timeout):
                answer = await self._client.call_tool(name, arguments)
        except TimeoutError:
            raise CallTimeout(f"tool {name} gave no answer within {self._config.call_timeout:g} s") from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return Result(str(error), is_error=True)
            if error.code == CONNECTION_CLOSED:
                self.lost = f"the MCP server ended during {name}{self._stderr()}"
                raise EnvironmentError(self.lost) from error
            raise EnvironmentError(f"the MCP server failed in {name}: {error}") from error
        except RuntimeError as error:  # a result that is not what the tool's output schema says
            raise EnvironmentError(f"the MCP server failed in {name}: {error}") from error
        except Exception as error:  # of the connection
            self.lost = f"the MCP server was lost in {name}: {_words(error)}"
            raise EnvironmentError(self.lost) from error
        return Result(_text(answer), bool(answer.is_error))

    async def close(self) -> None:
        """Ends the connection and the server's process, the hard way if it must be; returns when that is done."""
        if self._owner is not None:
            self.end()
            await asyncio.wait({self._owner})  # cancelled here, the owner still goes on to the end

    def end(self) -> None:
        """Asks the connection to end, and does not wait for it."""
        if self._owner is not None:
            self._scope.cancel()

    async def _own(self) -> None:
        with tempfile.TemporaryFile() as self._log:
            try:
                with self._scope:
                    await self._serve()
            except Exception as error:
                self.lost = f"the MCP server could not be reached: {_words(error)}{self._stderr()}"
            finally:
                self._client = None
                self._started.set()

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(await self._connection(stack))
            self.tools = [_openai_tool(tool) for tool in await _all_tools(client)]
            self._client = client
            self._started.set()
            await anyio.sleep_forever()

    async def _connection(self, stack: contextlib.AsyncExitStack) -> Any:
        """The SDK's client, not entered yet."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self._config
        if config.command:
            program, *arguments = config.command
            variables, folder = filled(config.variables, "variables"), config.folder or None
            parameters = StdioServerParameters(command=program, args=arguments, env=variables, cwd=folder)
            return Client(stdio_client(parameters, errlog=self._log), mode=config.protocol, cache=None)
        import httpx2

        limits = httpx2.Timeout(config.start_timeout, read=max(config.start_timeout, config.call_timeout))
        http = httpx2.AsyncClient(headers=filled(config.headers, "headers"), timeout=limits)
        await stack.enter_async_context(http)
        return Client(streamable_http_client(config.url, http_client=http), mode=config.protocol, cache=None)

    def _stderr(self) -> str:
        """The end of what a stdio server wrote to stderr, for an error."""
        try:
            self._log.seek(0)
            text = " ".join(self._log.read().decode(errors="replace").split())
        except (AttributeError, ValueError):  # not opened yet, or closed
            return ""
        return f"; it wrote: {text[-LOG_TAIL:]}" if text else ""


def server_for(config: MCPConfig) -> Server:
    """A server that is not started yet; with `stateless` the one that all episodes of this event loop share."""
    if not config.stateless:
        return Server(config)
    servers = _shared.setdefault(asyncio.get_running_loop(), {})
    key = config.model_dump_json()
    if key in servers and servers[key].lost:
        servers.pop(key).end()
    if key not in servers:
        servers[key] = Server(config)
    return servers[key]


_shared: weakref.WeakKeyDictionary[Any, dict[str, Server]] = weakref.WeakKeyDictionary()


async def _all_tools(client: Any) -> list[Any]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _openai_tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(answer: Any) -> str:
    """Texts joined by lines; what is no text is named, never dropped without a word."""
    if not answer.content and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(map(_block, answer.content))


def _block(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type in ("image", "audio"):
        return f"[{block.type} {block.mime_type}, {len(block.data)} characters of base64, not shown]"
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        return text if text is not None else f"[resource {resource.uri}, {resource.mime_type or 'binary'}, not shown]"
    if block.type == "resource_link":
        return f"[link to resource {block.uri}]"
    return f"[{block.type}, not shown]"


def _words(error: BaseException) -> str:
    """The first real error within groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
