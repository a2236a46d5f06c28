"""`rti view RUN [RUN2]`: what the policy and the roles wrote in a step, as one HTML file that needs no network.

    rti view runs/quickstart                                    the newest step, to runs/quickstart/view.html
    rti view runs/quickstart --step 12 --intervened
    rti view runs/quickstart --outcome failure --limit 100
    rti view runs/quickstart runs/quickstart_grpo --task train/0138      two runs on one task, side by side
    rti view runs/quickstart/evals/ood_model.json               the episodes of an evaluation of `rti eval`

Without --step the newest step is taken that has what is asked for; of two runs, the newest that both have (with --task
each run's own newest, so one can be further than the other).
"""

import dataclasses
import difflib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rti_jax import eval_setup, view_page
from rti_jax.config import Config, ConfigError
from rti_jax.export import run_config
from rti_jax.recorded import read_groups
from rti_jax.types import Group, IntervenedRollout, Status, Trajectory

LIMIT = 32  # groups of a page, unless told


class Written(NamedTuple):
    """What a command made."""

    path: pathlib.Path
    what: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A run folder, or the file of an evaluation.

    Attributes:
      files: by step. kind: of them, in words before the step. page: where the page of it is written.
    """

    folder: pathlib.Path
    config: Config
    files: Mapping[int, pathlib.Path]
    notes: Sequence[str]
    kind: str
    page: pathlib.Path

    def when(self, step: int) -> str:
        return f"{self.kind} {step}" if self.kind else "evaluation"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which groups, and which of their trajectories; None and False ask for nothing."""

    task: str | None = None
    outcome: Status | None = None
    intervened: bool = False

    def __str__(self) -> str:
        asked = [f"task {self.task}"] if self.task else []
        asked += [f"outcome {self.outcome}"] if self.outcome else []
        return ", ".join(asked + (["an intervention"] if self.intervened else [])) or "a readable trajectory"

    def groups(self, groups: Sequence[Group]) -> list[Group]:
        """Those that have it, admitted interventions first; trajectories with another outcome are left out of them."""
        found = [g for g in map(self._only, groups) if g.trajectories or g.attempts or g.replaced]
        return sorted(
            found, key=lambda g: (not any(a.decision and a.decision.admitted for a in g.attempts), not g.attempts)
        )

    def _only(self, group: Group) -> Group:
        if self.task not in (None, group.task_id) or (self.intervened and not group.attempts):
            return dataclasses.replace(group, trajectories=(), attempts=(), replaced=None)

        def good(trajectory: Trajectory | None) -> bool:
            return trajectory is not None and self.outcome in (None, trajectory.status)

        members = tuple(filter(good, group.trajectories))
        attempts: tuple[IntervenedRollout, ...] = tuple(a for a in group.attempts if good(a.trajectory))
        replaced = group.replaced if good(group.replaced) else None
        return dataclasses.replace(group, trajectories=members, attempts=attempts, replaced=replaced)


def main(
    run: pathlib.Path,
    other: pathlib.Path | None = None,
    *,
    step: int | None = None,
    output: pathlib.Path | None = None,
    outcome: str | None = None,
    intervened: bool = False,
    task: str | None = None,
    limit: int = LIMIT,
    evaluation: bool = False,
) -> Written:
    """Writes the page; default is view.html in the first run.

    Args:
      limit: groups (with two runs: tasks) of the page; the others are counted on it.
      evaluation: held-out episodes of an evaluation instead of a training step's.

    Raises:
      ConfigError: a folder that is no run, a step that it has not, nothing that was asked for, or a wrong output.
    """
    wanted = Wanted(task, _status(outcome), intervened)
    places = [pathlib.Path(place) for place in (run, *filter(None, [other]))]
    sources = [read_episodes(file) if (file := _episodes(p)) else read_source(p, evaluation) for p in places]
    output = _output(pathlib.Path(output) if output else sources[0].page)
    sides = choose(sources, step, wanted)
    text, what = view_page.page(sides, limit, str(wanted) if wanted != Wanted() else "")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace")  # a model may write half a surrogate pair
    partial.replace(output)
    return Written(output, what)


def _status(outcome: str | None) -> Status | None:
    if outcome is not None and outcome not in list(Status):
        raise ConfigError(f"--outcome {outcome}: expected one of {', '.join(Status)}")
    return Status(outcome) if outcome else None


def _output(path: pathlib.Path) -> pathlib.Path:
    """Only a page may be overwritten: never a run's own files."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output {path}: expected a name that ends in .html")
    if path.is_dir() or path.name == "report.html":
        raise ConfigError(f"--output {path}: " + ("is a folder" if path.is_dir() else "is where rti report writes"))
    return path


def read_source(folder: pathlib.Path, evaluation: bool = False) -> Source:
    """A run folder with at least one file of trajectories; a config of another version is noted and not used."""
    config, notes = Config(), []
    try:
        config = run_config(folder)
    except ConfigError as error:
        if not (folder / "config.yaml").is_file():
            raise
        notes.append(f"config.yaml cannot be read, gate.delta and epsilon_cal are the defaults: {error}")
    part = "evals" if evaluation else "trajectories"
    found = [(re.fullmatch(r"step_(\d+)\.jsonl", p.name), p) for p in (folder / part).glob("step_*.jsonl")]
    files = {int(match[1]): path for match, path in sorted(found, key=lambda f: f[1].name) if match}
    if not files:
        raise ConfigError(f"{folder} has no {part}/step_*.jsonl: nothing has been recorded yet")
    kind = "evaluation after step" if evaluation else "step"
    return Source(folder, config, files, notes, kind, folder / "view.html")


def _episodes(path: pathlib.Path) -> pathlib.Path | None:
    """The file of episodes that a path names, as a file or as a folder that holds one; None for a run folder."""
    if path.is_dir():
        files = [] if (path / "config.yaml").is_file() else sorted(path.glob("*.jsonl"))
        if len(files) > 1:
            raise ConfigError(f"{path} holds several evaluations, name one: {', '.join(f.name for f in files)}")
        return files[0] if files else None
    return path if path.suffix in (".json", ".jsonl") else None


def read_episodes(path: pathlib.Path) -> Source:
    """The episodes beside an evaluation's numbers, also while it is played; its config gives the tokenizer."""
    episodes = path.with_suffix(".jsonl")
    if not episodes.is_file():
        raise ConfigError(f"{episodes}: there is no such file of episodes")
    config, notes, setup = Config(), [], eval_setup.setup_file(path)
    try:
        config = eval_setup.Setup.read(setup).config if setup.is_file() else run_config(path.resolve().parent.parent)
    except ConfigError as error:
        notes = [f"what it was made with is not known: {error}"]
    return Source(path, config, {0: episodes}, notes, "", path.with_suffix(".html"))


def choose(sources: Sequence[Source], step: int | None, wanted: Wanted) -> list[view_page.Side]:
    """A side for each run with the groups that were asked for; of two runs, those of tasks that both have."""
    if step is not None:
        for source in sources:
            if step not in source.files:
                raise ConfigError(f"{source.folder} has no step {step}; it has {ranges(source.files)}")
        plans = [[step] * len(sources)]
    elif len(sources) > 1 and wanted.task:
        plans = [[_newest(source, wanted) for source in sources]]
    else:
        common = set.intersection(*(set(s.files) for s in sources))
        plans = [[n] * len(sources) for n in sorted(common, reverse=True)]
        if not plans:
            raise ConfigError("no step in common: " + "; ".join(f"{s.folder} has {ranges(s.files)}" for s in sources))
    for plan in plans:
        sides = [_side(source, n, wanted) for source, n in zip(sources, plan, strict=True)]
        if paired := _paired(sides, wanted):
            return paired
    raise ConfigError(_nothing(sources, plans, wanted))


def _newest(source: Source, wanted: Wanted) -> int:
    """The newest step that has the task."""
    for step in sorted(source.files, reverse=True):
        if _side(source, step, wanted).groups:
            return step
    raise ConfigError(_nothing([source], [[n] for n in sorted(source.files, reverse=True)], wanted))


def _side(source: Source, step: int, wanted: Wanted) -> view_page.Side:
    path = source.files[step]
    groups, advantages, notes = [], {}, []
    if not wanted.task or json.dumps(wanted.task, ensure_ascii=False) in path.read_text("utf-8", errors="replace"):
        groups, advantages, notes = read_groups(path)
    return view_page.Side(
        name=source.folder.resolve().name if source.kind else source.folder.stem,
        folder=source.folder,
        step=step,
        config=source.config,
        recorded=groups,
        groups=wanted.groups(groups),
        advantages=advantages,
        notes=[*source.notes, *notes],
        when=source.when(step),
    )


def _paired(sides: Sequence[view_page.Side], wanted: Wanted) -> list[view_page.Side]:
    """Sides with the groups of tasks that all of them recorded and that at least one has as asked for.

    Beside a group with an intervention stands the other run's group, whether it has one or not.
    """
    common = set.intersection(*({g.task_id for g in side.recorded} for side in sides))
    asked = {g.task_id for side in sides for g in side.groups} & common
    beside = dataclasses.replace(wanted, intervened=False)
    return [
        dataclasses.replace(s, groups=[g for g in beside.groups(s.recorded) if g.task_id in asked])
        for s in sides
        if asked
    ]


def _nothing(sources: Sequence[Source], plans: Sequence[Sequence[int]], wanted: Wanted) -> str:
    """Says what was not found and where, and what there is instead."""
    runs = " and ".join(str(s.folder) for s in sources)
    steps = sorted({n for plan in plans for n in plan})
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {ranges(steps)}"
    text = f"{runs}: {where}: no {'common task with' if len(sources) > 1 else 'group with'} {wanted}"
    if wanted.task:
        known = sorted({g.task_id for s in sources for g in read_groups(s.files[max(s.files)])[0]})
        near = difflib.get_close_matches(wanted.task, known, n=5, cutoff=0) or known[:5]
        text += f"; tasks of the newest step are, for example: {', '.join(near)}"
    return text


def ranges(numbers: Sequence[int] | Mapping[int, pathlib.Path]) -> str:
    """`1-24, 30` for what is nearly always an unbroken row."""
    rows: list[list[int]] = []
    for n in sorted(numbers):
        if rows and rows[-1][1] == n - 1:
            rows[-1][1] = n
        else:
            rows.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in rows)
