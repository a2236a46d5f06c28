"""What the checks of `rti doctor` are made of: a subject that they share, and what each finds."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from envs.base import Observation, Task
from rti_jax import config as config_lib
from rti_jax.chat import Chat
from rti_jax.engine import Engine, GenerateRequest, GenerateResult
from rti_jax.environments import EnvironmentSource, environment_source
from rti_jax.logprobs import Scorer
from rti_jax.runtime import Policy, check_folder, load_policy
from rti_jax.supervised import Supervised

FEW = 4  # tasks of each kind that are looked at
SECONDS = 60.0  # of an environment's set-up or turn


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it; `remedy` is empty where there is nothing to do."""

    status: Status
    message: str
    remedy: str = ""


def ok(message: str) -> Finding:
    return Finding(Status.OK, message)


def warning(message: str, remedy: str) -> Finding:
    return Finding(Status.WARNING, message, remedy)


def failure(message: str, remedy: str) -> Finding:
    return Finding(Status.FAILURE, message, remedy)


def not_applicable(message: str) -> Finding:
    return Finding(Status.NOT_APPLICABLE, message)


class Check(NamedTuple):
    """One line of the report.

    Attributes:
      run: whatever it raises is a failure.
      needs: names of checks without which this one has nothing to look at.
      samples: needs vLLM.
    """

    name: str
    run: Callable[["Subject"], Awaitable[Finding]]
    needs: tuple[str, ...] = ()
    samples: bool = False


class Subject:
    """What is examined; parts are loaded when a check first asks for them.

    Attributes:
      engine: set by the check that starts it. drawn: (request, result) of what it has sampled under version 0.
    """

    def __init__(self, config: config_lib.Config):
        self.config = config
        self.engine: Engine | None = None
        self.drawn: list[tuple[GenerateRequest, GenerateResult]] = []

    @functools.cached_property
    def folder(self):
        return check_folder(self.config.model.path)

    @functools.cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        from models import hf

        return hf.describe(self.folder).config.tie_word_embeddings

    @functools.cached_property
    def chat(self) -> Chat:
        return Chat.from_folder(self.folder, self.config.sampling.thinking)

    @functools.cached_property
    def source(self) -> EnvironmentSource:
        return environment_source(self.config.env)

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """The first few training tasks of each kind, in turn."""
        by_kind: dict[str, list[Task]] = collections.defaultdict(list)
        for task in self.source.tasks(self.config.env.split):
            by_kind[task.kind].append(task)
        return [kind[i] for i in range(FEW) for kind in by_kind.values() if i < len(kind)]

    @functools.cached_property
    def policy(self) -> Policy:
        """On the mesh; the only part that needs memory."""
        return load_policy(self.config)

    @functools.cached_property
    def scorer(self) -> Scorer:
        return scorer(self.config, self.policy.mesh, self.policy.model)

    async def rehearse(self, task: Task) -> tuple[Supervised, Observation]:
        """An episode at its start, driven as a rollout drives it, on an instance that asks no endpoint."""
        played = Supervised(self.source.cls.rehearsal(self.source.config, self.source.max_turns), SECONDS)
        try:
            return played, await played.reset(task)
        except BaseException:
            await played.close()
            raise


def scorer(config: config_lib.Config, mesh: Any, model: Any) -> Scorer:
    """As training scores: at the rollout temperature, in the config's buckets."""
    return Scorer(model, mesh, config.sampling.temperature, config.batch.buckets)


def listed(items: Sequence[Any], most: int = 3) -> str:
    """The first few items as text."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")
