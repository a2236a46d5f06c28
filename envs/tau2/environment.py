"""τ²-bench: our policy is the agent of a customer service, against τ²'s environment and a simulated user.

One asyncio process plays hundreds of episodes: an episode is a copy-on-write world and a list of messages, a tool call
a function call, and only the user's endpoint is waited for. The rules are τ²'s own: a fixed greeting, the user speaks
first, only the user ends the dialogue (by a marker), ten failed tool calls or the turn limit end it with reward 0.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.base import (
    AssistantTurn,
    Environment,
    EnvironmentConfig,
    EnvironmentError,
    Evidence,
    Message,
    ModelEndpoint,
    Observation,
    Outcome,
    StepResult,
    Task,
    ToolCall,
    UserError,
    tool_error,
    tool_result,
)
from envs.endpoint import resolve
from envs.tau2 import domain as domains
from envs.tau2 import evidence as evidence_lib
from envs.tau2 import gold, grading, package
from envs.tau2.config import Tau2Config
from envs.tau2.judge import EndpointJudge, Judge
from envs.tau2.user import EndpointUser, User

IDLE = "idle"  # kind of the tasks that doing nothing wins
EMPTY = "The message was empty: write to the user, or call a tool."
RULES = """\
The agent has its own tools only. What has to be done on the user's device is done by the user: the agent asks for it \
in words, one step at a time, and never calls a device action itself.
Before a call that changes a database (booking, cancelling, modifying, returning, paying, enabling), the agent has \
told the user what it is going to do, and the user has explicitly agreed.
Nothing is fabricated: ids, prices, names and results come from the user's words or from tool results so far.
A turn is a message to the user or tool calls, not both; text beside a call is not shown to the user.
The dialogue is ended by the user alone. What the policy forbids is refused, or transferred to a human."""


class Tau2(Environment):
    """One episode of τ²-bench. Instances share the loaded domain, which nothing changes.

    Attributes:
      world: τ²'s environment of this episode. trajectory: τ²'s messages so far, as its evaluator reads them.
    """

    Config: ClassVar[type[EnvironmentConfig]] = Tau2Config
    check_arguments: ClassVar[bool] = False  # τ²'s own tools do, and its evaluator reads what they answer
    config: Tau2Config

    def __init__(self, config: Tau2Config, max_turns: int, user: User | None = None, judge: Judge | None = None):
        super().__init__(config, max_turns)
        self._user: User = user or EndpointUser(config.user)
        self._judge: Judge = judge or EndpointJudge(config.judge)

    @classmethod
    def tasks(cls, config: Tau2Config, split: str) -> Sequence[Task]:
        """Tasks of a split of τ² ("train"), or of one without another ("full-base")."""
        domain = domains.load(config.domain)
        return [Task(f"{domain.name}/{i}", _kind(domain, i), {"id": i}) for i in domains.split_ids(domain, split)]

    @classmethod
    def check(cls, config: Tau2Config) -> None:
        domain = domains.load(config.domain)
        if not resolve(config.user, "user")[0]:
            raise ValueError(
                "env.user.url is empty and RTI_USER_URL is not set: the user simulator needs an OpenAI-compatible "
                "endpoint, e.g. env.user.url=http://host:8000/v1"
            )
        if any(map(grading.needs_judge, domain.tasks.values())) and not resolve(config.judge, "judge")[0]:
            raise ValueError(
                f"tasks of {domain.name} in this release of τ²-bench are graded by a judge: set env.judge.url or "
                "RTI_JUDGE_URL"
            )

    @classmethod
    def endpoints(cls, config: Tau2Config) -> Mapping[str, ModelEndpoint]:
        asked = {"user": config.user}
        if any(map(grading.needs_judge, domains.load(config.domain).tasks.values())):
            asked["judge"] = config.judge
        found = {}
        for role, endpoint in asked.items():
            url, model, key = resolve(endpoint, role)
            variable = f"RTI_{role.upper()}_API_KEY or OPENAI_API_KEY"
            found[role] = ModelEndpoint(url, model, "" if key == "none" else key, variable)
        return found

    @classmethod
    def rehearsal(cls, config: Tau2Config, max_turns: int) -> "Tau2":
        user = gold.GoldUser(domains.load(config.domain), package.stop_markers()[0])
        return cls(config, max_turns, user, gold.GoldJudge())

    @classmethod
    def idle_exceptions(cls, config: Tau2Config, split: str) -> frozenset[str]:
        return frozenset(t.id for t in cls.tasks(config, split) if t.kind == IDLE)

    async def reset(self, task: Task) -> Observation:
        domain = domains.load(self.config.domain)
        self._domain, self._task = domain, domain.tasks[task.data["id"]]
        if isinstance(self._user, gold.GoldUser):
            self._user.task_id = self._task.id
        self._types = package.module("data_model.message")
        self.world = domain.start(self._task)
        self._device = domain.device_tools(self._task)
        prompt = package.user_prompt(str(self._task.user_scenario), bool(self._device))
        self._user_messages: list[Message] = [{"role": "system", "content": prompt}]
        self.trajectory: list[Any] = []
        self.turns = self.errors = self.user_errors = 0
        self.stopped = False
        history = (self._task.initial_state and self._task.initial_state.message_history) or []
        self._start = len(history)  # what the task itself has played already
        shown = self._open(history)
        if self.trajectory[-1].role == "assistant":
            shown += await self._user_turn()
        if self.stopped:
            raise UserError("the user ended the dialogue before the agent's first turn")
        if self._too_many_errors():
            raise UserError(f"{self.user_errors} of the user's calls failed before the agent's first turn")
        system: Message = {"role": "system", "content": domain.agent_prompt}
        return Observation([system, *shown], domain.tools)

    async def step(self, turn: AssistantTurn) -> StepResult:
        if self.done:
            raise EnvironmentError("a turn was played after the end of the episode")
        self.turns += 1
        if turn.tool_calls:
            messages = self._call_tools(turn.tool_calls)
        else:
            messages = await self._say(turn.content)
        if self._too_many_errors() and self.user_errors > self.errors:
            raise UserError(f"{self.user_errors} of the user's calls failed")
        return StepResult(messages, self.done)

    async def score(self) -> Outcome:
        info: dict[str, Any] = {
            "turns": self.turns,
            "tool_errors": self.errors,
            "user_tool_errors": self.user_errors,
            "reward_basis": "+".join(grading.basis(self._task)) or "nothing",
            "idle_wins": grading.idle_wins(self._domain, self._task.id),
        }
        if not self.stopped:
            reason = "too many tool errors" if self._too_many_errors() else "turn limit"
            return Outcome("failure", 0.0, info | {"reason": reason})
        grade = await grading.grade(self._domain, self._task, self.world, self.trajectory, self._judge)
        info |= {f"reward_{part}": score for part, score in grade.parts.items()}
        if grade.reward == 1.0:
            return Outcome("success", 1.0, info)
        failed = ", ".join(part for part, score in grade.parts.items() if score != 1.0)
        return Outcome("failure", 0.0, info | {"reason": f"not met: {failed}"})

    @property
    def done(self) -> bool:
        """True once the user ended the dialogue, and at the limits of turns and of failed calls."""
        return self.stopped or self._too_many_errors() or self.turns >= self.max_turns

    def evidence(self) -> Evidence:
        return evidence_lib.evidence(self._domain, self._task.id)

    def check_evidence(self) -> list[str]:
        return evidence_lib.untrue(self._domain, self._task.id, self.evidence())

    def role_rules(self) -> str:
        return RULES

    def expert(self) -> AssistantTurn | None:
        """The next gold action (calls; a user's own are asked for), at last the information that the user needs."""
        played = self.trajectory[self._start :]
        return None if self.done else gold.next_turn(self._domain, self._task.id, played, self.turns)

    def _open(self, history: Sequence[Any]) -> list[Message]:
        """The dialogue before the first turn, as the agent sees it: a task's own history, or the greeting."""
        shown: list[Message] = []
        for message in [m.model_copy(deep=True) for m in history] or [package.greeting()]:
            self.trajectory.append(message)
            if message.role == "tool" and message.requestor == "assistant":
                shown.append({"role": "tool", "tool_call_id": message.id, "content": message.content})
            elif message.role == "assistant" and message.tool_calls:
                calls = tuple(ToolCall(c.name, c.arguments, c.id) for c in message.tool_calls)
                shown.append(AssistantTurn(message.content or "", calls).as_message())
            elif message.role in ("assistant", "user") and not message.tool_calls:
                shown.append({"role": message.role, "content": message.content})
                self._user_messages.append(
                    {"role": "user" if message.role == "assistant" else "assistant", "content": message.content}
                )
        return shown

    def _call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs the calls in order. Those that may not reach τ² are answered here, and are no part of its trajectory."""
        answers, played = [], []
        for call in calls:
            if problem := self._domain.refusal(call):
                self.errors += 1
                answers.append(tool_error(call, problem))
                continue
            made = self._types.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            reply = domains.respond(self.world, made)
            self.errors += reply.error
            played.append((made, reply))
            answers.append(tool_result(call, reply.content))
        if played:
            message = self._types.AssistantMessage(role="assistant", content=None, tool_calls=[c for c, _ in played])
            self.trajectory += [message, *(reply for _, reply in played)]
        return answers

    async def _say(self, content: str) -> list[Message]:
        """A message to the user, and what comes back; an empty one is the policy's mistake and reaches nobody."""
        text = content.rpartition("</think>")[2].strip()
        if not text:
            self.errors += 1
            return [{"role": "user", "content": EMPTY}]
        self.trajectory.append(self._types.AssistantMessage(role="assistant", content=text))
        self._user_messages.append({"role": "user", "content": text})
        return await self._user_turn()

    async def _user_turn(self) -> list[Message]:
        """The user's next message to the agent, after whatever it does on its device."""
        for _ in range(self.config.user.max_calls + 1):
            reply = await self._user.reply(self._user_messages, self._device)
            if not reply.calls:
                self.trajectory.append(self._types.UserMessage(role="user", content=reply.content))
                self._user_messages.append({"role": "assistant", "content": reply.content})
                self.stopped = any(marker in reply.content for marker in package.stop_markers())
                return [{"role": "user", "content": reply.content}]
            self._act(reply.content, reply.calls)
            if self._too_many_errors():
                return []
        raise UserError(f"the user made more than {self.config.user.max_calls} calls in one turn")

    def _act(self, content: str | None, calls: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        """The user's calls of its device's tools, which the agent does not see."""
        made = [
            self._types.ToolCall(id=i, name=name, arguments=arguments, requestor="user") for i, name, arguments in calls
        ]
        self.trajectory.append(self._types.UserMessage(role="user", content=content, tool_calls=made))
        turn = AssistantTurn(content or "", tuple(ToolCall(name, arguments, i) for i, name, arguments in calls))
        self._user_messages.append(_as_api_message(turn))
        for call in made:
            reply = domains.respond(self.world, call)
            self.user_errors += reply.error
            self.trajectory.append(reply)
            self._user_messages.append({"role": "tool", "tool_call_id": call.id, "content": reply.content})

    def _too_many_errors(self) -> bool:
        return self.errors + self.user_errors >= self.config.max_errors


def _kind(domain: domains.Domain, task_id: str) -> str:
    """Tasks that doing nothing wins are a kind of their own; telecom's others are named by their fault."""
    if grading.idle_wins(domain, task_id):
        return IDLE
    return task_id[1:].partition("]")[0] if task_id.startswith("[") else "act"


def _as_api_message(turn: AssistantTurn) -> Message:
    """With arguments as JSON text, as endpoints want them."""
    message = turn.as_message()
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message | {"content": turn.content or None}
