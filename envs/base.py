"""What an environment is: tasks, an episode driven turn by turn, a score, and the evidence that the reward side has.

An environment is a class. It is named in a config by its built-in name or by import path
(`env.name: my_package.my_module:MyEnvironment`) and needs no change anywhere else::

    class Sum(Environment):
        @classmethod
        def tasks(cls, config, split):
            return [Task(id=f"{split}/{i}", data={"a": i, "b": 2 * i}) for i in range(100)]

        async def reset(self, task):
            self.task, self.answer = task, None
            return Observation(messages=[{"role": "user", "content": f"{task.data['a']} + {task.data['b']}?"}])

        async def step(self, turn):
            self.answer = turn.content.strip()
            return StepResult(messages=[], done=True)

        async def score(self):
            good = self.answer == str(self.task.data["a"] + self.task.data["b"])
            return Outcome(status="success" if good else "failure", reward=float(good))

        def evidence(self):
            return Evidence(text=f"The sum is {self.task.data['a'] + self.task.data['b']}.")
"""

import abc
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pydantic

Message = dict[str, Any]  # OpenAI chat format: role, content, tool_calls, tool_call_id, name


@dataclasses.dataclass(frozen=True)
class Task:
    """One task. `data` is the environment's own; `kind` groups tasks in metrics (e.g. "easy", "hard")."""

    id: str
    kind: str = "task"
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as parsed from the turn.

    `error` is set if it could not be parsed, names no tool or does not fit the tool's schema: the environment answers
    with `tool_error(call, call.error)` and does not run it.
    """

    name: str
    arguments: dict[str, Any] | None
    id: str = ""
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class AssistantTurn:
    """An assistant turn as the environment sees it: never the thinking."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_message(self) -> Message:
        """OpenAI-format message, for rendering expert transcripts."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


@dataclasses.dataclass(frozen=True)
class Observation:
    """Start of an episode: messages (system, user, …) and tools in OpenAI format (with the "function" wrapper)."""

    messages: list[Message]
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What came back on a turn: tool or user messages to append, and whether the episode is over."""

    messages: list[Message]
    done: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the episode ended.

    Attributes:
      status: a value of rti_jax.types.Status.
      reward: 1 for success, below 1 (0) for failure; None for the error statuses.
      info: of JSON's types, for viewers and statistics.
    """

    status: str
    reward: float | None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class MalformedEvidence(TypeError):
    """An `Evidence` was made of something else than strings. What this says holds none of it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Evidence:
    """What the reward side knows about a task. Its repr hides its text, so that no log can leak it.

    Attributes:
      text: readable text for the three roles.
      values: strings (ids, numbers, coordinates, names) that only the evidence may hold; input of the leak guard.

    Raises:
      MalformedEvidence: the text is no string, or the values are no sequence of strings.
    """

    text: str
    values: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.text, str):
            raise MalformedEvidence(f"the text of an Evidence is of type {type(self.text).__name__}, not a string")
        if isinstance(self.values, str):  # its letters would be the values
            raise MalformedEvidence("the values of an Evidence are one string; expected a tuple: one value is (value,)")
        if not isinstance(self.values, Sequence):
            kind = type(self.values).__name__
            raise MalformedEvidence(f"the values of an Evidence are of type {kind}, not a tuple of strings")
        if odd := [value for value in self.values if not isinstance(value, str)]:
            raise MalformedEvidence(f"a value of an Evidence is of type {type(odd[0]).__name__}, not a string")

    def __repr__(self) -> str:
        return f"Evidence(<{len(self.text)} characters hidden>)"


@dataclasses.dataclass(frozen=True)
class ModelEndpoint:
    """Another model that episodes ask, e.g. a simulated user; `key_variable` says where its key is looked for."""

    url: str
    model: str = ""
    key: str = dataclasses.field(default="", repr=False)
    key_variable: str = ""


class EnvironmentError(Exception):
    """The environment itself failed (not the policy): the episode is an `environment_error`, never reward 0."""

    status: ClassVar[str] = "environment_error"  # value of rti_jax.types.Status that the episode ends with


class UserError(EnvironmentError):
    """The simulated user failed."""

    status = "user_error"


class JudgeError(EnvironmentError):
    """The judge that scores an episode failed."""

    status = "judge_error"


class CallTimeout(EnvironmentError):
    """Something that the episode waits for (a tool, a set-up, a score) took longer than its limit."""

    status = "timeout"


class EnvironmentConfig(pydantic.BaseModel):
    """Base of an environment's own keys under `env:` in a config; unknown keys are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Environment(abc.ABC):
    """One episode at a time; many instances run concurrently and share nothing mutable.

    A policy's mistakes (a malformed call, a wrong argument) never raise: they come back as tool errors.

    Attributes:
      check_arguments: whether calls are checked against the observation's tools and their JSON schemas before `step`;
        False where the environment words these errors itself.
    """

    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    check_arguments: ClassVar[bool] = True

    def __init__(self, config: EnvironmentConfig, max_turns: int):
        self.config = config
        self.max_turns = max_turns
        self.turn_limit = max_turns  # of the current task; `reset` may lower it

    @classmethod
    @abc.abstractmethod
    def tasks(cls, config: EnvironmentConfig, split: str) -> Sequence[Task]:
        """All tasks of a split, the same list for the same config. Raises ValueError for an unknown split."""

    @abc.abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Starts an episode."""

    @abc.abstractmethod
    async def step(self, turn: AssistantTurn) -> StepResult:
        """Plays one assistant turn."""

    @abc.abstractmethod
    async def score(self) -> Outcome:
        """Grades the episode as it stands; called once, after done or at the turn limit."""

    @abc.abstractmethod
    def evidence(self) -> Evidence:
        """Privileged information about the current task; reaches the three roles only."""

    def role_rules(self) -> str:
        """Rules of this environment that the three roles must know; empty if there are none."""
        return ""

    def expert(self) -> AssistantTurn | None:
        """The gold next turn from the current state, or None where there is none (can no longer succeed).

        An environment that does not define it has no gold play; `rti validate` then checks the rest.
        """
        return None

    def valid(self, turn: AssistantTurn) -> bool | None:
        """Whether `expert` could still succeed after `turn`, in the turns left; None where nothing can tell.

        The episode itself is not changed. With `expert`, `faults` and `reveals` it is the truth that
        `rti eval --roles` measures the three roles by.
        """
        return None

    async def foresee(self, turn: AssistantTurn) -> None:  # noqa: B027 - optional
        """Fetches what `valid(turn)` has to know, where that lies elsewhere, e.g. at a map service."""

    def faults(self, rng: random.Random) -> Mapping[str, AssistantTurn]:
        """Wrong or leaking turns for the current state, one of each kind that is possible; for measuring a verifier."""
        return {}

    def reveals(self, turn: AssistantTurn) -> str | None:
        """What privileged thing a turn gives away, or None; a scripted check, for measuring."""
        return None

    @classmethod
    def check(cls, config: Any) -> None:
        """Called before a run: raises ValueError for what episodes need and do not find, e.g. an endpoint."""
        return None

    @classmethod
    def at_once(cls, config: Any) -> int | None:
        """How many episodes may run at once, where that is fewer than `rollout.concurrency` may allow; None = any."""
        return None

    @classmethod
    def endpoints(cls, config: Any) -> Mapping[str, ModelEndpoint]:
        """The other models that episodes ask, by role ("user", "judge"); `rti doctor` asks each once."""
        return {}

    @classmethod
    def rehearsal(cls, config: Any, max_turns: int) -> "Environment":
        """An instance on which gold and idle play need no endpoint: the task's data plays a simulated user or a judge.

        `rti validate` plays on these; the default suits an environment that asks no other model.
        """
        return cls(config, max_turns)

    def idle(self) -> AssistantTurn:
        """A turn that does nothing for the task, for `rti validate`."""
        return AssistantTurn("I am sorry, I cannot help with this.")

    @classmethod
    def idle_exceptions(cls, config: Any, split: str) -> frozenset[str]:
        """Ids of the tasks that doing nothing wins, where an environment has such tasks; see `idle`."""
        return frozenset()

    def check_evidence(self) -> list[str]:
        """What the evidence of the current task says that is not true, found otherwise than it was written."""
        return []

    @classmethod
    def family(cls, config: Any, task: Task) -> str:
        """A name that variants of one task share, e.g. its translations: `rti select` takes one of them."""
        return task.id

    def public_values(self) -> str:
        """Text whose values are never privileged for the leak guard (policy documents, tool schemas are added)."""
        return ""

    async def close(self) -> None:  # noqa: B027 - optional
        """Frees the episode's resources; called also on cancellation."""


def tool_error(call: ToolCall, text: str) -> Message:
    """A tool message that reports a policy's mistake back to it."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": f"Error: {text}"}


def tool_result(call: ToolCall, result: Any) -> Message:
    """A tool message with a result; anything but a string becomes compact JSON."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
