"""What a step and a run come to: success of the groups, the closing table, export and report."""

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.base import Task
from rti_jax import budget, runs
from rti_jax import config as config_lib
from rti_jax.disk import writing
from rti_jax.metrics import read_metrics
from rti_jax.types import SAMPLERS, Group, Status

SCORES = ("pass@1", "pass@4", "pass^4")


def group_metrics(groups: Sequence[Group], tasks: Sequence[Task]) -> dict[str, float]:
    """Success before any intervention, errors and lengths of a step's rollouts."""
    valid = [t for g in groups for t in g.valid]
    by_kind = collections.defaultdict(list)
    for task, group in zip(tasks, groups, strict=True):
        by_kind[task.kind] += [t.success for t in group.valid]
    statuses = collections.Counter(t.status for g in groups for t in g.trajectories)
    metrics = {
        "rollout/pre_success": _share([t.success for t in valid]),
        "rollout/pre_solved_groups": _share([any(t.success for t in g.valid) for g in groups]),
        "rollout/groups": len(groups),
        "rollout/groups_all_failed": sum(g.all_failed for g in groups),
        "rollout/groups_all_solved": sum(bool(g.valid) and all(t.success for t in g.valid) for g in groups),
        "rollout/turns": _share([len(t.turns) for t in valid]),
        "rollout/tokens": sum(len(turn.response_ids) for t in valid for turn in t.turns),
        "rollout/tool_calls": sum(len(m.get("tool_calls") or ()) for t in valid for m in t.messages),
    }
    metrics |= {f"rollout/pre_success_{kind}": _share(wins) for kind, wins in by_kind.items()}
    metrics |= {f"rollout/{s.value}": statuses[s] for s in Status if s not in (Status.SUCCESS, Status.FAILURE)}
    return {name: float(value) for name, value in metrics.items()}


def after(groups: Sequence[Group]) -> dict[str, float]:
    """Success of the groups that are trained, admitted trajectories included."""
    valid = [t.success for g in groups for t in g.valid]
    solved = [any(t.success for t in g.valid) for g in groups]
    return {"rollout/post_success": _share(valid), "rollout/post_solved_groups": _share(solved)}


def sampled_tokens(metrics: Mapping[str, float]) -> float:
    """All tokens that a step sampled: rollouts, intervened episodes and roles (those behind an endpoint excepted)."""
    return metrics["rollout/tokens"] + sum(metrics.get(f"rti/{role}_tokens", 0.0) for role in SAMPLERS)


def first_error(groups: Sequence[Group]) -> str:
    """What the first broken episode said."""
    broken = (t for g in groups for t in g.trajectories if not t.valid)
    return next((f"{t.status}: {t.info.get('error', 'no reason given')}" for t in broken), "no episode was played")


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def export(folder: pathlib.Path, learner: Any) -> None:
    """Writes the learner's policy as a Hugging Face folder."""
    from models import hf

    with writing(folder):
        hf.save(learner.policy.model, learner.state.params, folder)


def write_report(run: runs.Run) -> None:
    """Writes report.html."""
    from rti_jax import report

    report.main([run.folder])


def best_step(run: runs.Run) -> int:
    """The step of the evaluation with the highest Pass@1 over all tasks, the earlier one of equals."""
    scores = {}
    for path in sorted((run.folder / "evals").glob("step_*.json")):
        result = json.loads(path.read_text())
        scores[result["step"]] = result["kinds"]["all"]["pass@1"]["mean"] or 0.0
    return max(scores, key=lambda step: (scores[step], -step))


def score_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Pass@k and Pass^k by kind of task; one column per result (e.g. before, after)."""
    table = Table()
    table.add_column("held-out tasks")
    table.add_column("score")
    for name in results:
        table.add_column(name or "value", justify="right")
    kinds = next(iter(results.values()))["kinds"]
    for kind, scores in kinds.items():
        if kind == "all" and len(kinds) == 2:
            continue
        for i, score in enumerate(s for s in SCORES if s in scores):
            cells = [percent(r["kinds"].get(kind, {}).get(score)) for r in results.values()]
            excluded = f", {scores['excluded']} episodes excluded" if scores["excluded"] else ""
            table.add_row(f"{kind} ({scores['tasks']}{excluded})" if not i else "", score, *cells)
    return table


def percent(estimate: Mapping[str, float] | None) -> str:
    """An estimate with its interval."""
    if not estimate or estimate["mean"] is None:
        return "-"
    return f"{100 * estimate['mean']:.1f}  [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def finished(run: runs.Run, config: config_lib.Config) -> str:
    """The closing text of a run: what changed, what the intervention did, and what to type next."""
    console = Console(width=100, record=True, file=_Nowhere())
    step, spent = budget.end(config, run.folder)
    files = {"before": run.evaluation(0), "after": run.evaluation(step)}
    results = {name: json.loads(path.read_text()) for name, path in files.items() if path.is_file()}
    console.print(
        f"[bold]{run.folder}[/bold]: {step} steps are done. Percent, with 95% intervals over tasks:", soft_wrap=True
    )
    if results:
        console.print(score_table(results))
    console.print(_ledger(run.folder / "metrics.jsonl", config))
    following = (
        f"rti train {run.config} name={config.name}_grpo rti.enabled=false    (the same budget without intervention)"
        if config.rti.enabled
        else f"rti report {run.folder} {run.folder.parent}/OTHER --output both.html    (two runs side by side)"
    )
    console.print(
        f"Look at {run.report} in a browser; {run.export} is a Hugging Face folder for transformers and vLLM.\n"
        f"Next: {following}\n" + _ending(run, config, spent),
        soft_wrap=True,  # commands and paths stay whole
    )
    return console.export_text()


def _ending(run: runs.Run, config: config_lib.Config, spent: str) -> str:
    """Why the run ended and how it goes on."""
    if spent:
        return (
            f"{spent} ended this run before its {config.steps} steps were done. The same command goes on with a larger "
            f"{spent.partition('=')[0]}, or null for none."
        )
    return (
        f"This run is complete: more steps with steps={2 * config.steps}, anew with name=another, or remove "
        f"{run.folder}."
    )


def _ledger(metrics: pathlib.Path, config: config_lib.Config) -> str:
    """One line on what the groups did, one on what the intervention or a teacher did."""
    totals: collections.Counter[str] = collections.Counter()
    for line in read_metrics(metrics):
        totals.update({k: v for k, v in line.items() if isinstance(v, int | float)})
    text = f"{totals['rollout/groups_all_failed']:.0f} of {totals['rollout/groups']:.0f} groups failed entirely."
    if config.loss.baseline == "luffy":
        failed, taught = totals["teacher/groups_triggered"], totals["teacher/replaced"]
        return f"{text} The teacher's rollouts replaced a member in {taught:.0f} of these {failed:.0f}."
    if config.loss.baseline == "opd":
        return f"{text} Every token was trained towards the teacher; rewards played no part."
    if not config.rti.enabled:
        return text + " No intervention (rti.enabled=false)."
    return (
        f"{text} Interventions: {totals['rti/attempts']:.0f} episodes tried, {totals['rti/turns_flagged']:.0f} turns "
        f"flagged, {totals['rti/accepted']:.0f} of {totals['rti/proposals']:.0f} corrections accepted, "
        f"{totals['rti/successes']:.0f} episodes succeeded, {totals['rti/replaced']:.0f} admitted to their group."
    )


class _Nowhere:
    """A file that keeps nothing: the console records its own text."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
