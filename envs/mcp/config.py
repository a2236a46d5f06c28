"""The keys of an MCP environment under `env:` in a config."""

import os
import string
from collections.abc import Mapping
from typing import Literal

import pydantic

from envs.base import EnvironmentConfig


class MCPConfig(EnvironmentConfig):
    """Either `command` or `url`, `tasks` and `reward` must be given."""

    command: tuple[str, ...] = ()  # starts a stdio server, e.g. [python, server.py]: a process for each episode
    folder: str = ""  # where the command runs; empty = the current folder
    variables: dict[str, str] = {}  # of the command, beside PATH and HOME; "$NAME" is taken from our environment
    url: str = ""  # a streamable HTTP server instead of a command: a session for each episode
    headers: dict[str, str] = {}  # of requests to url, e.g. {Authorization: "Bearer $TOKEN"}
    protocol: Literal["auto", "legacy"] = "auto"  # legacy: the handshake of protocols before 2026, which opens sessions
    stateless: bool = False  # one process or session for all episodes: for servers that keep nothing between calls
    servers: int = pydantic.Field(32, ge=1)  # episodes at once, each with a server of its own
    start_timeout: float = pydantic.Field(30.0, gt=0)  # seconds until a server has listed its tools
    call_timeout: float = pydantic.Field(30.0, gt=0)  # seconds of one call; a slower one makes the episode a `timeout`
    tools: tuple[str, ...] | None = None  # what the policy sees of the server's tools; null = all
    result_limit: int = pydantic.Field(20_000, ge=1)  # characters of one result that the policy sees
    tasks: dict[str, str]  # split: its file (.jsonl, or a list in .yaml)
    reward: str  # import path of the reward function, "my_module:my_reward"
    system: str = ""  # system prompt; empty = none
    rules: str = ""  # what the three roles must know

    @pydantic.model_validator(mode="after")
    def _one_server(self):
        if bool(self.command) == bool(self.url):
            raise ValueError("give either env.command (a stdio server) or env.url (a streamable HTTP one)")
        return self


def filled(values: Mapping[str, str], key: str) -> dict[str, str]:
    """Values with their $NAMES from the environment variables. Raises ValueError for one that is not set."""
    try:
        return {name: string.Template(value).substitute(os.environ) for name, value in values.items()}
    except KeyError as missing:
        raise ValueError(f"env.{key}: the environment variable {missing.args[0]} is not set") from None
    except ValueError as error:
        raise ValueError(f"env.{key}: {error} (a dollar sign itself is $$)") from None
