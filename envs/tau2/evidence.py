"""What the reward side knows about a task of τ²-bench, as text that a model can read."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from envs.base import Evidence
from envs.tau2.domain import Domain, Step, gold_steps
from envs.tau2.grading import basis, holds

NAMED = 60  # characters: a longer argument is prose (a summary), not a value
PARTS = {
    "DB": "the databases must end as the reference actions leave them",
    "ENV_ASSERTION": "the conditions at the end must hold",
    "ACTION": "every reference action must have been called",
    "COMMUNICATE": "the required information must have been said to the user, word for word",
    "NL_ASSERTION": "the assertions in words must hold",
}


@functools.lru_cache(maxsize=4096)
def evidence(domain: Domain, task_id: str) -> Evidence:
    """Reference actions (those that fail marked as such), conditions, required information and the user's scenario."""
    task = domain.tasks[task_id]
    criteria, steps = task.evaluation_criteria, gold_steps(domain, task_id)
    sections = [
        ("Reference actions, in order", [_step(i, s) for i, s in enumerate(steps, 1)] or ["none: change nothing"])
    ]
    if criteria:
        sections += [
            ("Conditions at the end", [_assertion(a) for a in criteria.env_assertions or []]),
            ("Information the agent must say to the user", [json.dumps(i) for i in criteria.communicate_info or []]),
            ("Assertions in words", list(criteria.nl_assertions or [])),
        ]
    sections += [
        ("Success means", [PARTS[part] for part in basis(task)] or ["nothing is checked"]),
        ("Faults at the start", _faults(task)),
        ("Purpose of the task", [task.description.purpose] if task.description and task.description.purpose else []),
        ("Scenario given to the user", str(task.user_scenario).splitlines()),
    ]
    text = "\n".join(line for title, lines in sections if lines for line in (f"{title}:", *(f"  {x}" for x in lines)))
    told = [i for i in (criteria.communicate_info or [])] if criteria else []
    values = [v for s in steps if s.action.name != "calculate" for v in _leaves(s.action.arguments)]
    return Evidence(text, tuple(dict.fromkeys([*values, *told])))


def call_text(action: Any) -> str:
    """A call as text: tool(argument=value, ...)."""
    return (
        f"{action.name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in action.arguments.items())})"
    )


def _step(number: int, step: Step) -> str:
    who = "agent" if step.action.requestor == "assistant" else "user, on the own device"
    failing = f"  [expected to fail and to have no effect: {step.error}]" if step.error else ""
    loose = (
        ""
        if step.action.compare_args is None
        else f"  [compared: {', '.join(step.action.compare_args) or 'the name alone'}]"
    )
    return f"{number}. {who}: {call_text(step.action)}{loose}{failing}"


def _assertion(assertion: Any) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v)}" for k, v in assertion.arguments.items())
    return f"{assertion.env_type}: {assertion.func_name}({arguments}) is {assertion.assert_value}"


def _faults(task: Any) -> list[str]:
    actions = (task.initial_state.initialization_actions if task.initial_state else None) or []
    return [
        f"{a.env_type}: {a.func_name}({', '.join(f'{k}={json.dumps(v)}' for k, v in a.arguments.items())})"
        for a in actions
    ]


def _leaves(value: Any) -> Iterator[str]:
    """Names, ids and numbers anywhere in an action's arguments."""
    if isinstance(value, dict):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(v)
    elif (
        isinstance(value, str)
        and 0 < len(value) <= NAMED
        or isinstance(value, int | float)
        and not isinstance(value, bool)
    ):
        yield str(value)


def untrue(domain: Domain, task_id: str, evidence: Evidence) -> list[str]:
    """Statements of the evidence that playing the gold actions on a fresh environment shows to be false or missing."""
    task, lines, problems = domain.tasks[task_id], evidence.text.splitlines(), []
    world, criteria = domain.start(task), task.evaluation_criteria
    for number, action in enumerate((criteria.actions if criteria else None) or [], 1):
        line = next((x.strip() for x in lines if x.startswith(f"  {number}. ") and call_text(action) in x), "")
        try:
            world.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
            world.sync_tools()
            failed = False
        except Exception:  # whatever a tool raises
            failed = True
        if not line or failed != ("expected to fail" in line):
            problems.append(f"action {number} {'fails' if failed else 'succeeds'}, but the evidence says {line!r}")
    for assertion in (criteria.env_assertions if criteria else None) or []:
        if f"  {_assertion(assertion)}" not in lines:
            problems.append(f"the evidence lacks the condition {_assertion(assertion)}")
        if not holds(world, assertion):
            problems.append(f"the condition does not hold after the reference actions: {_assertion(assertion)}")
    for text in (criteria.communicate_info if criteria else None) or []:
        if f"  {json.dumps(text)}" not in lines:
            problems.append(f"the evidence lacks the information {text!r}")
    return problems
