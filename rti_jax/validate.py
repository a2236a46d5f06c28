"""`rti validate CONFIG`: an environment checked, before a policy is trained on what may not be true.

    rti validate configs/navigation_qwen3_8b.yaml --limit 20
    rti validate configs/tau2_retail_qwen3_8b.yaml

On every task of the config's splits: gold play (`Environment.expert`, where the environment defines it) scores 1; doing
nothing (`Environment.idle`) scores 0, but for the tasks that the environment names as exceptions, which must be won;
calls fit their tools' schemas; the evidence is there, hides itself, is the same whenever it is asked for, and nothing
in it is untrue (`Environment.check_evidence`; the table says "unchecked" where an environment has none); the tasks are
the same whenever they are listed, references in tools' schemas lead somewhere, and closing raises nothing. Then all
those episodes are played again, many at once and turn by turn in between each other: each must see, message by
message, and score what it saw and scored alone. Every set-up, turn and score has a time limit, which holds wherever
the environment awaits something. Nothing else than the environment is needed: no model, and no endpoint
(`Environment.rehearsal`).
"""

import asyncio
import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from envs.base import AssistantTurn, Environment, EnvironmentError, Evidence, MalformedEvidence, Outcome, Task
from rti_jax import config as config_lib
from rti_jax import declarations
from rti_jax.environments import EnvironmentSource, environment_source, place, said
from rti_jax.eval_play import COLUMNS
from rti_jax.limits import run_bounded
from rti_jax.supervised import Supervised
from rti_jax.task_sets import limited
from rti_jax.types import Status

SECONDS = 60.0  # of one set-up, turn or score
TOGETHER = 64  # episodes at once
SHOWN = 20  # violations that are printed of each kind


class Violation(Exception):
    """What an episode did that no environment may do."""


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode: all that it showed, as text, and its outcome; None if it was not played to its end.

    Attributes:
      unclosed: what went wrong when the environment was closed. tools: what is wrong with the tools that it showed.
    """

    seen: tuple[str, ...]
    outcome: Outcome | None
    problem: str = ""
    unclosed: str = dataclasses.field(default="", compare=False)
    tools: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One violation: which check, of which task ("*" for the split's as a whole), and what was seen.

    The checks are "tasks", "gold", "idle", "evidence", "tools", "close" and "isolation".
    """

    check: str
    task: str
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found on the tasks of a split."""

    split: str
    tasks: int
    gold: int | None  # won by gold play; None where the environment defines none
    idle: tuple[str, ...]  # ids of tasks that doing nothing wins
    together: int  # episodes that were played at once
    findings: tuple[Finding, ...]
    checked: bool = True  # whether the environment has a check of what its evidence says


def main(config: config_lib.Config, limit: int | None = None, seconds: float = SECONDS) -> int:
    """Prints a table and the violations; returns 1 if there are any."""
    source = environment_source(config.env)
    source.at_once(TOGETHER)
    splits = list(dict.fromkeys([config.env.split, config.eval.split]))
    chosen = {split: limited(source.tasks(split), limit) for split in splits}
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        bar = progress.add_task("episodes", total=sum(map(len, chosen.values())) * 2 * len(plays(source)))
        advance = lambda: progress.advance(bar)  # noqa: E731
        reports = [asyncio.run(check(source, s, tasks, seconds, advance)) for s, tasks in chosen.items()]
    show(config.env.name, reports, Console(soft_wrap=True))
    return int(any(r.findings for r in reports))


async def check(
    source: EnvironmentSource,
    split: str,
    tasks: Sequence[Task],
    seconds: float = SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """All checks on the tasks of a split.

    Args:
      seconds: limit of one set-up, turn or score.
      advance: told of each episode; there are two for each task and each of `plays`.
    """
    changed = declarations.changed(source, split, tasks)
    exceptions, unfit = declarations.exceptions(source, split)
    findings = [Finding(kind, "*", text) for kind, text in (("tasks", changed), ("idle", unfit)) if text]
    chosen = plays(source)
    jobs = [(task, choose) for task in tasks for choose in chosen]
    alone = []
    for task, choose in jobs:
        alone.append(await play(source, task, choose, seconds))
        findings += _judge(task, choose is _expert, alone[-1], task.id in exceptions)
        if choose is chosen[0]:
            findings += [Finding("evidence", task.id, text) for text in await evidence_problems(source, task, seconds)]
        advance()

    async def again(task: Task, choose: Choose) -> Played:
        played = await play(source, task, choose, seconds)
        advance()
        return played

    together = await run_bounded([lambda t=t, c=c: again(t, c) for t, c in jobs], source.at_once(TOGETHER))
    for (task, choose), first, second in zip(jobs, alone, together, strict=True):
        if first != second:
            what = "gold" if choose is _expert else "idle"
            reproducible = await play(source, task, choose, seconds) == first
            how = "among others differs" if reproducible else "differs, also when it is played alone again"
            findings.append(Finding("isolation", task.id, f"{what} play {how}: {_difference(first, second)}"))
    findings += _once(jobs * 2, [*alone, *together])
    won = [_won(p) for p in alone]
    return Report(
        split=split,
        tasks=len(tasks),
        gold=sum(won[::2]) if _expert in chosen else None,
        idle=tuple(t.id for t, w in zip(tasks, won[len(chosen) - 1 :: len(chosen)], strict=True) if w),
        together=len(together),
        findings=tuple(findings),
        checked=source.cls.check_evidence is not Environment.check_evidence,
    )


Choose = Callable[[Environment], AssistantTurn | None]


def plays(source: EnvironmentSource) -> tuple[Choose, ...]:
    """How each task is played: gold, if the environment defines it, and idle."""
    return (_idle,) if source.cls.expert is Environment.expert else (_expert, _idle)


async def play(source: EnvironmentSource, task: Task, choose: Choose, seconds: float = SECONDS) -> Played:
    """Plays the turns that `choose` gives; never raises. Other episodes get their chance between any two turns."""
    seen: list[str] = []
    tools: list[str] = []
    environment = outcome = None
    problem = unclosed = ""
    try:
        environment = source.cls.rehearsal(source.config, source.max_turns)
        supervised = Supervised(environment, seconds)
        start = await supervised.reset(task)
        seen.append(_text([*start.messages, *start.tools]))
        tools = declarations.dangling(start.tools)
        for _ in range(source.max_turns):
            turn = choose(environment)
            if turn is None:
                raise Violation(f"the expert gives up after {len(seen) - 1} turns")
            if unfit := [call.error for call in supervised.checked(turn).tool_calls if call.error]:
                raise Violation(f"a call of turn {len(seen) - 1} does not fit its tool: {unfit[0]}")
            result = await supervised.step(turn)
            seen.append(_text(result.messages))
            if result.done:
                break
            if not result.messages:
                raise Violation("step answered with nothing and is not done")
            await asyncio.sleep(0)
        scored = await supervised.score()
        seen.append(_text(dataclasses.asdict(scored)))
        outcome = scored
    except Exception as error:  # an environment may raise anything; here it is what was looked for
        problem = _said(error, source.cls)
    finally:
        if environment is not None:
            unclosed = await _close(environment, seconds)
    return Played(tuple(seen), outcome, problem, unclosed, tuple(tools))


async def evidence_problems(source: EnvironmentSource, task: Task, seconds: float = SECONDS) -> list[str]:
    """What is wrong with the evidence of a task."""
    made: list[Environment] = []
    doing = "reset"  # what is named when an error may not be quoted
    try:
        for _ in range(2):
            made.append(source.cls.rehearsal(source.config, source.max_turns))
            supervised = Supervised(made[-1], seconds)
            start = await supervised.reset(task)
        other, environment = made
        doing = "evidence"
        evidence = environment.evidence()
        if not isinstance(evidence, Evidence) or not evidence.text.strip():
            return ["there is none"]
        doing = "check_evidence"
        problems = environment.check_evidence()
        if not isinstance(problems, list | tuple) or not all(isinstance(p, str) for p in problems):
            return [f"check_evidence gives {type(problems).__name__}, not a list of strings"]
        problems = list(problems)
        doing = "the first observation"
        shown = "\n".join(str(m.get("content")) for m in start.messages)
        if evidence.text in shown:
            problems.append("the first observation shows it")
        if any(value and value in repr(evidence) for value in (evidence.text, *evidence.values) if len(value) > 12):
            problems.append("its repr shows it")
        doing = "expert"
        if (turn := environment.expert()) is not None:
            doing = "step"
            await supervised.step(turn)
        doing = "evidence"
        if not (evidence == environment.evidence() == other.evidence()):
            problems.append("it is not the same in another episode, or after a turn")
        return problems
    except MalformedEvidence as error:
        return [said(error, source.cls)]
    except Exception as error:
        cause = error.__cause__ or error
        where = place(cause, source.cls)
        at = f" at {where}" if where else ""
        return [f"{type(cause).__name__} in {doing}{at}; its words may hold evidence and are not shown"]
    finally:
        for each in made:
            await _close(each, seconds)


def show(name: str, reports: Sequence[Report], console: Console) -> None:
    """The table, the tasks that doing nothing wins, and the violations."""
    table = Table(
        "split", "tasks", "gold play 1", "idle play 1", "evidence", "played at once", "violations", title=name
    )
    for r in reports:
        wrong = collections.Counter(f.check for f in r.findings)
        evidence = f"{wrong['evidence']} wrong" if wrong["evidence"] else "true" if r.checked else "unchecked"
        at_once = f"{r.together}, {wrong['isolation']} differ" if wrong["isolation"] else f"{r.together}, all as alone"
        table.add_row(
            r.split,
            str(r.tasks),
            "none defined" if r.gold is None else f"{r.gold} of {r.tasks}",
            f"{len(r.idle)} of {r.tasks}",
            evidence,
            at_once,
            f"[red]{len(r.findings)}[/red]" if r.findings else "none",
        )
    console.print(table)
    if len(reports) > 1:
        tasks, gold, idle = (sum(x) for x in zip(*((r.tasks, r.gold or 0, len(r.idle)) for r in reports), strict=True))
        won = "" if reports[0].gold is None else f"gold play wins {gold}, "
        console.print(f"in all: {tasks} tasks, {won}doing nothing wins {idle}")
    for r in reports:
        if r.idle:
            line = f"{r.split}: doing nothing wins {len(r.idle)} of {r.tasks} tasks: {' '.join(r.idle)}"
            console.print(escape(_printable(line, console)))
    for r in reports:
        shown: collections.Counter[str] = collections.Counter()
        for finding in r.findings:
            shown[finding.check] += 1
            if shown[finding.check] <= SHOWN:
                line = f"{r.split}: {finding.task}: {finding.check}: {finding.text}"
                console.print(escape(_printable(line, console)))
        for kind, count in shown.items():
            if count > SHOWN:
                console.print(f"{r.split}: {kind}: {count - SHOWN} more")


def _expert(environment: Environment) -> AssistantTurn | None:
    return environment.expert()


def _idle(environment: Environment) -> AssistantTurn:
    return environment.idle()


def _judge(task: Task, is_gold: bool, played: Played, exception: bool) -> list[Finding]:
    """Whether an episode that was played alone came out as it must."""
    check, won = ("gold" if is_gold else "idle"), _won(played)
    if played.outcome is None:
        return [Finding(check, task.id, played.problem)]
    if not Status(played.outcome.status).valid:
        return [Finding(check, task.id, f"{check} play ends in {_words(played.outcome)}")]
    if is_gold and not won:
        return [Finding(check, task.id, f"gold play ends in {_words(played.outcome)}")]
    if not is_gold and won and not exception:
        return [
            Finding(check, task.id, "doing nothing wins, and the environment does not name this task as an exception")
        ]
    if not is_gold and not won and exception:
        return [Finding(check, task.id, f"named as won by doing nothing, but that ends in {_words(played.outcome)}")]
    return []


def _once(jobs: Sequence[tuple[Task, Choose]], played: Sequence[Played]) -> list[Finding]:
    """Faults of tools and of closing, which many episodes share: each is named for the first task that shows it."""
    found: dict[tuple[str, str], Finding] = {}
    for (task, _), p in zip(jobs, played, strict=True):
        for kind, text in [("tools", text) for text in p.tools] + [("close", p.unclosed)] * bool(p.unclosed):
            found.setdefault((kind, text), Finding(kind, task.id, text))
    return list(found.values())


def _won(played: Played) -> bool:
    return played.outcome is not None and played.outcome.status == "success" and played.outcome.reward == 1.0


def _words(outcome: Outcome) -> str:
    reason = outcome.info.get("reason")
    return f"{outcome.status} with reward {outcome.reward}" + (f" ({reason})" if reason else "")


def _difference(first: Played, second: Played) -> str:
    """Where two plays of the same turns part."""
    if first.problem != second.problem:
        return f"{first.problem or 'no error'} first, {second.problem or 'no error'} then"
    for i, (a, b) in enumerate(zip(first.seen, second.seen, strict=False)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"answer {i}: {_around(a, at)} first, {_around(b, at)} then"
    return f"{len(first.seen)} answers first, {len(second.seen)} then"


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 40])


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _printable(text: str, console: Console) -> str:
    """The text with what the console cannot show, half a surrogate pair say, as escapes."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _said(error: Exception, cls: type[Environment]) -> str:
    """An error in words, with its place; one that this package or an environment raised speaks for itself."""
    if isinstance(error, EnvironmentError) and isinstance(error.__cause__, Exception):
        where = place(error.__cause__, cls)
        return f"{error} ({where})" if where else str(error)
    return str(error) if isinstance(error, Violation | EnvironmentError) else said(error, cls)


async def _close(environment: Environment, seconds: float) -> str:
    """What went wrong, or empty."""
    try:
        await Supervised(environment, seconds).close()
    except EnvironmentError as error:
        return _said(error, type(environment))
    return ""
