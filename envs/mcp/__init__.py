"""Any MCP server's tools as an environment, given tasks and a reward function; see docs/mcp.md."""

from envs.mcp.config import MCPConfig
from envs.mcp.environment import MCP
from envs.mcp.played import Played, PlayedCall
from envs.mcp.server import Result

__all__ = ["MCP", "MCPConfig", "Played", "PlayedCall", "Result"]
