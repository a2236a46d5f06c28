"""The score of an episode: the benchmark's own grader and formula, in a thread, with a time limit.

score = safety (0.8 completion + 0.2 robustness),  a success from 0.75
"""

import asyncio
import dataclasses
import functools
import inspect
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.base import EnvironmentError, JudgeError
from envs.claw_eval import bridge
from envs.claw_eval.checkout import Checkout, Entry
from envs.claw_eval.judge import Answers, Judge

RENAMED = {"gmail": {"sent": "sent_messages"}}  # service -> what six graders look up: what its audit calls it


@dataclasses.dataclass(frozen=True)
class Grade:
    """What a grader found, the benchmark's score of it, and whether that is a success."""

    completion: float
    robustness: float
    safety: float
    score: float
    passed: bool
    judged: int  # answers of the judge


async def grade(
    checkout: Checkout,
    entry: Entry,
    messages: Sequence[Any],
    dispatches: Sequence[Any],
    audit: Mapping[str, Any],
    answers: Answers,
    seconds: float,
) -> Grade:
    """Grades a trace.

    Args:
      messages, dispatches: the benchmark's TraceMessages and ToolDispatches. audit: what each service recorded.

    Raises:
      JudgeError: the judge gave no usable answer, whatever the grader made of that.
      EnvironmentError: the grader raised, gave no numbers, or took longer than `seconds`.
    """
    judge = Judge(checkout, answers.ask, asyncio.get_running_loop(), answers.tries)
    grader = grader_class(checkout, entry)()
    offered = {"audit_data": dict(audit), "judge": judge, "media_events": []}
    accepted = {k: v for k, v in offered.items() if k in inspect.signature(grader.grade).parameters}
    task = entry.definition.model_copy(deep=True)  # a grader may change what all episodes share
    run = functools.partial(grader.grade, list(messages), list(dispatches), task, **accepted)
    try:
        scores = await bridge.in_thread(run, seconds)
    except (Exception, bridge.Unanswered, SystemExit) as error:
        if judge.client.failure or (judge.client.waiting and isinstance(error, bridge.Overdue)):
            raise JudgeError(f"judge: {judge.client.failure or error}") from error
        raise EnvironmentError(f"the grader of {entry.id}: {type(error).__name__}: {error}") from error
    finally:
        failure = judge.client.failure
        judge.client.stop("the grade is no longer wanted")
    if failure:  # the grader has made something of it nevertheless
        raise JudgeError(f"judge: {failure}")
    return _grade(checkout, entry, scores, judge.client.asked)


def _grade(checkout: Checkout, entry: Entry, scores: Any, judged: int) -> Grade:
    parts = [getattr(scores, name, None) for name in ("completion", "robustness", "safety")]
    if not all(isinstance(p, int | float) and math.isfinite(p) for p in parts):
        raise EnvironmentError(f"the grader of {entry.id} gave {parts}")
    formula = checkout.module("models.scoring")
    score = formula.compute_task_score(scores)
    return Grade(*map(float, parts), float(score), bool(formula.is_pass(score)), judged)


@functools.cache
def grader_class(checkout: Checkout, entry: Entry) -> type:
    """The class of a task's grader, silenced. Raises EnvironmentError where it cannot be loaded."""
    registry = checkout.module("graders.registry")
    try:
        with checkout.importing():
            grader = registry.get_grader(entry.id, tasks_dir=entry.folder.parent, task_dir=entry.folder)
    except Exception as error:  # the checkout's code may raise anything
        raise EnvironmentError(f"the grader of {entry.id}: {type(error).__name__}: {error}") from error
    for module in (*_modules(type(grader)), vars(checkout.module("graders.llm_judge"))):
        place = pathlib.Path(module.get("__file__") or "/")
        if place.is_relative_to(checkout.root) or place.is_relative_to(entry.folder.parent):
            module["print"] = _silent  # redirecting sys.stdout would silence all threads
    return type(grader)


@functools.cache
def looks_up_renamed(checkout: Checkout, entry: Entry) -> bool:
    """Whether a grader asks a service's audit for what that calls otherwise, so that it finds nothing."""
    pattern = "|".join(rf"""["']{s}["'],\s*["']{old}["']""" for s, names in RENAMED.items() for old in names)
    if not {s.name for s in entry.definition.services} & RENAMED.keys():
        return False
    files = {m["__file__"] for m in _modules(grader_class(checkout, entry)) if m.get("__file__")}
    return any(re.search(pattern, pathlib.Path(f).read_text(encoding="utf-8")) for f in sorted(files))


def renamed(audit: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The audit with records under both names."""
    found = {service: dict(records) for service, records in audit.items()}
    for service, names in RENAMED.items():
        for old, new in names.items():
            if new in found.get(service, {}):
                found[service].setdefault(old, found[service][new])
    return found


def rubrics(checkout: Checkout, entry: Entry) -> dict[str, str]:
    """The rubrics that a grader keeps as class attributes, by name."""
    cls = grader_class(checkout, entry)
    named = {name: getattr(cls, name) for name in dir(cls) if "RUBRIC" in name}
    return {name: text for name, text in named.items() if isinstance(text, str) and text.strip()}


def _modules(cls: type) -> Iterator[dict[str, Any]]:
    """Globals of the modules that a class and its bases come from."""
    for base in cls.__mro__[:-1]:
        for member in vars(base).values():
            function = getattr(member, "__func__", member)  # of a static method
            if inspect.isfunction(function):
                yield function.__globals__


def _silent(*_: Any, **__: Any) -> None:
    pass
