"""A small MCP server on the official SDK, to be served over HTTP; docs/mcp.md has one over stdio."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {"apple": 3, "pear": 4}


def make(basket: list[str]) -> MCPServer:
    """A shop whose basket is the caller's: one that outlives an episode leaks from it into the next."""
    server = MCPServer("shop")

    @server.tool()
    def price(fruit: str) -> int:
        """The price of a fruit."""
        return PRICES[fruit]

    @server.tool()
    def buy(fruit: str, count: int = 1) -> str:
        """Puts fruit into the basket."""
        if fruit not in PRICES:
            raise ToolError(f"there is no {fruit} here")
        basket.extend([fruit] * count)
        return f"{len(basket)} in the basket"

    return server
