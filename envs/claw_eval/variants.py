"""Writes training tasks: variants of hard tasks, made from their own fixtures.

    python -m envs.claw_eval.variants FOLDER --subset hard20.txt --count 8 [--root CHECKOUT] [--seed 0]

A variant has other ids (TK-1001 becomes TK-5830 in data, request, reference solution and grader alike) and its records
in another order; people, texts and amounts stay. So it trains a task's procedure, and a policy may also remember what
stays: write variants of your own where that matters. Each is tried before it is kept: the same play, with the ids
renamed, must have the same answers and the same completion, robustness and safety as in the original, under a judge
that gives 0 and one that gives 1. A task without ids, or whose grader knows them otherwise, has no variant.
"""

import argparse
import asyncio
import collections
import json
import pathlib
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from envs.base import AssistantTurn, Task, ToolCall
from envs.claw_eval import checkout as checkouts
from envs.claw_eval import services, splits
from envs.claw_eval.checkout import Checkout, Entry
from envs.claw_eval.config import ClawEvalConfig
from envs.claw_eval.environment import REHEARSAL_CLOCK, ClawEval
from envs.claw_eval.judge import ConstantAnswers

ID = re.compile(r"(?<![A-Za-z0-9])([A-Za-z]+(?:[-_][A-Za-z]+)*[-_])(\d{3,})(?![A-Za-z0-9])")  # TK-1001, msg_017
BARE = re.compile(r"(?<!\d)\d{3,}(?!\d)")
SURE = 4  # digits from which a bare number that is one id's is taken for that id
PEER = re.compile(r"load_peer_grader\(\s*[\"'](\w+)[\"']\s*\)")
TEXT = {".json", ".yaml", ".py", ".txt", ".md", ".csv"}
TRIED = 12  # ids that each tool is tried with
Rename = Callable[[str], str]


def write(checkout: Checkout, entry: Entry, folder: pathlib.Path, seed: int, number: int) -> str:
    """Writes variant `number` of a task, unless none can be made that plays alike; returns its id, "" for none."""
    name = f"{entry.id}__{number}"
    for shuffling in (True, False):  # a service may depend on the order
        rng = random.Random(f"{seed}/{name}")
        rename = _renaming(checkout, entry, rng)
        if rename is None:
            return ""
        _copy(checkout, entry, folder / name, rename, rng if shuffling else None)
        try:
            variant = checkout.read(folder)[name]
            if not variant.obstacle and asyncio.run(_alike(checkout, entry, variant, rename)):
                return name
        except Exception:  # whatever the changed grader or service raises: it does not play alike
            pass
        shutil.rmtree(folder / name)
    return ""


def _renaming(checkout: Checkout, entry: Entry, rng: random.Random) -> Rename | None:
    """Other numbers for the ids in a task's data; None if all of them must stay (a text has them as mere numbers).

    Without it a variant would be the evaluated task itself in another order.
    """
    data = "\n".join(p.read_text(encoding="utf-8") for p in _data(checkout, entry).values() if p.suffix == ".json")
    known = "\n".join([(entry.folder / "task.yaml").read_text(encoding="utf-8"), *_graders(checkout, entry.folder)])
    bare = set(BARE.findall(ID.sub("", known)))
    groups: dict[str, set[str]] = {}
    for prefix, digits in ID.findall(data):
        groups.setdefault(prefix, set()).add(digits)
    owners = collections.Counter(digits for old in groups.values() for digits in old)
    elsewhere = set(BARE.findall(ID.sub("", data)))
    sure = {n for n in bare if len(n) >= SURE and owners[n] == 1 and n not in elsewhere}  # TK-1001/1003: one is meant
    new: dict[tuple[str, str], str] = {}
    for prefix, old in sorted(groups.items()):
        for digits in sorted(old) if not old & bare - sure else ():
            taken = old | bare | {n for (p, _), n in new.items() if p == prefix}
            drawn = (f"{rng.randrange(1, 10 ** len(digits)):0{len(digits)}}" for _ in range(1000))
            new[prefix, digits] = next((n for n in drawn if n not in taken), digits)
    if all(digits == number for (_, digits), number in new.items()):
        return None
    alone = {digits: number for (_, digits), number in new.items() if digits in sure}

    def rename(text: str) -> str:
        text = ID.sub(lambda m: m[1] + new.get((m[1], m[2]), m[2]), text)
        return BARE.sub(lambda m: alone.get(m[0], m[0]), text)

    return rename


def _data(checkout: Checkout, entry: Entry) -> dict[tuple[int, str], pathlib.Path]:
    """What each service of a task reads: (place of the service, variable) -> file or folder."""
    found = {}
    for place, service in enumerate(entry.definition.services):
        server = services.server(checkout, checkout.script(service))
        given = checkout.environment(entry, service)
        settings = server.settings(given) | server.stray(entry, given)
        for name, value in settings.items():
            path = pathlib.Path(str(value))
            if server.reads(name) and path.is_absolute() and path.is_relative_to(checkout.root) and path.exists():
                found[place, server.reads(name)] = path
    return found


def _graders(checkout: Checkout, folder: pathlib.Path) -> Iterator[str]:
    """The source of a task's grader, and of those that it builds on."""
    source = (folder / "grader.py").read_text(encoding="utf-8")
    yield source
    for peer in PEER.findall(source):
        yield from _graders(checkout, checkout.root / "tasks" / peer)


def _copy(checkout: Checkout, entry: Entry, target: pathlib.Path, rename: Rename, order: random.Random | None) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(p for p in entry.folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        _copy_file(path, target / path.relative_to(entry.folder), rename, order)
    _copy_grader(checkout, entry.folder, target, rename)
    task = yaml.safe_load((entry.folder / "task.yaml").read_text(encoding="utf-8"))
    for (place, variable), path in _data(checkout, entry).items():
        inside = path.relative_to(entry.folder) if path.is_relative_to(entry.folder) else None
        if inside is None:  # the data of another task
            inside = pathlib.Path("fixtures") / f"{task['services'][place]['name']}_{path.name}"
            _copy_file(path, target / inside, rename, order)
        task["services"][place].setdefault("env", {})[variable] = str(inside)
    text = rename(yaml.safe_dump(task, allow_unicode=True, sort_keys=False, width=120))
    head = f"task_id: {target.name}\nvariant_of: {entry.id}\n"
    body = re.sub(r"^task_id:.*\n", "", text, count=1, flags=re.MULTILINE)
    (target / "task.yaml").write_text(head + body, encoding="utf-8")


def _copy_file(source: pathlib.Path, target: pathlib.Path, rename: Rename, order: random.Random | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix not in TEXT:
        shutil.copyfile(source, target)
        return
    text = rename(source.read_text(encoding="utf-8"))
    if source.suffix == ".json" and order:
        data = json.loads(text)
        if isinstance(data, list):
            order.shuffle(data)
        text = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    target.write_text(text, encoding="utf-8")


def _copy_grader(checkout: Checkout, source: pathlib.Path, target: pathlib.Path, rename: Rename) -> None:
    """A grader with those that it builds on in `peers` beside it."""
    target.mkdir(parents=True, exist_ok=True)
    text = (source / "grader.py").read_text(encoding="utf-8")
    for peer in PEER.findall(text):
        _copy_grader(checkout, checkout.root / "tasks" / peer, target / "peers" / peer, rename)
    here = r'load_peer_grader("\1", tasks_dir=__import__("pathlib").Path(__file__).parent / "peers")'
    (target / "grader.py").write_text(PEER.sub(here, rename(text)), encoding="utf-8")


class _Trial(ClawEval):
    """Plays an entry that is not in the benchmark."""

    def _find(self, task: Task) -> Entry:
        return task.data["entry"]


async def _alike(checkout: Checkout, entry: Entry, variant: Entry, rename: Rename) -> bool:
    """Whether the same play, with the ids renamed, comes out alike in both, under both judges."""
    script = _script(checkout, entry)
    renamed = [(name, {k: rename(v) for k, v in arguments.items()}) for name, arguments in script]
    end = entry.definition.reference_solution
    for score in (0.0, 1.0):
        theirs = await _played(checkout, entry, script, end, score)
        ours = await _played(checkout, variant, renamed, rename(end), score)
        if theirs[0] != ours[0] or [_content(rename(b)) for b in theirs[1]] != [_content(b) for b in ours[1]]:
            return False
    return True


def _content(body: str) -> list[str]:
    """An answer without the order of its records: they were shuffled."""
    return sorted(body)


def _script(checkout: Checkout, entry: Entry) -> list[tuple[str, dict[str, Any]]]:
    """Calls of every tool that is not forbidden and needs nothing, or one id."""
    data = "\n".join(p.read_text(encoding="utf-8") for p in _data(checkout, entry).values() if p.suffix == ".json")
    ids = list(dict.fromkeys(m[0] for m in ID.finditer(data)))
    forbidden = {c.tool_name for c in entry.definition.safety_checks}
    script: list[tuple[str, dict[str, Any]]] = []
    for tool in entry.definition.tools:
        needed = tool.input_schema.get("required") or []
        if tool.name in forbidden or len(needed) > 1 or not all(n.endswith("id") for n in needed):
            continue  # a search for an id finds parts of it, in the original and in the variant others
        script += [(tool.name, {needed[0]: i}) for i in ids[:TRIED]] if needed else [(tool.name, {})]
    return script


async def _played(
    checkout: Checkout, entry: Entry, script: Sequence[tuple[str, dict[str, Any]]], end: str, score: float
) -> tuple[tuple[float, ...], list[str]]:
    """(completion, robustness, safety) and the answers of a play."""
    config = ClawEvalConfig(root=str(checkout.root), clock=REHEARSAL_CLOCK, repair=True)
    env = _Trial(config, entry.definition.environment.max_turns, ConstantAnswers(score))
    try:
        await env.reset(Task(entry.id, data={"entry": entry}))
        calls = tuple(ToolCall(name, arguments, f"c{i}") for i, (name, arguments) in enumerate(script))
        if calls:
            await env.step(AssistantTurn("", calls))
        await env.step(AssistantTurn(end))
        info = (await env.score()).info
        answers = [json.dumps(d.response_body, ensure_ascii=False) for d in env.dispatches]
        return (info["completion"], info["robustness"], info["safety"]), answers
    finally:
        await env.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the variants; returns 1 if a task has none."""
    parser = argparse.ArgumentParser(prog="python -m envs.claw_eval.variants", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the variants are written (env.variants)")
    parser.add_argument("--subset", required=True, help="file with the ids of the hard tasks (env.subset)")
    parser.add_argument("--count", type=int, default=8, help="variants of each task")
    parser.add_argument("--root", default="", help="checkout of Claw-Eval; else $CLAW_EVAL_ROOT")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        checkout = checkouts.load(given.root)
        hard = splits.subset(ClawEvalConfig(root=given.root, subset=given.subset), checkout.tasks())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.folder.mkdir(parents=True, exist_ok=True)
    missed = []
    for entry in hard.values():
        made = [n for n in range(1, given.count + 1) if write(checkout, entry, given.folder, given.seed, n)]
        print(f"{entry.id}: {len(made)} variants")
        missed += [entry.id] if not made else []
    if missed:
        print(f"no variant plays like these: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
