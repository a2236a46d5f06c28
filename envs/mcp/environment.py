"""Any MCP server's tools as an environment: tasks from a file, a reward from a function.

The policy sees the server's tools and a task's prompt. It calls tools turn by turn; a turn without a call is its answer
and ends the episode. The reward function then sees the calls, their results and the answer, and may call the server's
tools itself to look at its state.
"""

import importlib
import inspect
import math
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from envs.base import (
    AssistantTurn,
    Environment,
    EnvironmentConfig,
    EnvironmentError,
    Evidence,
    Message,
    Observation,
    Outcome,
    StepResult,
    Task,
    ToolCall,
    tool_error,
    tool_result,
)
from envs.mcp import tasks as task_files
from envs.mcp.config import MCPConfig, filled
from envs.mcp.played import Played, PlayedCall
from envs.mcp.server import Server, server_for


class MCP(Environment):
    """One episode with a server of its own (or the shared one, with `stateless`)."""

    Config: ClassVar[type[EnvironmentConfig]] = MCPConfig
    config: MCPConfig

    def __init__(self, config: MCPConfig, max_turns: int):
        super().__init__(config, max_turns)
        self._server: Server | None = None

    @classmethod
    def tasks(cls, config: MCPConfig, split: str) -> Sequence[Task]:
        cls.check(config)
        if split not in config.tasks:
            raise ValueError(f"env.tasks has no such split; it has {', '.join(config.tasks)}")
        records = task_files.load(config.tasks[split]).values()
        return [Task(f"{split}/{r.id}", r.kind, r.data) for r in records]

    @classmethod
    def check(cls, config: MCPConfig) -> None:
        try:
            from mcp import Client  # noqa: F401 - of version 2
        except ImportError as error:
            raise ValueError(f"env.name=mcp needs the MCP SDK: pip install 'rti-jax[mcp]' ({error})") from None
        if config.command and not shutil.which(config.command[0]):
            raise ValueError(f"env.command: there is no program {config.command[0]}")
        if config.folder and not pathlib.Path(config.folder).is_dir():
            raise ValueError(f"env.folder: there is no folder {config.folder}")
        filled(config.variables, "variables"), filled(config.headers, "headers")
        reward_function(config.reward)
        for path in config.tasks.values():
            task_files.load(path)

    @classmethod
    def idle_exceptions(cls, config: MCPConfig, split: str) -> frozenset[str]:
        records = task_files.load(config.tasks[split]).values()
        return frozenset(f"{split}/{r.id}" for r in records if r.idle_wins)

    @classmethod
    def at_once(cls, config: MCPConfig) -> int | None:
        return None if config.stateless else config.servers

    async def reset(self, task: Task) -> Observation:
        split, _, name = task.id.partition("/")
        self._task, self._record = task, task_files.load(self.config.tasks[split])[name]
        self._calls: list[PlayedCall] = []
        self._answer: str | None = None
        self._turns = 0
        self._server = server_for(self.config)
        await self._server.start()
        self._tools = self._offered(self._server.tools)
        system: list[Message] = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return Observation([*system, {"role": "user", "content": self._record.prompt}], self._tools)

    async def step(self, turn: AssistantTurn) -> StepResult:
        self._turns += 1
        if not turn.tool_calls:
            self._answer = turn.content
            return StepResult([], done=True)
        return StepResult([await self._run(call) for call in turn.tool_calls])

    async def score(self) -> Outcome:
        played = Played(self._task, tuple(self._calls), self._answer, self._server.call)
        value = reward_function(self.config.reward)(played)
        value = await value if inspect.isawaitable(value) else value
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise EnvironmentError(f"the reward function gave {value!r}, which is no number") from None
        if not math.isfinite(reward):
            raise EnvironmentError(f"the reward function gave {reward}")
        info = {
            "turns": self._turns,
            "calls": len(self._calls),
            "tool_errors": sum(call.is_error for call in self._calls),
        }
        return Outcome("success" if reward == 1.0 else "failure", reward, info)

    def evidence(self) -> Evidence:
        return self._record.as_evidence()

    def check_evidence(self) -> list[str]:
        """Values that the text does not hold, and gold calls of tools that the policy does not have.

        Gold play shows whether the calls are right; what a text says beside them is the author's to answer for.
        """
        evidence, names = self.evidence(), [tool["function"]["name"] for tool in self._tools]
        return [
            *(f"the value {value!r} is not in its text" for value in evidence.values if value not in evidence.text),
            *(f"the gold call {c.name} is no tool here" for c in self._record.gold or () if c.name not in names),
        ]

    def role_rules(self) -> str:
        return self.config.rules

    def expert(self) -> AssistantTurn | None:
        """The next gold call, one a turn, and the answer at the end; None without gold or with too few turns left."""
        if not self._record.has_gold or self._answer is not None:
            return None
        gold = list(self._record.gold or ())
        for call in self._calls:
            if gold and (call.name, call.arguments) == (gold[0].name, gold[0].arguments):
                gold.pop(0)
        if len(gold) + 1 > self.turn_limit - self._turns:
            return None
        if not gold:
            return AssistantTurn(self._record.answer or "Done.")
        return AssistantTurn("", (ToolCall(gold[0].name, dict(gold[0].arguments), f"call_{self._turns}"),))

    async def close(self) -> None:
        if self._server is not None and not self.config.stateless:
            await self._server.close()

    def _offered(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.config.tools is None:
            return tools
        by_name = {tool["function"]["name"]: tool for tool in tools}
        if unknown := [name for name in self.config.tools if name not in by_name]:
            raise EnvironmentError(f"env.tools: the server has no tool {unknown[0]}; it has {', '.join(by_name)}")
        return [by_name[name] for name in self.config.tools]

    async def _run(self, call: ToolCall) -> Message:
        """One call and its tool message; a result's isError stays an error for the policy and for the reward."""
        if call.error is not None:
            text, is_error = call.error, True
        else:
            result = await self._server.call(call.name, call.arguments)
            text, is_error = result.text, result.is_error
        self._calls.append(PlayedCall(call.name, call.arguments, text, is_error))
        if len(text) > (limit := self.config.result_limit):
            text = f"{text[:limit]}\n[{len(text) - limit} more characters are not shown]"
        return tool_error(call, text) if is_error else tool_result(call, text)


def reward_function(path: str) -> Callable[[Played], Any]:
    """The function of an import path. Raises ValueError: one line that says what is wrong with it."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ValueError(f"env.reward={path}: not an import path (my_module:my_reward)")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does when it is imported
        raise ValueError(f"env.reward={path}: importing {module_name}: {type(error).__name__}: {error}") from error
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"env.reward={path}: {module_name} has no function {name}")
    return function
