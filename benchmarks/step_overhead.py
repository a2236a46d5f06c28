"""Share of a training run's wall time that is neither sampling nor the update, from its own metrics.

    python benchmarks/step_overhead.py                   a short run of configs/quickstart.yaml, made for it
    python benchmarks/step_overhead.py runs/quickstart   runs that there are

Sampling is `time/rollout` and `time/intervention` (in which the learner scores corrections), the update is
`time/update`. What is left is weight transfer, the probe of engine against learner, and `time/other`: metrics, files
and whatever no phase accounts for. A run's start, evaluations and checkpoints are not part of a step. Steps that
compile are left out: the first two.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import turns
from turns import RESULTS, ROOT

from rti_jax.metrics import read_metrics

OVERHEAD = "sync", "probe", "other"
PHASES = ("rollout", "intervention", "teacher", "update", *OVERHEAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, nargs="*", help="run folder; none: a short run is made")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--steps", type=int, default=8, help="of the run that is made")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "step_overhead")
    given = parser.parse_args()
    on = turns.machine(turns.cores())
    with tempfile.TemporaryDirectory() as folder:
        found = [row(run, given.skip) for run in given.run or [make_run(folder, given.steps)]]
    text = turns.table(["run", "steps", *(f"{p} s" for p in PHASES), "neither sampling nor update"], found)
    print(text, end="")
    turns.write(given.output, "Overhead of a step", {"rows": found}, text, on)


def make_run(folder: str, steps: int) -> pathlib.Path:
    """A run of the quickstart without evaluations."""
    config = str(ROOT / "configs" / "quickstart.yaml")
    overrides = [f"runs_dir={folder}", "name=quickstart", f"steps={steps}", "eval.limit=1", "eval.trials=1"]
    command = [sys.executable, "-m", "rti_jax.cli", "train", config, *overrides]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
        raise SystemExit("the run failed")
    return pathlib.Path(folder) / "quickstart"


def row(run: pathlib.Path, skip: int) -> list[str | int]:
    """Mean seconds of each phase over the steps of a run, and the share of the overhead."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] > skip]
    if not lines:
        raise SystemExit(f"{run}: no step after the first {skip}")
    if any("time/other" not in line for line in lines):
        raise SystemExit(f"{run}: has no time/other: it was made by an earlier version")
    seconds = {p: np.array([line.get(f"time/{p}", 0.0) for line in lines]) for p in PHASES}
    share = sum(seconds[p].sum() for p in OVERHEAD) / sum(s.sum() for s in seconds.values())
    return [run.name, len(lines), *(f"{seconds[p].mean():.3f}" for p in PHASES), f"{100 * share:.1f}%"]


if __name__ == "__main__":
    main()
