"""Share of a training run's wall time that is neither sampling nor the update, from its own metrics.

    python benchmarks/step_overhead.py runs/quickstart

Sampling is `time/rollout` and `time/intervention` (in which the learner scores corrections), the update is
`time/update`. What is left is weight transfer, the probe of engine against learner, and `time/other`: metrics, files
and whatever no phase accounts for. A run's start, evaluations and checkpoints are not part of a step. Steps that
compile are left out: the first two.
"""

import argparse
import pathlib

import numpy as np

from rti_jax.metrics import read_metrics

OVERHEAD = "sync", "probe", "other"
PHASES = ("rollout", "intervention", "teacher", "update", *OVERHEAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, nargs="+", help="run folder")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    given = parser.parse_args()
    print("| run | steps | " + " | ".join(f"{p} s" for p in PHASES) + " | neither sampling nor update |")
    print("| --- " * (len(PHASES) + 3) + "|")
    for run in given.run:
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] > given.skip]
        if not lines:
            raise SystemExit(f"{run}: no step after the first {given.skip}")
        if any("time/other" not in line for line in lines):
            raise SystemExit(f"{run}: has no time/other: it was made by an earlier version")
        seconds = {p: np.array([line.get(f"time/{p}", 0.0) for line in lines]) for p in PHASES}
        share = sum(seconds[p].sum() for p in OVERHEAD) / sum(s.sum() for s in seconds.values())
        means = " | ".join(f"{seconds[p].mean():.3f}" for p in PHASES)
        print(f"| {run.name} | {len(lines)} | {means} | {100 * share:.1f}% |")


if __name__ == "__main__":
    main()
