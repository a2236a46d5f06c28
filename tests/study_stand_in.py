"""A stand-in for rti_jax/study_worker.py: writes what a run would leave, at once. An arm's name says what happens."""

import json
import os
import sys
import time

from rti_jax import config, runs, study
from tests.test_claims import run

RATES = {"rti": 0.8, "grpo": 0.4, "start": 0.4}


def play(job):
    settings = config.load_config(job["source"], job["overrides"])
    arm = settings.name.split("_seed")[0]
    if arm == "broken":
        return "ConfigError: no such teacher"
    if arm == "dies":
        os._exit(3)
    if arm == "sleeps":
        time.sleep(600)
    metrics = {f"rollout/{n}": lambda s: 0.1 * s for n in ("pre_success", "pre_solved_groups", "post_solved_groups")}
    found = run(arm, settings.seed, RATES[arm], metrics=metrics)
    folder = runs.open_run(settings).folder
    runs.write_lines(folder / "metrics.jsonl", found.lines[: settings.steps])
    for step, rows in found.evaluations.items():
        runs.write_json(folder / "evals" / f"step_{step:06d}.json", {"step": step, "tasks": rows})
    kinds = {k: {"tasks": 1, "pass@1": {"mean": RATES[arm]}} for k in ("all", "easy", "hard")}
    splits = {s: {"trials": 4, "kinds": kinds, "tasks": rows} for s, rows in found.splits.items()}
    final = {"step": settings.steps, "evaluation": job["evaluation"], "splits": splits}
    runs.write_json(folder / "evals" / study.FINAL, final)
    return ""


def finish(found):
    """Plays all jobs of a study in this process."""
    for j in found.jobs:
        play({"source": j.source, "overrides": j.overrides, "evaluation": j.evaluation})


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"name": job["name"], "error": play(job), "seconds": 0.0}), flush=True)
