"""Which tasks a split has. Tasks of one family (the twins of two languages, a task and its variants) never part.

all          every task of the benchmark that can be played here
hard20_id    the tasks of the subset file
rest_ood     those whose family has none in the subset, nor among the variants that are trained on
full         both
train        the variants of hard tasks, from the folder `env.variants`
multi_turn   tasks with a simulated user
"""

import json
import pathlib
from collections.abc import Mapping

import yaml

from envs.claw_eval import checkout as checkouts
from envs.claw_eval.checkout import Entry
from envs.claw_eval.config import ClawEvalConfig

SPLITS = ("all", "hard20_id", "rest_ood", "full", "train", "multi_turn")


def entries(config: ClawEvalConfig, split: str) -> list[Entry]:
    """The tasks of a split, in the order of their ids (of the subset file for `hard20_id`).

    Raises:
      ValueError: an unknown split, or what it needs is missing or wrong; says which key.
    """
    if split not in SPLITS:
        raise ValueError(f"Claw-Eval has the splits {', '.join(SPLITS)}")
    checkout = checkouts.load(config.root)
    tasks = checkout.tasks(web=config.web)
    playable = {i: e for i, e in tasks.items() if not e.obstacle and not e.talks}
    if split == "all":
        return list(playable.values())
    if split == "multi_turn":
        return [e for e in tasks.values() if e.talks and not e.obstacle]
    if split == "train":
        return list(variants(config).values())
    hard = subset(config, tasks)
    if split == "hard20_id":
        return list(hard.values())
    trained = {e.family for e in (*hard.values(), *(variants(config).values() if config.variants else ()))}
    rest = [e for e in playable.values() if e.family not in trained]
    return rest if split == "rest_ood" else [*hard.values(), *rest]


def subset(config: ClawEvalConfig, tasks: Mapping[str, Entry]) -> dict[str, Entry]:
    """The hard tasks. Raises ValueError for no file, an unknown id, or a task that cannot be played here."""
    if not config.subset:
        raise ValueError(
            "env.subset names no file: the ids of the paper's 20 hard tasks are not public. Let `rti select` write the "
            "hard ones for your policy, or list ids yourself, one a line"
        )
    found = {}
    for task_id in read_ids(pathlib.Path(config.subset)):
        if task_id not in tasks:
            raise ValueError(f"env.subset={config.subset}: no task {task_id} in {checkouts.load(config.root).root}")
        if obstacle := tasks[task_id].obstacle:
            raise ValueError(f"env.subset={config.subset}: {task_id} cannot be played here: it {obstacle}")
        if tasks[task_id].talks:
            raise ValueError(
                f"env.subset={config.subset}: {task_id} has a simulated user; those are the split multi_turn"
            )
        found[task_id] = tasks[task_id]
    return found


def read_ids(path: pathlib.Path) -> list[str]:
    """Ids of a file: one a line (empty lines and what follows # are left out), or a list as YAML or JSON.

    Raises:
      ValueError: it cannot be read, has no ids, or one of them twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"env.subset={path} cannot be read: {error}") from error
    except (ValueError, yaml.YAMLError):
        data = None
    if not isinstance(data, list):
        data = [word for line in text.splitlines() if (word := line.partition("#")[0].strip())]
    if not data or not all(isinstance(i, str) and i and not any(c.isspace() for c in i) for i in data):
        raise ValueError(f"env.subset={path} is no list of task ids")
    if twice := sorted({i for i in data if data.count(i) > 1}):
        raise ValueError(f"env.subset={path} has {twice[0]} twice")
    return data


def folder(variants: str) -> pathlib.Path | None:
    """The folder that `env.variants` names; None for no name, which stands for the benchmark's own tasks."""
    return pathlib.Path(variants).expanduser().resolve() if variants else None


def variants(config: ClawEvalConfig) -> dict[str, Entry]:
    """The training tasks: of the subset's families, and none of the benchmark's own. Raises ValueError otherwise."""
    place = folder(config.variants)
    if place is None or not place.is_dir():
        raise ValueError(
            f"env.variants={config.variants!r} is no folder: training tasks are variants of the hard tasks, in the "
            "benchmark's format; `python -m envs.claw_eval.variants` writes some (docs/claw_eval.md)"
        )
    checkout = checkouts.load(config.root)
    tasks, found = checkout.tasks(web=config.web), checkout.tasks(place, config.web)
    hard = {e.family for e in subset(config, tasks).values()}
    for entry in found.values():
        if entry.id in tasks:
            raise ValueError(
                f"env.variants: {entry.id} is a task of the benchmark, which is evaluated: give it another id"
            )
        if entry.family not in hard:
            raise ValueError(
                f"env.variants: {entry.id} is of the family {entry.family}, of which env.subset has no task; "
                "say `variant_of: ID` in its task.yaml, or leave it out"
            )
        if entry.obstacle:
            raise ValueError(f"env.variants: {entry.id} cannot be played here: it {entry.obstacle}")
    return dict(found)
