"""What an evaluation says of its numbers: a table of splits, the tasks from the worst on, and files of them."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rti_jax import summary
from rti_jax.config import ConfigError

UNION = "full"  # the row of all splits together
SHOWN = 10  # tasks that are printed unless all are asked for
WIDTH = 120  # of tables in a file or a pipe
COLUMNS = ("task", "kind", "splits", "c", "n", "excluded", "turns")
TABLES = (".csv", ".md")


def show(result: Mapping[str, Any], every_task: bool = False) -> None:
    """Prints splits, where there are several, kinds, and the worst tasks (or all)."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if "splits" in result:
        console.print(split_table(result))
    if "splits" not in result or len(result["kinds"]) > 2:
        console.print(summary.score_table({"": result}))
    console.print(task_table(result, None if every_task else SHOWN))


def split_table(result: Mapping[str, Any]) -> Table:
    """A row for each split and one for their union; percent, with 95% intervals over tasks."""
    k = result["trials"]
    scores = {"pass@1": "Pass@1"}
    if k > 1:
        scores |= {f"pass@{k}": f"Pass@{k}", f"pass^{k}": f"Pass^{k}", "pass^mean": f"mean Pass^1..{k}"}
    table = Table("split", "tasks", "excluded", title="percent, 95% intervals over tasks")
    for name in scores.values():
        table.add_column(name, justify="right", no_wrap=True)
    for name, values in result["splits"].items():
        cells = [summary.percent(values[score]) for score in scores]
        table.add_row(escape(name), str(values["tasks"]), str(values["excluded"]), *cells)
    return table


def worst_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By success rate, tasks without a valid episode at the end."""
    return sorted(rows, key=lambda r: (not r["n"], r["c"] / max(1, r["n"]), r["task"]))


def task_table(result: Mapping[str, Any], limit: int | None) -> Table:
    """The tasks, worst first, at most `limit`."""
    rows = worst_first(result["tasks"])
    shown = rows[:limit]
    title = f"worst {len(shown)} of {len(rows)} tasks (--per-task prints all)" if len(shown) < len(rows) else "tasks"
    table = Table("task", "kind", "won", "excluded", "turns", title=title)
    for r in shown:
        turns = "-" if r["turns"] is None else f"{r['turns']:.1f}"
        table.add_row(escape(r["task"]), escape(r["kind"]), f"{r['c']} of {r['n']}", str(r["excluded"]), turns)
    return table


def check_table(path: pathlib.Path) -> None:
    """Raises ConfigError for a name that says neither of the formats."""
    if path.suffix not in TABLES:
        raise ConfigError(f"--table {path}: expected a name that ends in {' or '.join(TABLES)}")


def write_table(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """All tasks, worst first, as CSV or Markdown by the name's ending."""
    check_table(path)
    names = [c for c in COLUMNS if c != "splits" or "splits" in result]
    rows = [[_plain(r[name]) for name in names] for r in worst_first(result["tasks"])]
    out = io.StringIO()
    if path.suffix == ".csv":
        csv.writer(out, lineterminator="\n").writerows([names, *rows])
    else:
        lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
        out.writelines("| " + " | ".join(line) + " |\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(out.getvalue(), encoding="utf-8")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(value)
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
