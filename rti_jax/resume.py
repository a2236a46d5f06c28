"""What a checkpoint says of the run that it belongs to beside the training state, and whether that run may go on.

Where data, sampling and interventions stand is no state of its own: all of it is a function of (seed, step) and of the
list of tasks. What a config only names (task ids, models, role prompts, rollouts of a teacher) may hold something else
when the run goes on, so a checkpoint says what it was.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rti_jax import fingerprint, redaction, roles
from rti_jax.config import Config, ConfigError
from rti_jax.run_tasks import RunTasks


def identity(config: Config, tasks: RunTasks | None) -> dict[str, Any]:
    """JSON values: seed, config without its secrets, digests of the files that it names, ids of the tasks."""
    described = redaction.described(config.model_dump(mode="json"))
    found = {"seed": config.seed, "config": described, "files": _files(config)}
    if tasks is None:
        return found
    return found | {"trained": [t.id for t in tasks.trained], "held_out": [t.id for t in tasks.held_out]}


def check(old: Mapping[str, Any], new: Mapping[str, Any], run: pathlib.Path) -> list[str]:
    """Lines on what is different and does no harm. What a checkpoint of an earlier version does not say may differ.

    Args:
      old: of the checkpoint. new: of the run that wants to go on, both `identity`. run: its folder.

    Raises:
      ConfigError: other tasks are trained, or a file or folder that the config names holds something else; a line
        for each.
    """
    changed = []
    if difference := _difference(old.get("trained"), new.get("trained")):
        changed.append(f"tasks that are trained (env.split, rollout.tasks): {difference}")
    before = old.get("files", {})
    changed += [
        f"{key}: what it names has other contents"
        for key, digest in new["files"].items()
        if before.get(key, digest) != digest
    ]
    if changed:
        raise ConfigError(
            f"{run} was started with other files than are there now; give them back, or start anew with another "
            "name=...\n" + "\n".join(f"  {line}" for line in changed)
        )
    if difference := _difference(old.get("held_out"), new.get("held_out")):
        return [f"tasks that are evaluated (eval.split, eval.tasks, eval.limit): {difference}"]
    return []


def _files(config: Config) -> dict[str, str]:
    """Key -> digest of what it names: models (the policy's first weights are the KL's reference), rollouts, prompts."""
    models = {"model.path": config.model.path, "loss.teacher.path": config.loss.teacher.path} | config.frozen_folders
    found = {k: fingerprint.of_folder(pathlib.Path(v)) for k, v in models.items() if v and pathlib.Path(v).is_dir()}
    rollouts, prompts = pathlib.Path(config.loss.teacher.rollouts), pathlib.Path(config.rti.prompts)
    if rollouts.is_file():
        found["loss.teacher.rollouts"] = fingerprint.of_file(rollouts)
    if prompts.is_dir() and (prompts.is_absolute() or not (roles.STYLES / prompts).is_dir()):
        found["rti.prompts"] = fingerprint.of_files(sorted(prompts.glob("*.j2")))
    return found


def _difference(old: Sequence[str] | None, new: Sequence[str] | None) -> str:
    """How two lists of task ids differ, in words; empty if they do not, or one is not known."""
    if old is None or new is None or old == new:
        return ""
    parts = [
        f"{sign} {task}" + (f" and {len(tasks) - 1} more" if len(tasks) > 1 else "")
        for sign, tasks in (("without", sorted({*old} - {*new})), ("with", sorted({*new} - {*old})))
        for task in tasks[:1]
    ]
    return f"{len(old)} -> {len(new)}, " + (", ".join(parts) or "in another order")
