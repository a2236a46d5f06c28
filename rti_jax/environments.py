"""Environments by name or import path, and which of their tasks a step plays."""

import dataclasses
import difflib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

import numpy as np
import pydantic

from envs import base
from envs.base import Environment, EnvironmentConfig, Task
from envs.chat_api import encodable
from rti_jax.config import ConfigError, EnvConfig, Origin
from rti_jax.config_errors import explain
from rti_jax.seeds import derive_seed

BUILT_IN = {
    "navigation": "envs.navigation:Navigation",
    "tau2": "envs.tau2:Tau2",
    "claw_eval": "envs.claw_eval:ClawEval",
    "mcp": "envs.mcp:MCP",
}


@dataclasses.dataclass(frozen=True)
class EnvironmentSource:
    """An environment's class with its checked keys: makes one instance per episode, and lists tasks."""

    cls: type[Environment]
    config: EnvironmentConfig
    max_turns: int

    def make(self) -> Environment:
        return self.cls(self.config, self.max_turns)

    def at_once(self, most: int) -> int:
        """How many episodes run at once: `most`, or fewer where the environment bears fewer.

        Raises:
          ConfigError: the environment says what is no number of episodes.
        """
        try:
            own = self.cls.at_once(self.config)
        except Exception as error:
            raise ConfigError(f"{self.cls.__name__}.at_once: {said(error, self.cls)}") from error
        if own is None:
            return most
        if not isinstance(own, int) or own < 1:  # none at all would wait for ever
            raise ConfigError(f"{self.cls.__name__}.at_once gives {own!r}; expected a number of 1 or more, or None")
        return min(most, own)

    def asked(self) -> dict[str, str]:
        """Which other model plays each role ("user", "judge"): its name, or the address whose first model does."""
        found = self.cls.endpoints(self.config)
        return {role: e.model or (e.url and f"the first at {e.url}") for role, e in found.items()}

    def check(self) -> None:
        """Raises ConfigError for what episodes need and would not find, e.g. a user simulator's endpoint."""
        self.at_once(1)
        try:
            self.cls.check(self.config)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def tasks(self, split: str, key: str = "env.split") -> list[Task]:
        """All tasks of a split.

        Args:
          key: that names the split, for errors.

        Raises:
          ConfigError: an unknown split, no tasks, ids that are not unique, or something else than tasks.
        """
        name = self.cls.__name__
        try:
            given = self.cls.tasks(self.config, split)
            tasks = None if given is None or isinstance(given, str) else list(given)
        except ValueError as error:
            raise ConfigError(f"{key}={split}: {error}") from error
        except Exception as error:  # whatever a user's class does
            raise ConfigError(f"{key}={split}: {name}.tasks: {said(error, self.cls)}") from error
        if tasks is None:
            raise ConfigError(f"{key}={split}: {name}.tasks gives {_short(given)}; expected a list of envs.base.Task")
        if not tasks:
            raise ConfigError(f"{key}={split}: {name} has no tasks there")
        for task in tasks:
            if not isinstance(task, Task):
                raise ConfigError(f"{key}={split}: {name}.tasks gives {_short(task)}; expected an envs.base.Task")
            if not (isinstance(task.id, str) and task.id and encodable(task.id) == task.id):
                raise ConfigError(f"{key}={split}: {name} gave a task with id {task.id!r:.80}, not a text")
            if not isinstance(task.kind, str):
                raise ConfigError(f"{key}={split}: task {task.id} has the kind {task.kind!r:.80}, not a text")
        if len({t.id for t in tasks}) != len(tasks):
            raise ConfigError(f"{key}={split}: the tasks of {name} have ids that are not unique")
        return tasks


def said(error: BaseException, cls: type[Environment]) -> str:
    """An error of an environment: its type and words, and the place in the environment's own code."""
    where = place(error, cls)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


def place(error: BaseException, cls: type[Environment]) -> str:
    """file:line of the innermost frame of an error that lies in an environment's own code; empty if none does.

    Its own code is the files beside those that its class and the classes it is built on are in.
    """
    classes = [c for c in cls.__mro__ if issubclass(c, Environment) and c is not Environment]
    files = [getattr(sys.modules.get(c.__module__), "__file__", None) for c in classes]
    folders = [os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file]
    not_theirs = (os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.abspath(base.__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = os.path.abspath(frame.filename)
        folder = next((f for f in folders if file.startswith(f)), None)
        if folder and not file.startswith(not_theirs) and "site-packages" not in file.removeprefix(folder):
            here = os.getcwd() + os.sep
            return f"{file.removeprefix(here)}:{frame.lineno}"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."


def environment_source(config: EnvConfig) -> EnvironmentSource:
    """The environment that `env:` of a config names, its own keys checked by its `Config` class.

    Raises:
      ConfigError: for an environment that cannot be imported, or keys that it does not know.
    """
    return EnvironmentSource(load_environment(config.name), env_config(config), config.max_turns)


def env_config(config: EnvConfig, origin: Origin = lambda key: "") -> EnvironmentConfig:
    """The environment's own keys as its `Config`, checked as strictly as ours.

    Args:
      origin: where a key was given, as the start of an error line.
    """
    schema = load_environment(config.name).Config
    try:  # as JSON, so that a list may stand for a tuple while "3" still is no number
        return schema.model_validate_json(json.dumps(config.own), strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, schema, prefix="env.", shared=EnvConfig, origin=origin)) from error


def load_environment(name: str) -> type[Environment]:
    """The class of a built-in environment ("navigation"), or of "package.module:Class" (also from the current folder).

    Raises:
      ConfigError: one line that says what is wrong with the name.
    """
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not (colon and module_name and attribute):
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        meant = f"did you mean {close[0]}?" if close else f"built in: {', '.join(BUILT_IN)}"
        raise ConfigError(f"env.name={name}: neither built in nor an import path (package.module:Class); {meant}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # a console script does not see the user's folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does when it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name)
        if missing and name in BUILT_IN:
            raise ConfigError(f"env.name={name}: this environment is not available in this installation") from error
        cause = f"no module {error.name}" if missing else f"importing {module_name}: {type(error).__name__}: {error}"
        raise ConfigError(f"env.name={name}: {cause}") from error
    cls = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        what = "has no" if cls is None else "is not a subclass of envs.base.Environment:"
        raise ConfigError(f"env.name={name}: {module_name} {what} {attribute}")
    return cls


def sample_tasks(
    tasks: Sequence[Task], step: int, n: int, seed: int, mix: Mapping[str, float] | None = None
) -> list[Task]:
    """The n tasks of a step; a function of its arguments alone, so a resumed run draws what an unbroken one would.

    Each kind is a stream of permutations, one an epoch, of its tasks; a step takes its next ones. A kind's share of n
    is rounded by largest remainder, the same in every step. Without a mix all tasks are one stream.

    Raises:
      ConfigError: for a mix that names an unknown kind, or gives a wanted kind no task in a step.
    """
    if not mix:
        return _take(list(tasks), step * n, n, seed, "")
    by_kind: dict[str, list[Task]] = {}
    for task in tasks:
        by_kind.setdefault(task.kind, []).append(task)
    counts = _split(mix, n, by_kind)
    return [t for kind, m in counts.items() for t in _take(by_kind[kind], step * m, m, seed, kind)]


def _take(tasks: Sequence[Task], start: int, count: int, seed: int, kind: str) -> list[Task]:
    """Positions [start, start + count) of the endless sequence of epochs."""
    orders: dict[int, np.ndarray] = {}
    taken = []
    for position in range(start, start + count):
        epoch, place = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng(derive_seed(seed, "tasks", kind, epoch)).permutation(len(tasks))
        taken.append(tasks[orders[epoch][place]])
    return taken


def _split(mix: Mapping[str, float], n: int, kinds: Mapping[str, Sequence[Task]]) -> dict[str, int]:
    wanted = {k: share for k, share in mix.items() if share != 0}
    for kind, share in wanted.items():
        if kind not in kinds:
            raise ConfigError(f"rollout.mix: no tasks of kind {kind!r}; kinds here: {', '.join(sorted(kinds))}")
        if not share > 0 or share == float("inf"):
            raise ConfigError(f"rollout.mix: the share of {kind} is {share}, not a positive number")
    if not wanted:
        raise ConfigError("rollout.mix gives every kind a share of 0")
    total = sum(wanted.values())
    counts = {k: int(n * share / total + 1e-9) for k, share in wanted.items()}
    by_remainder = sorted(wanted, key=lambda k: (counts[k] - n * wanted[k] / total, k))
    for kind in by_remainder[: n - sum(counts.values())]:
        counts[kind] += 1
    if empty := [k for k, count in counts.items() if not count]:
        raise ConfigError(f"rollout.mix: a step of {n} tasks has none of kind {empty[0]}; raise groups_per_step")
    return counts
