"""Gold play: the agent's next turn from where the dialogue stands, and a user that goes along with it.

Gold actions are taken in order. An agent's action is a call; a user's action is asked for by name, in a text; when all
are done, one text says the required information. `GoldUser` needs no model: on a text that names the user's next gold
action it does it, and on any other text it ends the dialogue. So gold play and idle play need no endpoint.
"""

import copy
from collections.abc import Sequence
from typing import Any

from envs.base import AssistantTurn, Message, ToolCall
from envs.endpoint import Reply
from envs.tau2.domain import Domain, gold_steps
from envs.tau2.evidence import call_text

ASK = "Please do this on your device: "
DONE = "All is done."


def pending(domain: Domain, task_id: str, trajectory: Sequence[Any]) -> list[Any]:
    """Gold actions that have no equal call yet; each call counts for one action."""
    made = [(c.requestor, c.name, c.arguments) for m in trajectory for c in getattr(m, "tool_calls", None) or []]
    left = []
    for step in gold_steps(domain, task_id):
        wanted = (step.action.requestor, step.action.name, step.action.arguments)
        if wanted in made:
            made.remove(wanted)
        else:
            left.append(step.action)
    return left


def next_turn(domain: Domain, task_id: str, trajectory: Sequence[Any], turn: int) -> AssistantTurn | None:
    """The gold next turn; None once a database was changed in a way that gold does not change it."""
    if strayed(domain, task_id, trajectory):
        return None
    left = pending(domain, task_id, trajectory)
    if not left:
        criteria = domain.tasks[task_id].evaluation_criteria
        return AssistantTurn(" ".join([DONE, *((criteria.communicate_info if criteria else None) or [])]))
    if left[0].requestor == "user":
        return AssistantTurn(ASK + call_text(left[0]))
    return AssistantTurn("", (ToolCall(left[0].name, copy.deepcopy(left[0].arguments), f"gold_{turn}"),))


def strayed(domain: Domain, task_id: str, trajectory: Sequence[Any]) -> bool:
    """Whether the agent made a change, without error, that is not a gold action."""
    gold = [(s.action.name, s.action.arguments) for s in gold_steps(domain, task_id)]
    failed = {m.id for m in trajectory if m.role == "tool" and m.error}
    calls = [c for m in trajectory for c in getattr(m, "tool_calls", None) or [] if c.requestor == "assistant"]
    return any(c.name in domain.writes and c.id not in failed and (c.name, c.arguments) not in gold for c in calls)


class GoldJudge:
    """Finds that all assertions in words hold where gold was played to its end, and nowhere else."""

    async def hold(self, assertions: Sequence[str], trajectory: Sequence[Any]) -> bool:
        return any(m.role == "assistant" and (m.content or "").startswith(DONE) for m in trajectory)


class GoldUser:
    """Does on the device what the agent asks for by name, and ends the dialogue on any other text."""

    def __init__(self, domain: Domain, stop: str):
        self._domain, self._stop = domain, stop
        self.task_id = ""

    async def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        spoken = [m for m in messages if m["role"] != "system"]
        if sum(m["role"] == "user" for m in spoken) == 1 and spoken[-1]["role"] == "user":
            return Reply("Hello, I need your help.")
        if spoken[-1]["role"] == "tool":
            return Reply(f"I did it: {spoken[-1]['content']}")
        for step in gold_steps(self._domain, self.task_id):
            if step.action.requestor == "user" and spoken[-1]["content"] == ASK + call_text(step.action):
                return Reply(None, ((f"device_{len(spoken)}", step.action.name, copy.deepcopy(step.action.arguments)),))
        return Reply(self._stop)
