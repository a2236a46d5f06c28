"""The reward of τ²-bench, taken from the live environment; equal to that of its evaluator, which replays the dialogue.

The reward is a product over the task's reward basis (τ²'s EvaluationCriteria):

    DB              both databases equal those after the gold actions on a fresh environment
    ENV_ASSERTION   every assertion about the environment holds
    ACTION          every gold action was called, with equal arguments where the task compares them
    COMMUNICATE     every required text occurs in what the agent said (no case, no commas)
    NL_ASSERTION    a judge finds that every assertion in words holds (upstream's retail only)
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from envs.tau2 import package
from envs.tau2.copy_on_write import fingerprint
from envs.tau2.domain import Domain, replay
from envs.tau2.judge import Judge


@dataclasses.dataclass(frozen=True)
class Grade:
    """The score of each part of the reward basis, in the basis' order; none where nothing is asked of the task."""

    parts: dict[str, float]

    @property
    def reward(self) -> float:
        return math.prod(self.parts.values())

    @property
    def basis(self) -> str:
        return "+".join(self.parts) or "nothing"


def basis(task: Any) -> list[str]:
    """Names of the parts of a task's reward."""
    criteria = task.evaluation_criteria
    return [part.value for part in criteria.reward_basis] if criteria else []


def needs_judge(task: Any) -> bool:
    """Whether the reward depends on assertions in words."""
    return "NL_ASSERTION" in basis(task) and bool(task.evaluation_criteria.nl_assertions)


async def grade(domain: Domain, task: Any, world: Any, trajectory: Sequence[Any], judge: Judge | None = None) -> Grade:
    """Grades an episode that its user ended.

    Args:
      world: the environment at the end. trajectory: τ²'s messages.
      judge: needed exactly if `needs_judge(task)`.
    """
    parts = _checkable(domain, task, world, trajectory)
    if "NL_ASSERTION" in basis(task):
        assertions = task.evaluation_criteria.nl_assertions
        parts["NL_ASSERTION"] = float(not assertions or await judge.hold(assertions, trajectory))
    return Grade({part: parts[part] for part in basis(task)})


def _checkable(domain: Domain, task: Any, world: Any, trajectory: Sequence[Any]) -> dict[str, float]:
    """Scores of the parts that need no judge."""
    criteria, parts = task.evaluation_criteria, {}
    named = basis(task)
    if "DB" in named:
        parts["DB"] = float(_ungraded(criteria) or _state(world) == gold_state(domain, task.id))
    if "ENV_ASSERTION" in named:
        parts["ENV_ASSERTION"] = float(all(holds(world, a) for a in criteria.env_assertions or []))
    if "ACTION" in named:
        calls = [c for m in trajectory for c in getattr(m, "tool_calls", None) or []]
        parts["ACTION"] = float(all(any(a.compare_with_tool_call(c) for c in calls) for a in criteria.actions or []))
    if "COMMUNICATE" in named:
        said = [m.content.lower().replace(",", "") for m in trajectory if m.role == "assistant" and m.content]
        parts["COMMUNICATE"] = float(all(any(i.lower() in s for s in said) for i in criteria.communicate_info or []))
    return parts


def holds(world: Any, assertion: Any) -> bool:
    """Whether an assertion about the environment holds; one that does not find its subject (τ² raises) does not."""
    try:
        return world.run_env_assertion(assertion, raise_assertion_error=False)
    except ValueError:
        return False


def _ungraded(criteria: Any) -> bool:
    """τ² compares no databases where a task names neither actions nor assertions."""
    return criteria.actions is None and criteria.env_assertions is None


def _state(world: Any) -> tuple[Any, Any]:
    return fingerprint(world.tools.db), fingerprint(world.user_tools.db) if world.user_tools else None


@functools.lru_cache(maxsize=4096)
def gold_state(domain: Domain, task_id: str) -> tuple[Any, Any]:
    """Both databases after the gold actions on a fresh environment; an action that fails is passed over, as in τ²."""
    task = domain.tasks[task_id]
    world = domain.start(task)
    for action in task.evaluation_criteria.actions or []:
        try:
            replay(world, action)
        except Exception:
            continue
    return _state(world)


@functools.lru_cache(maxsize=4096)
def idle_wins(domain: Domain, task_id: str) -> bool:
    """Whether doing nothing has reward 1: the right outcome of such a task is to change and to say nothing."""
    task = domain.tasks[task_id]
    if needs_judge(task):
        return False
    parts = _checkable(domain, task, domain.start(task), [package.greeting()])
    return all(parts[p] == 1.0 for p in basis(task) if p in parts)
