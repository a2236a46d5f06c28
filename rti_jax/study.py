"""A study: the arms of a folder of configs, their seeds, and how all of them are evaluated.

Every YAML file of the folder whose name does not begin with `_` is an arm, named after its file; `_reproduce.yaml`
says the rest (its keys are `Plan`'s). Arms share a base by `inherits: _base.yaml`, so that each file is its difference.
"""

import difflib
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import pydantic

from rti_jax import config as config_lib
from rti_jax import config_diff
from rti_jax.config import Config, ConfigError, Section
from rti_jax.environments import env_config

PLAN_FILE = "_reproduce.yaml"
FINAL = "final.json"  # in evals/ of a run: its evaluation on all splits of the plan, written last


class Quick(Section):
    """What `--quick` changes."""

    seeds: list[int] = [0]
    arms: list[str] = []  # empty = all
    overrides: list[str] = []  # keys for all arms, e.g. steps=3
    evaluation: dict[str, pydantic.PositiveInt] = {}  # empty = the plan's


class Plan(Section):
    """The keys of `_reproduce.yaml`."""

    seeds: list[int] = pydantic.Field([0, 1, 2], min_length=1)
    first_seed_only: list[str] = []  # arms that are not run with the other seeds
    evaluation: dict[str, pydantic.PositiveInt] = pydantic.Field({"test": 100}, min_length=1)  # split -> tasks a kind
    order: list[str] = []  # arms in the order of runs and tables; others follow by name
    reference: str = "rti"  # the arm from which paired differences are taken
    charts: dict[str, list[str]] = {}  # title -> arms that are drawn together (six at most)
    prepare: dict[str, str] = {}  # model folder -> config of `rti sft` that makes it, where it is missing
    quick: Quick = Quick()


class Job(NamedTuple):
    """One run: an arm with a seed.

    Attributes:
      source: the arm's file. overrides: the keys that the study and the user set over it.
      evaluation: split -> tasks of each kind, at the end.
    """

    arm: str
    seed: int
    source: pathlib.Path
    overrides: tuple[str, ...]
    config: Config
    evaluation: dict[str, int]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def final(self) -> pathlib.Path:
        return self.config.run_dir / "evals" / FINAL

    @property
    def done(self) -> bool:
        """Whether this run was trained for its steps and evaluated as the plan says."""
        try:
            final = json.loads(self.final.read_text())
            return (final["step"], final["evaluation"]) == (self.config.steps, self.evaluation)
        except (OSError, ValueError, KeyError, TypeError):
            return False


class Study(NamedTuple):
    """All jobs of a folder in the order in which they are run: every arm with the first seed, then the next seed."""

    folder: pathlib.Path
    output: pathlib.Path
    plan: Plan
    jobs: list[Job]
    quick: bool

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(job.arm for job in self.jobs))


def load(
    folder: pathlib.Path,
    *,
    quick: bool = False,
    output: pathlib.Path | None = None,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Study:
    """The study of a folder; everything a user may have got wrong is said here, before anything runs.

    Args:
      output: where run folders and tables go; default runs/reproduce_FOLDER, with --quick runs/reproduce_FOLDER_quick.
      arms, seeds: only these. overrides: keys for all arms.

    Raises:
      ConfigError: no arms, an unknown arm, a mistake in a config, or runs there that were made with other settings.
    """
    files = _arm_files(folder)
    plan = _plan(folder)
    keys, evaluation = [*overrides], plan.evaluation
    if quick:
        keys, evaluation = [*plan.quick.overrides, *overrides], plan.quick.evaluation or evaluation
        plan = plan.model_copy(update={"seeds": plan.quick.seeds})
        arms = arms or plan.quick.arms
    for arm in (*arms, *plan.first_seed_only, *plan.order):
        if arm not in files:
            near = difflib.get_close_matches(arm, files, n=1)
            raise ConfigError(f"{folder}: no arm {arm!r}" + (f"; did you mean {near[0]}?" if near else ""))
    output = output or pathlib.Path("runs") / f"reproduce_{folder.resolve().name}{'_quick' if quick else ''}"
    wanted = [a for a in dict.fromkeys([*plan.order, *files]) if not arms or a in arms]
    seeds = seeds or plan.seeds
    jobs = []
    for seed in seeds:
        for arm in wanted:
            if seed == seeds[0] or arm not in plan.first_seed_only:
                given = (
                    *_leaving_own(keys, files[arm]),
                    f"seed={seed}",
                    f"name={arm}_seed{seed}",
                    f"runs_dir={output}",
                )
                config = config_lib.load_config(files[arm], given, check_env=env_config)
                jobs.append(Job(arm, seed, files[arm], given, config, evaluation))
    check_unchanged(jobs)
    return Study(folder, output, plan, jobs, quick)


def _arm_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name a folder of configs, e.g. configs/miniature")
    files = {p.stem: p for p in sorted(folder.glob("*.yaml")) if not p.name.startswith("_")}
    if not files:
        raise ConfigError(f"{folder} has no arm: no YAML file whose name does not begin with _")
    return files


def _leaving_own(keys: Sequence[str], arm: pathlib.Path) -> list[str]:
    """The overrides without those of keys that the arm's own file sets: they are what the arm is."""
    own = config_diff.flat(config_lib.read_yaml(arm))
    return [k for k in keys if k.partition("=")[0] not in own]


def _plan(folder: pathlib.Path) -> Plan:
    path = folder / PLAN_FILE
    return config_lib.load_config(path, schema=Plan) if path.is_file() else Plan()


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Raises ConfigError if a run of the study was begun with other values of keys that change the algorithm."""
    changed = []
    for job in jobs:
        saved = job.config.run_dir / "config.yaml"
        if saved.is_file():
            found = config_diff.differences(config_lib.load_config(saved), job.config)
            changed += [f"  {job.name}: {d}" for d in found if not d.harmless or d.key == "steps"]
    if changed:
        raise ConfigError(
            f"{jobs[0].config.runs_dir} holds runs with other settings; give them back, remove those runs, or give "
            "another --output\n" + "\n".join(changed)
        )
