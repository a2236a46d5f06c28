"""Steps per second with sampling beside the update, and without: one run each, the same tasks, seeds and loss.

    python benchmarks/overlap.py                       tools that take two seconds, 12 steps
    python benchmarks/overlap.py --latency 0.5 --steps 8

Both runs are `rti train configs/quickstart.yaml` with `loss.behavior=engine`; one has `rollout.staleness=1`. Here
learner and engine share the processor's cores, so that nothing of their own work can be hidden. In a deployment they
have devices of their own, and episodes wait for tools, users and judges besides; that wait is what each call of a tool
is made to take here (`--latency` on the mean, uniform from half of it to one and a half, the same in both runs). The
first steps, which compile, and the last, beside which nothing is sampled, are left out of both.
"""

import argparse
import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from update_step import RESULTS, ROOT

from envs.navigation.config import NavigationConfig
from envs.navigation.environment import Navigation
from rti_jax.metrics import read_metrics
from rti_jax.seeds import derive_seed

CONFIG = ROOT / "configs" / "quickstart.yaml"
COLUMNS = ("step", "update", "sampling", "hidden", "waits")


class SlowConfig(NavigationConfig):
    latency: float = 0.0  # mean seconds of a turn's tools


class SlowNavigation(Navigation):
    """Navigation whose tools take their time."""

    Config = SlowConfig

    async def reset(self, task):
        self._waited = derive_seed("latency", task.id)
        return await super().reset(task)

    async def step(self, turn):
        self._waited = derive_seed("latency", self._waited)
        await asyncio.sleep(self.config.latency * (0.5 + self._waited / 2**31))
        return await super().step(turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=2.0, help="mean seconds that a turn's tools take")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="first steps that are left out")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the config, in both runs")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "overlap.json")
    given = parser.parse_args()
    if given.steps < given.skip + 2:
        raise SystemExit(f"--steps {given.steps} leaves nothing to measure after --skip {given.skip} and the last step")
    with tempfile.TemporaryDirectory() as folder:
        arms = {str(staleness): run(pathlib.Path(folder), staleness, given) for staleness in (0, 1)}
    ratio = arms["0"]["step"] / arms["1"]["step"]
    text = table(arms, ratio, given)
    print("\n" + text)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"latency": given.latency, "steps": given.steps, "skip": given.skip, "set": given.set, "arms": arms}
    given.output.write_text(json.dumps(result | {"cores": os.cpu_count(), "ratio": ratio}, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(text)


def run(folder: pathlib.Path, staleness: int, given: argparse.Namespace) -> dict[str, Any]:
    """Means of the steps that count, in seconds; its progress goes to the terminal."""
    name = f"staleness_{staleness}"
    print(f"rollout.staleness={staleness}", flush=True)
    keys = [
        *(f"runs_dir={folder}", f"name={name}", f"steps={given.steps}", f"checkpoint.every={given.steps}"),
        *("env.name=overlap:SlowNavigation", f"env.latency={given.latency}", "eval.limit=1", "eval.trials=1"),
        *("loss.behavior=engine", *given.set, f"rollout.staleness={staleness}"),
    ]
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rti_jax.cli", "train", str(CONFIG), *keys]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"the run with rollout.staleness={staleness} failed with exit code {done.returncode}")
    lines = read_metrics(folder / name / "metrics.jsonl")[given.skip : -1]
    return {"steps": len(lines)} | measured(lines)


def measured(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of a step, of its update, of sampling, of what of it the update hid, and of what the step waited."""

    def mean(*names: str) -> float:
        return float(np.mean([sum(line.get(name) or 0.0 for name in names) for line in lines]))

    waits = mean("time/rollout", "time/intervention")
    stale = "overlap/sampling_seconds" in lines[0]
    return {
        "step": float(np.mean([sum(v for k, v in line.items() if k.startswith("time/")) for line in lines])),
        "update": mean("time/update"),
        "sampling": mean("overlap/sampling_seconds") if stale else waits,
        "hidden": mean("overlap/hidden_seconds"),
        "waits": waits,
        "staleness": mean("rollout/staleness"),
        "ratio": mean("policy/ratio"),
        "clip_fraction": mean("policy/clip_fraction"),
    }


def table(arms: dict[str, dict[str, Any]], ratio: float, given: argparse.Namespace) -> str:
    head = ["rollout.staleness", "steps", *(f"{c} s" for c in COLUMNS), "steps/s", "ratio of the policy", "clipped"]
    text = "| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|\n"
    for name, arm in arms.items():
        cells = [name, str(arm["steps"]), *(f"{arm[c]:.2f}" for c in COLUMNS), f"{1 / arm['step']:.4f}"]
        text += "| " + " | ".join([*cells, f"{arm['ratio']:.4f}", f"{arm['clip_fraction']:.4f}"]) + " |\n"
    return text + f"\nSteps per second, on / off: {ratio:.2f} (a turn's tools take {given.latency:g} s on the mean).\n"


if __name__ == "__main__":
    main()
