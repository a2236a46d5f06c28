"""RTI against GRPO in miniature over seeds, and against controls that take a role away.

    python benchmarks/effect_over_seeds.py                     seeds 0 1 2 of both methods, the controls with seed 0
    python benchmarks/effect_over_seeds.py --seeds 0 --only rti grpo

Every arm is `rti train configs/quickstart.yaml` with the overrides below, so each can be typed by hand, goes on where
it was interrupted, and is not run again when it is complete. GRPO gets more updates than RTI, so that it can be
compared at equal updates and at equal sampled tokens (those of intervened episodes and of the roles count for RTI).
Two cores: about six minutes a run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

from rti_jax import compare
from rti_jax.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMON = ["eval.every=20", "eval.limit=null"]
ARMS: dict[str, list[str]] = {
    "rti": ["eval.roles=100"],
    "grpo": ["rti.enabled=false", "steps=48"],
    "always_invalid": ["rti.control=always_invalid", "steps=20"],
    "never_invalid": ["rti.control=never_invalid", "steps=20"],
    "always_accept": ["rti.control=always_accept", "steps=20"],
    "swapped_evidence": ["rti.control=swapped_evidence", "steps=20"],
}
CONTROLS = tuple(ARMS)[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--runs", default="runs/effect", help="where the run folders are")
    parser.add_argument("overrides", nargs="*", help="more keys, for all arms")
    given = parser.parse_args()
    for seed in given.seeds:
        for arm in given.only:
            if arm not in CONTROLS or seed == given.seeds[0]:
                train(given.runs, arm, seed, given.overrides)
    text, data = report(pathlib.Path(given.runs), given.seeds)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "effect_over_seeds.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "effect_over_seeds.md").write_text(text)


def train(runs: str, arm: str, seed: int, overrides: list[str]) -> None:
    keys = [f"runs_dir={runs}", f"name={arm}_seed{seed}", f"seed={seed}", *COMMON, *ARMS[arm], *overrides]
    subprocess.run(
        [sys.executable, "-m", "rti_jax.cli", "train", "configs/quickstart.yaml", *keys], cwd=ROOT, check=True
    )


def report(runs: pathlib.Path, seeds: list[int]) -> tuple[str, dict[str, Any]]:
    """The tables as Markdown, and the numbers."""
    folders = {arm: [f for s in seeds if (f := runs / f"{arm}_seed{s}").is_dir()] for arm in ARMS}
    data: dict[str, Any] = {"rows": [], "comparisons": {}, "roles": []}
    for arm in ARMS:
        for folder in folders[arm]:
            data["rows"] += rows(folder)
    lines = ["# RTI against GRPO and controls, in miniature", "", f"`python {' '.join(sys.argv)}`", ""]
    lines += _markdown(
        [
            "run",
            "updates",
            "sampled tokens",
            "hard Pass@1",
            "easy Pass@1",
            "admitted",
            "revealing corrections admitted",
        ],
        [_row(r) for r in data["rows"]],
    )
    for title, steps in equal_budgets(folders["grpo"], folders["rti"]).items():
        sides = [
            [compare.load(folder, step) for folder, step in zip(folders[arm], steps[arm], strict=True)]
            for arm in ("grpo", "rti")
        ]
        data["comparisons"][title] = found = compare.compare(*sides)
        before = [compare.load(f, 0) for f in folders["rti"]]
        rise = compare.compare(before, sides[1])
        lines += ["", f"## {title} (GRPO after {steps['grpo']} updates, RTI after {steps['rti']})", ""]
        lines += _markdown(
            ["tasks", "GRPO", "RTI", "RTI - GRPO", "each seed", "RTI: after - before", "each seed"],
            [
                [
                    f"{kind} ({v['difference']['tasks']})",
                    *(_cell(v[k]) for k in ("a", "b", "difference")),
                    _pairs(v),
                    _cell(rise["kinds"][kind]["difference"]),
                    _pairs(rise["kinds"][kind]),
                ]
                for kind, v in found["kinds"].items()
            ],
        )
    lines += ["", "## The roles over training (RTI runs, held-out tasks)", ""]
    for folder in folders["rti"]:
        for path in sorted((folder / "evals").glob("roles_*.json")):
            data["roles"].append({"run": folder.name, **json.loads(path.read_text())})
    measures = [
        ("validator", "balanced_accuracy"),
        ("corrector", "success"),
        ("verifier", "true_accept"),
        ("verifier", "false_accept"),
        ("verifier", "false_accept_leaking"),
    ]
    lines += _markdown(
        ["run", "updates", *(f"{role} {name.replace('_', ' ')}" for role, name in measures)],
        [
            [r["run"], r["step"], *(_cell(r[role][name], r[role][name]["n"]) for role, name in measures)]
            for r in data["roles"]
        ],
    )
    return "\n".join(lines) + "\n", data


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each evaluation of a run: success, and what it had cost by then."""
    metrics, found = read_metrics(folder / "metrics.jsonl"), []
    for path in sorted((folder / "evals").glob("step_*.json")):
        result = json.loads(path.read_text())
        past = [m for m in metrics if m["step"] <= result["step"]]
        total = {
            n: sum(m.get(n) or 0 for m in past)
            for n in ("rollout/sampled_tokens", "rti/replaced", "rti/admitted_revealing")
        }
        found.append(
            {
                "run": folder.name,
                "step": result["step"],
                "tokens": total["rollout/sampled_tokens"],
                "admitted": total["rti/replaced"],
                "revealing": total["rti/admitted_revealing"],
                **{kind: scores["pass@1"] for kind, scores in result["kinds"].items()},
            }
        )
    return found


def equal_budgets(grpo: list[pathlib.Path], rti: list[pathlib.Path]) -> dict[str, dict[str, list[int]]]:
    """The steps of each run to compare, at equal updates and at sampled tokens of GRPO not below RTI's."""
    updates: dict[str, list[int]] = {"grpo": [], "rti": []}
    tokens: dict[str, list[int]] = {"grpo": [], "rti": []}
    for a, b in zip(grpo, rti, strict=False):
        last = rows(b)[-1]
        evaluated = rows(a)
        updates["grpo"].append(last["step"])
        tokens["grpo"].append(
            next((r["step"] for r in evaluated if r["tokens"] >= last["tokens"]), evaluated[-1]["step"])
        )
        for budget in (updates, tokens):
            budget["rti"].append(last["step"])
    return {"Equal updates": updates, "Equal sampled tokens": tokens} if updates["rti"] else {}


def _row(r: dict[str, Any]) -> list[Any]:
    hard, easy = (_cell(r[kind]) if kind in r else "-" for kind in ("hard", "easy"))
    return [r["run"], r["step"], f"{r['tokens']:,.0f}", hard, easy, f"{r['admitted']:.0f}", f"{r['revealing']:.0f}"]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{100 * p['mean']:+.1f}" for p in values["pairs"]) or "-"


def _cell(estimate: dict[str, Any], n: int | None = None) -> str:
    if estimate["mean"] is None:
        return "-"
    of = f" of {n}" if n else ""
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * estimate[k] for k in ("mean", "low", "high"))) + of


def _markdown(header: list[str], lines: list[list[Any]]) -> list[str]:
    return ["| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *lines)]


if __name__ == "__main__":
    main()
