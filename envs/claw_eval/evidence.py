"""What the reward side knows about a task of Claw-Eval, as text that a model can read, within a budget."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from envs.base import Evidence
from envs.claw_eval import grading
from envs.claw_eval.checkout import Checkout, Entry

CUT = " [...]"
SHORTEST, LONGEST = 3, 60  # characters of a name
NAMING = set(
    "id name title subject from to email sender recipient owner author user reporter assignee attendees company "
    "customer client contact supplier vendor product".split()
)  # parts of a key whose values name something
PROPER = re.compile(r"[A-Z][\w.'-]+(?: [A-Z][\w.'-]+)+|\S+@\S+")


@functools.lru_cache(maxsize=4096)
def evidence(checkout: Checkout, entry: Entry, budget: int) -> Evidence:
    """Reference solution, forbidden actions, expected actions, and the rubrics; what exceeds the budget is cut.

    Args:
      budget: characters of the text. The reference solution comes first, and the longest rubrics are cut first.
    """
    task = entry.definition
    sections = {
        "Reference solution": task.reference_solution.strip(),
        "Forbidden": "\n".join(_forbidden(c) for c in task.safety_checks),
        "Actions that are expected": "\n".join(f"{a.service}: {a.action_key}" for a in task.expected_actions),
        "Success means": task.judge_rubric.strip(),
    }
    sections |= {
        f"Rubric of the judge ({name.strip('_').lower()})": t for name, t in grading.rubrics(checkout, entry).items()
    }
    text = _join(_fit({k: t for k, t in sections.items() if t}, budget))
    return Evidence(text or "none", tuple(dict.fromkeys(v for v in _names(entry) if v in text)))


def untrue(entry: Entry) -> list[str]:
    """Tools and services that the evidence names and the task does not have; without gold play no more can be told."""
    task = entry.definition
    tools = {t.name for t in task.tools}
    kinds = {name.partition("_")[0] for name in tools}
    named = re.findall(r"(?<![\w./])[a-z]+(?:_[a-z]+)+(?![\w./])", task.reference_solution)
    unknown = sorted({n for n in named if n.partition("_")[0] in kinds} - tools)
    problems = [f"the reference solution calls {name}, which is no tool of the task" for name in unknown]
    absent = {a.service for a in task.expected_actions} - {s.name for s in task.services}
    return problems + [f"an action of {name} is expected, which is no service of the task" for name in sorted(absent)]


def _forbidden(check: Any) -> str:
    what = check.tool_name or ", ".join(check.patterns or ())
    return f"{check.type} {what}: {check.description}".strip(": ")


def _join(sections: dict[str, str]) -> str:
    return "\n".join(f"{title}:\n  " + text.replace("\n", "\n  ") for title, text in sections.items())


def _fit(sections: dict[str, str], budget: int) -> dict[str, str]:
    """The sections, the longest of the later ones cut until all fit; the first is cut last."""
    fitted = dict(sections)
    while (over := len(_join(fitted)) - budget) > 0:
        later = list(fitted)[1:]
        title = max(later, key=lambda t: len(fitted[t])) if later else next(iter(fitted))
        text = fitted[title].removesuffix(CUT)
        keep = len(text) - over - len(CUT)
        if keep > 50 or not later:
            fitted[title] = text[: max(keep, 0)].rstrip() + CUT
        else:
            del fitted[title]
        if not later:
            break
    return fitted


def _names(entry: Entry) -> Iterator[str]:
    """What the task's data call people, companies, messages and the like: privileged until a tool has shown it."""
    for path in sorted(entry.folder.glob("fixtures/**/*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        yield from _leaves(data, "")


def _leaves(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _leaves(v, k)
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(v, key)
    elif isinstance(value, str) and SHORTEST <= len(text := value.strip()) <= LONGEST:
        if NAMING & set(key.lower().split("_")) or PROPER.fullmatch(text):
            yield text
