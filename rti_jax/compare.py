"""`rti compare A B`: two evaluations on the same tasks, paired, with intervals.

    rti compare runs/quickstart_grpo runs/quickstart                 the newest evaluation of two runs
    rti compare runs/quickstart/evals/step_000000.json after.json    two files of `rti eval`
    rti compare 'runs/grpo_seed*' 'runs/rti_seed*' --step 24         several seeds on either side

Several evaluations of one side are pooled task by task. A task's difference is that of its two success rates; the
interval resamples tasks, so it says how far the difference holds for other tasks of the kind. With several seeds it is
also given for each pair, in order.
"""

import glob
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rti_jax.config import ConfigError
from rti_jax.statistics import Estimate, mean_interval, paired_difference


def main(first: str, second: str, step: int | None = None, output: pathlib.Path | None = None) -> int:
    """Prints the table; returns the exit code.

    Args:
      first, second: a JSON file of an evaluation, a run folder, or a quoted pattern of either.
      step: which evaluation of a run folder; None is the newest.
      output: also written there as JSON.

    Raises:
      ConfigError: nothing found, no evaluation, or tasks that are not the same.
    """
    sides = [[load(path, step) for path in paths(side)] for side in (first, second)]
    result = compare(*sides)
    names = [", ".join(str(e["path"]) for e in side) for side in sides]
    console = Console(width=120)
    console.print(f"A: {names[0]}\nB: {names[1]}", highlight=False)
    console.print(_table(result))
    if output:
        output.write_text(json.dumps({"a": names[0], "b": names[1], **result}, indent=1) + "\n")
    return 0


def paths(side: str) -> list[pathlib.Path]:
    """The files or folders that an argument names. Raises ConfigError for none."""
    found = sorted(glob.glob(side)) or ([side] if pathlib.Path(side).exists() else [])
    if not found:
        raise ConfigError(f"{side}: there is no such file or folder")
    return [pathlib.Path(p) for p in found]


def load(path: pathlib.Path, step: int | None = None) -> dict[str, Any]:
    """An evaluation: {"path", "tasks": {id: (kind, successes, trials)}, "splits": {split: ids}}; splits of several."""
    if path.is_dir():
        evaluations = sorted((path / "evals").glob("step_*.json"))
        wanted = [e for e in evaluations if step is None or e.stem == f"step_{step:06d}"]
        if not wanted:
            have = ", ".join(e.stem.removeprefix("step_").lstrip("0") or "0" for e in evaluations)
            which = "evaluation" if step is None else f"evaluation after {step} steps"
            raise ConfigError(f"{path} has no {which}" + (f"; there are those after {have}" if have else ""))
        path = wanted[-1]
    try:
        data = json.loads(path.read_text())
        tasks = {t["task"]: (t["kind"], t["c"], t["n"]) for t in data["tasks"]}
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no evaluation of `rti eval` or `rti train`") from error
    splits: dict[str, list[str]] = {}
    for row in data["tasks"]:
        for name in row.get("splits", ()):
            splits.setdefault(name, []).append(row["task"])
    return {"path": path, "tasks": tasks, "splits": splits}


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pass@1 of both sides and their difference B - A by kind of task, and by split if both have the same several;
    `pairs` has the differences of each pair.

    Raises:
      ConfigError: the evaluations are not of the same tasks.
    """
    tasks = first[0]["tasks"]
    for evaluation in (*first, *second):
        if evaluation["tasks"].keys() != tasks.keys():
            odd = sorted(evaluation["tasks"].keys() ^ tasks.keys())[0]
            raise ConfigError(f"{evaluation['path']} and {first[0]['path']} are of different tasks, e.g. {odd}")
    kinds = sorted({kind for kind, _, _ in tasks.values()})
    selections = {"all": list(tasks)} | {k: [t for t in tasks if tasks[t][0] == k] for k in kinds}
    if len(kinds) == 1:
        del selections[kinds[0]]
    if all(e["splits"] == first[0]["splits"] for e in (*first, *second)):
        selections |= {f"split {name}": ids for name, ids in first[0]["splits"].items()}
    return {"kinds": {kind: _difference(first, second, ids) for kind, ids in selections.items()}}


def _difference(first, second, ids: Sequence[str]) -> dict[str, Any]:
    """Tasks without a valid trial on one of the sides are left out and counted."""
    whole, left_out = _paired(first, second, ids)
    result = {"a": mean_interval([a for a, _ in whole]), "b": mean_interval([b for _, b in whole])}
    result["difference"] = paired_difference(*zip(*whole, strict=True)) if whole else Estimate(None, None, None, 0)
    pairs = []
    if len(first) == len(second) > 1:
        pairs = [
            paired_difference(*zip(*_paired([a], [b], ids)[0], strict=True)) for a, b in zip(first, second, strict=True)
        ]
    plain = {name: vars(value) for name, value in result.items()}
    return plain | {"left_out": left_out, "pairs": [vars(p) for p in pairs]}


def _paired(first, second, ids: Sequence[str]) -> tuple[list[tuple[float, float]], int]:
    """Success rates (A, B) of each task over all evaluations of a side, and how many tasks have none."""

    def rate(side, task: str) -> float | None:
        trials = sum(e["tasks"][task][2] for e in side)
        return sum(e["tasks"][task][1] for e in side) / trials if trials else None

    both = [(rate(first, t), rate(second, t)) for t in ids]
    whole = [(a, b) for a, b in both if a is not None and b is not None]
    return whole, len(both) - len(whole)


def _table(result: dict[str, Any]) -> Table:
    table = Table("tasks", "A", "B", "B - A", "each pair", title="Pass@1 in percent, 95% intervals over tasks")
    for kind, values in result["kinds"].items():
        left_out = f", {values['left_out']} left out" if values["left_out"] else ""
        pairs = "  ".join(f"{100 * p['mean']:+.1f}" for p in values["pairs"]) or "-"
        cells = (_cell(values[k], k == "difference") for k in ("a", "b", "difference"))
        table.add_row(f"{kind} ({values['difference']['tasks']}{left_out})", *cells, pairs)
    return table


def _cell(estimate: dict[str, Any], signed: bool) -> str:
    if estimate["mean"] is None:
        return "-"
    sign = "+" if signed else ""
    return "{:{s}.1f}  [{:{s}.1f}, {:{s}.1f}]".format(*(100 * estimate[k] for k in ("mean", "low", "high")), s=sign)
