"""Tables, curves and claims of a study, as Markdown, SVG and JSON."""

import collections
import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

import markdown_it
import numpy as np

from rti_jax import charts, claims, report
from rti_jax.statistics import Estimate, grid_interval
from rti_jax.study_results import MissingError, Results

COSTS = {
    "updates": "optimizer/updates",
    "sampled tokens": "rollout/sampled_tokens",
    "intervened episodes": "rti/attempts",
    "admitted": "rti/replaced",
    "rejected by the gate": "rti/gate_rejected",
    "trained corrections that reveal something": "rti/admitted_revealing",
}
CURVES = {  # metric -> title; drawn for each group of arms that has it
    "rollout/pre_success": "success before intervention, training tasks",
    "rti/perplexity_before_gate": "perplexity of corrected steps",
    "rollout/turns": "mean turns of an episode, training tasks",
}


def task_sets(results: Results) -> list[str]:
    """Names of the task sets of a study: each kind of the first split, all of it, the other splits."""
    run = next(iter(results.runs.values()))
    first, *others = run.splits
    return [*sorted({r["kind"] for r in run.splits[first]}), "all", *others]


def measures(results: Results) -> list[str]:
    trials = min(r.trials for r in results.runs.values())
    return [f"{kind}{k}" for kind in ("pass@", "pass^") for k in (*range(1, trials + 1), "")]


def scores(results: Results) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Task set -> arm -> measure -> estimate."""
    return {
        tasks: {
            arm: {m: grid_interval(results.values(arm, tasks, m)) for m in measures(results)} for arm in results.arms
        }
        for tasks in task_sets(results)
    }


def differences(results: Results, reference: str) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Arm -> task set -> measure -> estimate of arm - reference, paired by task and seed."""
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for arm in results.arms:
        if arm == reference or reference not in results.arms:
            continue
        try:
            seeds = results.seeds(arm, reference)
        except MissingError:  # no seed in common yet
            continue
        minus = lambda t, m, a=arm, s=seeds: results.values(a, t, m, s) - results.values(reference, t, m, s)  # noqa: E731
        kept = ("pass@1", "pass@", "pass^")
        found[arm] = {t: {m: grid_interval(minus(t, m)) for m in kept} for t in task_sets(results)}
    return found


def tables(results: Results, reference: str) -> str:
    """All tables as Markdown."""
    if not results.runs:
        return "No run is finished.\n"
    lines: list[str] = []
    for tasks, arms in scores(results).items():
        count = results.values(results.arms[0], tasks, "pass@1").shape[1]
        lines += [f"### Held-out tasks: {tasks} ({count})", ""]
        head = ["arm", "seeds", *(claims.label(m) for m in measures(results))]
        lines += markdown(head, [[a, _count(results, a), *map(cell, e.values())] for a, e in arms.items()]) + [""]
    by_arm = differences(results, reference)
    if by_arm:
        lines += [f"### Differences from {reference}, paired by task and seed", ""]
        columns = [(t, m) for t in task_sets(results) for m in ("pass@1", "pass@", "pass^")]
        head = ["arm", "seeds", *(f"{t}, {claims.label(m)}" for t, m in columns)]
        rows = [
            [arm, len(results.seeds(arm, reference)), *(cell(found[t][m], signed=True) for t, m in columns)]
            for arm, found in by_arm.items()
        ]
        lines += markdown(head, rows) + [""]
    lines += ["### What it took, mean of a run", ""]
    lines += markdown(["arm", *COSTS], [[a, *_costs(results, a)] for a in results.arms]) + [""]
    if gate := _gate(results):
        head = ["arm", "delta", "corrected successes", "rejected", "perplexity", "highest of a step", "Pass@1, all"]
        lines += ["### The gate: corrected turns of successes, before it; sums and means over steps and seeds", ""]
        lines += markdown([*head, "average Pass^k, all"], gate) + [""]
    lines += ["### Turns of held-out episodes after training, percent", ""]
    lines += _turns(results)
    return "\n".join(lines) + "\n"


def _count(results: Results, arm: str) -> int:
    return len(results.seeds(arm))


def _costs(results: Results, arm: str) -> list[str]:
    runs = results.of(arm)
    return [f"{sum(r.total(metric) for r in runs) / len(runs):,.0f}" for metric in COSTS.values()]


def _gate(results: Results) -> list[list[Any]]:
    """A row for each arm with an intervention, by threshold."""
    rows = []
    for arm in results.arms:
        runs = results.of(arm)
        if runs[0].delta is None:
            continue
        rejected, admitted = (sum(r.total(f"rti/gate_{x}") for r in runs) for x in ("rejected", "admitted"))
        try:
            values = results.series(arm, "rti/perplexity_before_gate")
            perplexity = [f"{np.nanmean(values):.2f}", f"{np.nanmax(values):.2f}"]
        except MissingError:
            perplexity = ["-", "-"]
        ends = [cell(grid_interval(results.values(arm, "all", m))) for m in ("pass@1", "pass^")]
        rows.append(
            (
                runs[0].delta,
                [arm, f"{runs[0].delta:g}", f"{rejected + admitted:.0f}", f"{rejected:.0f}", *perplexity, *ends],
            )
        )
    return [row for _, row in sorted(rows, key=lambda r: r[0])]


def _turns(results: Results) -> list[str]:
    counts = {}
    for arm in results.arms:
        rows = [row for run in results.of(arm) for row in run.rows("all")]
        counts[arm] = collections.Counter(t for row in rows for t in row["turns_each"])
    longest = max((t for c in counts.values() for t in c), default=0)
    rows = [[a, *(f"{100 * c[t] / max(1, c.total()):.1f}" for t in range(1, longest + 1))] for a, c in counts.items()]
    return markdown(["arm", *range(1, longest + 1)], rows)


def claims_text(verdicts: Sequence[claims.Verdict], notes: Mapping[str, str]) -> str:
    """A section's worth of lines: a table of all claims, then the numbers of each.

    Args:
      notes: claim -> an explanation written after the run, printed as it is.
    """
    tally = collections.Counter(v.verdict for v in verdicts)
    order = (claims.HOLDS, claims.FAILS, claims.OPEN, claims.NOT_RUN)
    lines = [", ".join(f"{tally[word]} {word}" for word in order if tally[word]) + ".", ""]
    rows = [[v.claim.text, v.claim.paper, v.verdict] for v in verdicts]
    lines += markdown(["claim", "the paper", "here"], rows, numbers=False)
    for v in verdicts:
        lines += ["", f"**{v.claim.text}: {v.verdict}.**"]
        lines += [f"- {finding}" for finding in v.findings]
        lines += [f"- {v.remark}"] if v.remark else []
        lines += [f"- {notes[v.claim.id]}"] if v.claim.id in notes else []
    return "\n".join(lines) + "\n"


def curves(results: Results, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name -> SVG: pre- and post-intervention group success, then for each group of arms the curves over training.

    Lines are means over seeds. Charts without a number are left out.
    """
    found = {}
    for arm in ("rti",):
        sides = {side: _metric(results, arm, f"rollout/{side}_solved_groups") for side in ("pre", "post")}
        grpo = _metric(results, "grpo", "rollout/pre_solved_groups")
        series = {f"{arm}, {side} intervention": line for side, line in sides.items()} | {"grpo": grpo}
        _draw(found, "group_success", series, "groups with a success (Pass@8)")
    for title, arms in groups.items():
        name = title.replace(" ", "_")
        for tasks in ("hard", "easy"):
            for measure in ("pass@1", "pass@4"):
                series = {arm: _held_out(results, arm, tasks, measure) for arm in arms}
                key = f"{name}_{tasks}_{measure.replace('@', '_at_')}"
                _draw(found, key, series, f"held-out {claims.label(measure)}, {tasks}: {title}")
        for metric, what in CURVES.items():
            series = {arm: _metric(results, arm, metric) for arm in arms}
            _draw(found, f"{name}_{metric.split('/')[1]}", series, f"{what}: {title}")
    return found


def _draw(found: dict[str, str], name: str, series: Mapping[str, list], title: str) -> None:
    if series := {label: points for label, points in series.items() if points}:
        found[name] = charts.line_chart(series, title)


def _metric(results: Results, arm: str, metric: str) -> list[tuple[float, float]]:
    try:
        values = results.series(arm, metric)
    except MissingError:
        return []
    known = np.isfinite(values).any(axis=0)
    return [(i + 1, float(np.nanmean(values[:, i]))) for i in np.flatnonzero(known)]


def _held_out(results: Results, arm: str, tasks: str, measure: str) -> list[tuple[float, float]]:
    if arm not in results.arms:
        return []
    found = results.held_out(arm, tasks, measure)
    return [(step, float(np.nanmean(values))) for step, values in found.items() if np.isfinite(values).any()]


def as_json(results: Results, verdicts: Sequence[claims.Verdict], reference: str) -> dict[str, Any]:
    """Everything that the tables and claims show, as JSON values."""
    plain = lambda tree: {k: plain(v) if isinstance(v, dict) else dataclasses.asdict(v) for k, v in tree.items()}  # noqa: E731
    return {
        "arms": {
            arm: {"seeds": results.seeds(arm), "sums": dict(zip(COSTS, _costs(results, arm), strict=True))}
            for arm in results.arms
        },
        "scores": plain(scores(results)) if results.runs else {},
        "differences": {"reference": reference, "arms": plain(differences(results, reference))},
        "claims": [
            {
                "id": v.claim.id,
                "text": v.claim.text,
                "paper": v.claim.paper,
                "verdict": v.verdict,
                "findings": [{"what": f.what, **dataclasses.asdict(f.estimate)} for f in v.findings],
                "remark": v.remark,
            }
            for v in verdicts
        ],
    }


def cell(estimate: Estimate, signed: bool = False) -> str:
    """Percent with the interval."""
    if estimate.mean is None:
        return "-"
    sign = "+" if signed else ""
    return "{:{s}.1f} [{:{s}.1f}, {:{s}.1f}]".format(
        *(100 * x for x in (estimate.mean, estimate.low, estimate.high)), s=sign
    )


def markdown(head: Sequence[Any], rows: Sequence[Sequence[Any]], *, numbers: bool = True) -> list[str]:
    """Lines of a table; `numbers` stand right, but for the first column."""
    align = [":---", *["---:" if numbers else ":---"] * (len(head) - 1)]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in r) + " |" for r in (head, align, *rows)]


INTRODUCTION = """# The paper's orderings in miniature

Written by `rti reproduce`. A million-parameter policy on two or three places a task, instead of 8B parameters on three
to nine: what is compared is the order of methods, not a number. Seeds, budgets and tests were fixed before the runs;
every setting but the arm's own is the same in all arms. An arm that was added after a look at results says so in its
config, and no claim uses it. Scores are percent with 95% intervals: tasks and seeds are
resampled together (with one seed: tasks), and few seeds make such an interval rather too narrow. A claim *holds* if the
whole interval of every difference it needs lies above zero, *does not hold* if one lies below, else it is *not
distinguishable*. Of so many claims one in forty would be decided wrongly by chance.
"""


def document(sections: Mapping[str, str], images: Mapping[str, str]) -> str:
    """The page for docs/. Images: name -> path relative to it."""
    pictures = "\n".join(f"![{name.replace('_', ' ')}]({path})" for name, path in images.items())
    return (
        f"{INTRODUCTION}\n## How\n\n{sections['how']}\n## Claims\n\n{sections['claims']}\n"
        f"## Tables\n\n{sections['tables']}\n## Over training\n\nMeans over seeds.\n\n{pictures}\n"
    )


WIDE_TABLES = "table { display: block; overflow-x: auto; } [style*=right] { white-space: nowrap; }\n"


def page(title: str, sections: Mapping[str, str], curves: Mapping[str, str]) -> str:
    """The same as one HTML file that needs no network."""
    render = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table").render
    text = "".join(f"<h2>{html.escape(name.capitalize())}</h2>\n{render(body)}" for name, body in sections.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{report.STYLE}{WIDE_TABLES}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f'{text}<h2>Over training</h2><p>Means over seeds.</p><div class="charts">{"".join(curves.values())}</div>\n'
        "</body></html>\n"
    )
