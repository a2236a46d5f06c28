"""`rti report RUN...`: one or several runs as one HTML file that needs no network.

    rti report runs/quickstart                                     writes runs/quickstart/report.html
    rti report runs/quickstart runs/quickstart_grpo --output a.html    compares

Held-out scores before and after, curves of a step's metrics (one line a run), what the intervention did, and the
config. A run that is still going, or that has lost files, is shown as far as it has got.
"""

import dataclasses
import fnmatch
import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rti_jax import charts, metric_names, metrics
from rti_jax.config import ConfigError

SCORES = ("pass@1", "pass@4", "pass^4")

# Curves, in this order where a run has them; the last ones are folded away.
CURVES = (
    "rollout/pre_success",
    "rollout/pre_success_*",
    "rollout/post_success",
    "rollout/groups_all_failed",
    "rti/replaced",
    "rti/perplexity_before_gate",
    "rti/perplexity_admitted",
    "reweight/mean_edited",
    "corrector/token_share",
    "loss/total",
    "optimizer/grad_norm",
    "policy/entropy",
    "mismatch/max",
    "mismatch/after_max",
    "rollout/turns",
)

# The ledger: what became of the groups and of the interventions, from first to last.
LEDGER = (
    "rollout/groups",
    "rollout/groups_all_failed",
    "rti/attempts",
    "rti/turns_validated",
    "rti/turns_flagged",
    "rti/validator_unreadable",
    "rti/proposals",
    "rti/rejected_*",
    "rti/accepted",
    "rti/successes",
    "rti/successes_uncorrected",
    "rti/gate_rejected",
    "rti/gate_admitted",
    "rti/replaced",
)

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: .5rem; } .charts svg { width: 24rem; height: auto; }
.muted { color: #777; } pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 12px; }
"""


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run folder holds; empty where something is missing.

    Attributes:
      evaluations: by step, as evals/ has them. notes: in a line each, what is missing or unreadable.
    """

    name: str
    folder: pathlib.Path
    lines: Sequence[Mapping[str, Any]]
    evaluations: Mapping[int, Mapping[str, Any]]
    config: str
    notes: Sequence[str]


def main(runs: Sequence[pathlib.Path], output: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page and returns its path; default is report.html in the first run.

    Raises:
      ConfigError: a folder that is no run, no folder, or an output that is no page.
    """
    if not runs:
        raise ConfigError("name at least one run folder, e.g. runs/quickstart")
    output = pathlib.Path(output) if output else pathlib.Path(runs[0]) / "report.html"
    if output.suffix.lower() not in (".html", ".htm") or output.is_dir():  # never a run's own files
        raise ConfigError(f"--output {output}: expected the name of a file that ends in .html")
    data = _named_apart([read_run(pathlib.Path(run)) for run in runs])
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(page(data), encoding="utf-8")
    partial.replace(output)
    return output


def read_run(folder: pathlib.Path) -> RunData:
    """Everything of a run that a report shows."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: it does not exist")
    lines = metrics.read_metrics(folder / "metrics.jsonl")
    evaluations, notes = _evaluations(folder / "evals")
    config_file = folder / "config.yaml"
    if not config_file.is_file() and not lines and not evaluations:
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml, metrics.jsonl or evals/")
    config = config_file.read_text(encoding="utf-8", errors="replace") if config_file.is_file() else ""
    notes += [] if lines else ["no step has been recorded yet"]
    notes += [] if config else ["config.yaml is missing"]
    return RunData(folder.resolve().name, folder, lines, evaluations, config, notes)


def _evaluations(folder: pathlib.Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Evaluations of a run's own steps, and files that could not be read."""
    found, notes = {}, []
    for path in sorted(folder.glob("step_*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            found[int(result["step"])] = {kind: dict(scores) for kind, scores in result["kinds"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            notes.append(f"evals/{path.name} cannot be read")
    return dict(sorted(found.items())), notes


def _named_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs of one name in different folders get their path as name."""
    names = [r.name for r in runs]
    return [dataclasses.replace(r, name=str(r.folder)) if names.count(r.name) > 1 else r for r in runs]


def page(runs: Sequence[RunData]) -> str:
    """The HTML text. Everything that comes from files is escaped."""
    title = "rti-jax: " + ", ".join(r.name for r in runs)
    sections = [
        f"<h1>{_text(title)}</h1>",
        *(f'<p class="muted">{_text(f"{r.name}: {note}")}</p>' for r in runs for note in r.notes),
        *_section("Held-out scores, percent, with 95% intervals over tasks", scores_table(runs)),
        *_section("Over training", curves(runs)),
        *_section("What the intervention did, sums over all steps", ledger_table(runs)),
        *(f"<details><summary>Config of {_text(r.name)}</summary><pre>{_text(r.config)}</pre></details>" for r in runs),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _section(title: str, body: str) -> list[str]:
    return [f"<h2>{_text(title)}</h2>", body] if body else []


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>" if body else ""


def scores_table(runs: Sequence[RunData]) -> str:
    """A row for each kind of task and score; for each run its first and its last evaluation."""
    columns = []
    for run in runs:
        ends = dict.fromkeys((min(run.evaluations), max(run.evaluations))) if run.evaluations else ()
        columns += [(f"{run.name}, step {step}", run.evaluations[step]) for step in ends]
    kinds = dict.fromkeys(kind for _, result in columns for kind in result)
    if len(kinds) == 2:  # a single kind: "all" says the same
        kinds.pop("all", None)
    rows = []
    for kind in kinds:
        for score in SCORES:
            cells = [_estimate(result.get(kind, {}).get(score)) for _, result in columns]
            if any(cell != "-" for cell in cells):
                rows.append([f"{kind}, {score.replace('pass', 'Pass')}", *cells])
    return _table(["tasks", *(name for name, _ in columns)], rows)


def _estimate(value: Any) -> str:
    if not isinstance(value, Mapping) or value.get("mean") is None:
        return "-"
    return f"{100 * value['mean']:.1f} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"


def matching(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Names in the order of the patterns that they match; each once."""
    names = sorted(set(names))
    return list(dict.fromkeys(n for pattern in patterns for n in names if fnmatch.fnmatchcase(n, pattern)))


def curves(runs: Sequence[RunData]) -> str:
    """One chart for each metric with a line for each run: held-out success first, the less watched ones folded away."""
    names = {n for r in runs for line in r.lines for n in line if n != "step"}
    main_names = matching(CURVES, names)
    shown = [*evaluation_charts(runs), *filter(None, (metric_chart(runs, n) for n in main_names))]
    others = [*filter(None, (metric_chart(runs, n) for n in sorted(names - set(main_names))))]
    text = f'<div class="charts">{"".join(shown)}</div>' if shown else ""
    if others:
        text += f'<details><summary>All other metrics</summary><div class="charts">{"".join(others)}</div></details>'
    return text


def evaluation_charts(runs: Sequence[RunData]) -> list[str]:
    """Held-out Pass@1 over steps for each kind of task."""
    kinds = dict.fromkeys(kind for r in runs for result in r.evaluations.values() for kind in result)
    found = []
    for kind in kinds:
        series = {}
        for run in runs:
            values = {step: e.get(kind, {}).get("pass@1", {}).get("mean") for step, e in run.evaluations.items()}
            series[run.name] = [(step, value) for step, value in values.items() if value is not None]
        if any(len(points) > 1 for points in series.values()):
            found.append(charts.line_chart(_nonempty(series), f"held-out Pass@1, {kind}"))
    return found


def metric_chart(runs: Sequence[RunData], name: str) -> str:
    """Empty if no run has a number."""
    series = {
        r.name: [(line["step"], line[name]) for line in r.lines if isinstance(line.get(name), int | float)]
        for r in runs
    }
    series = _nonempty(series)
    tooltip = _text(metric_names.meaning(name) or "")
    return f'<div title="{tooltip}">{charts.line_chart(series, name)}</div>' if series else ""


def _nonempty(series: charts.Series) -> dict[str, Sequence[tuple[float, float]]]:
    return {label: points for label, points in series.items() if points}


def ledger_table(runs: Sequence[RunData]) -> str:
    """Sums of the intervention's counters, with what each counts; a run without intervention has dashes."""
    rows = []
    for name in matching(LEDGER, (n for r in runs for line in r.lines for n in line)):
        sums = []
        for run in runs:
            values = [line[name] for line in run.lines if isinstance(line.get(name), int | float)]
            sums.append(f"{sum(values):.0f}" if values else "-")
        rows.append([metric_names.meaning(name) or name, *sums])
    return _table(["", *(r.name for r in runs)], rows)
