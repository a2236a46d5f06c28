"""`rti doctor CONFIG`: everything that a run needs, looked over before it.

    rti doctor configs/quickstart.yaml
    rti doctor configs/navigation_qwen3_8b.yaml model.path=/models/Qwen3-8B --fast

Each check is a function of the same `Subject` that returns a `Finding`: ok, warning, failure or not applicable, with
what to do. Cheap ones come first, those that need vLLM last, and a line is printed when its check has ended. A check
that raises is a failure with that error's line (RTI_DEBUG=1 shows the traceback). Nothing is written to the run folder.
"""

import asyncio
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from rti_jax import config as config_lib
from rti_jax import doctor_chat, doctor_engine, doctor_rehearsal, doctor_setup
from rti_jax.doctor_records import Check, Finding, Status, Subject, failure, not_applicable
from rti_jax.engine_errors import EngineError
from rti_jax.redaction import redact

CHECKS = (
    Check("model", doctor_setup.model),
    Check("tokenizer", doctor_chat.tokenizer, ("model",)),
    Check("template", doctor_chat.template, ("tokenizer",)),
    Check("stop ids", doctor_chat.stop_ids, ("tokenizer",)),
    Check("padding", doctor_chat.padding, ("tokenizer",)),
    Check("tool calls", doctor_chat.tool_calls, ("tokenizer",)),
    Check("keys", doctor_setup.keys),
    Check("tasks", doctor_setup.tasks),
    Check("context", doctor_rehearsal.context, ("tokenizer", "tasks")),
    Check("evidence canary", doctor_rehearsal.canary, ("tokenizer", "tasks")),
    Check("teacher vocabulary", doctor_chat.teacher, ("tokenizer",)),
    Check("run folder", doctor_setup.run_folder),
    Check("disk", doctor_setup.disk, ("model",)),
    Check("devices", doctor_setup.devices),
    Check("engine", doctor_engine.engine, ("model",), samples=True),
    Check("engine and learner", doctor_engine.learner, ("engine", "tokenizer", "tasks", "devices"), samples=True),
    Check("weight sync", doctor_engine.weight_update, ("engine and learner",), samples=True),
    Check("episode", doctor_engine.episode, ("engine", "tokenizer", "tasks", "keys"), samples=True),
    Check(
        "judged sample", doctor_engine.judged_sample, ("engine", "tokenizer", "tasks", "keys", "devices"), samples=True
    ),
)
COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red", Status.NOT_APPLICABLE: "dim"}
ADVICE = "do what this line says; RTI_DEBUG=1 shows where it comes from"


@dataclasses.dataclass(frozen=True)
class Line:
    """A check's finding with its name and how long it took."""

    name: str
    finding: Finding
    seconds: float


def main(config: config_lib.Config, *, fast: bool = False, as_json: bool = False) -> int:
    """Prints a line for each check; returns 1 if any failed."""
    checks = [c for c in CHECKS if not (fast and c.samples)]
    console = Console(soft_wrap=True, highlight=False)
    tell = (lambda line: None) if as_json else (lambda line: show(line, console))
    lines = asyncio.run(examine(config, checks, tell))
    failures = [line.name for line in lines if line.finding.status is Status.FAILURE]
    if as_json:
        print(json.dumps({"ok": not failures, "checks": list(map(_record, lines))}, ensure_ascii=False, indent=1))
    else:
        console.print(escape(_summary(lines, failures, len(CHECKS) - len(checks))))
    return int(bool(failures))


async def examine(
    config: config_lib.Config, checks: Sequence[Check] = CHECKS, tell: Callable[[Line], None] = lambda line: None
) -> list[Line]:
    """Runs the checks in order; ends the engine that one of them started.

    Args:
      tell: told of each line as soon as there is one.
    """
    subject, lines, bad = Subject(config), [], set()
    try:
        for check in checks:
            started = time.monotonic()
            if missing := next((n for n in check.needs if n in bad), None):
                finding = not_applicable(f"not looked at: {missing} comes first")
            else:
                finding = await _run(check, subject)
            if missing or finding.status is Status.FAILURE:
                bad.add(check.name)
            lines.append(Line(check.name, finding, time.monotonic() - started))
            tell(lines[-1])
    finally:
        if subject.engine:
            await subject.engine.close()
    return lines


async def _run(check: Check, subject: Subject) -> Finding:
    """A check's finding; what it raises is a failure."""
    try:
        finding = await check.run(subject)
    except Exception as error:
        if os.environ.get("RTI_DEBUG", "0") not in ("", "0"):
            sys.stderr.write(redact(traceback.format_exc()))
        finding = failure(_one_line(error), ADVICE)
    return dataclasses.replace(finding, message=redact(finding.message))


def _one_line(error: Exception) -> str:
    """Our own errors are written for users; others need their kind."""
    text = " ".join(str(error).split())[:500]
    own = isinstance(error, config_lib.ConfigError | EngineError) and text
    return text if own else f"{type(error).__name__}: {text}".rstrip(": ")


def show(line: Line, console: Console) -> None:
    """The line, and what to do below it."""
    colour, finding = COLOURS[line.finding.status], line.finding
    console.print(f"[{colour}]{finding.status:<14}[/{colour}]  {line.name:<18}  {escape(finding.message)}")
    if finding.remedy:
        console.print(f"{'':<36}-> {escape(finding.remedy)}")


def _summary(lines: Sequence[Line], failures: Sequence[str], left_out: int) -> str:
    warnings = [line.name for line in lines if line.finding.status is Status.WARNING]
    parts = [f"{len(failures)} failed: {', '.join(failures)}" if failures else "nothing failed"]
    parts += [f"{len(warnings)} warnings: {', '.join(warnings)}"] if warnings else []
    parts += [f"{left_out} checks that need vLLM were left out (--fast)"] if left_out else []
    return "; ".join(parts)


def _record(line: Line) -> dict:
    return {"check": line.name, **dataclasses.asdict(line.finding), "seconds": round(line.seconds, 3)}
