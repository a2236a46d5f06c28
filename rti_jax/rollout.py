"""Tasks → episodes → groups of trajectories, with token ids as they were sampled.

An episode is a fresh environment played turn by turn: h_t, the policy's turn, the environment's answer, h_{t+1}. What
goes wrong in it becomes data here and nowhere else: a policy's mistakes are failures or tool errors, errors of the
infrastructure are their own statuses, retried and never reward 0. Only a dead engine, a user's mistake or a bug ends
the run.
"""

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs import base as env_base
from envs.base import Environment, Message, Task
from rti_jax.chat import Chat, ParsedTurn
from rti_jax.config import Config, SamplingConfig
from rti_jax.engine import Engine, GenerateRequest
from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.environments import EnvironmentSource, environment_source, load_environment, sample_tasks
from rti_jax.limits import CLOSE_SECONDS, EpisodeTimeout, run_bounded, within
from rti_jax.seeds import derive_seed
from rti_jax.supervised import Supervised
from rti_jax.types import Group, RoleUsage, Status, Trajectory, Turn

__all__ = [
    "Player",
    "Seat",
    "TurnView",
    "environment_source",
    "load_environment",
    "sample_tasks",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Seat:
    """An episode's place in the run, which names it and seeds everything that is sampled in it.

    Attributes:
      drawn_as: seeds in place of group_id, so that a group's episodes are the same under another name.
    """

    seed: int
    step: int
    group_id: str
    member: int
    drawn_as: str = ""

    @property
    def id(self) -> str:
        return f"{self.group_id}/{self.member}"

    def seed_of(self, turn: int, role: str) -> int:
        return derive_seed(self.seed, self.step, self.drawn_as or self.group_id, self.member, turn, role)


@dataclasses.dataclass(frozen=True)
class TurnView:
    """h_t: everything that is visible when a turn is played."""

    turn_id: str
    index: int
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]


Revise = Callable[[TurnView, Turn, ParsedTurn], Awaitable[tuple[Turn, ParsedTurn]]]
Reviser = Callable[[Environment], Revise]  # called once per attempt at an episode


class Player:
    """Plays episodes of one environment with one policy.

    Args:
      config: `rollout`, `sampling` and `seed` are read.

    Attributes:
      usage: of the policy as the agent, in episodes that have ended, since `pop_usage`.
      offers_tools: whether an episode so far had any for the policy.
    """

    def __init__(self, source: EnvironmentSource, chat: Chat, engine: Engine, config: Config):
        self.source = source
        self.chat = chat
        self.engine = engine
        self.config = config
        self.usage, self.offers_tools = RoleUsage(), False

    @property
    def concurrency(self) -> int:
        """Episodes at once: `rollout.concurrency`, or fewer where the environment bears fewer."""
        return self.source.at_once(self.config.rollout.concurrency)

    async def collect(
        self,
        tasks: Sequence[Task],
        group_size: int | None = None,
        *,
        step: int,
        stream: str = "train",
        numbers: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> list[Group]:
        """Plays every task `group_size` times, all at once up to `rollout.concurrency`; one group per task, in order.

        Args:
          group_size: None is `rollout.group_size`.
          stream: names groups and separates random streams, e.g. of training and evaluation.
          numbers: of the groups; None counts from 0. On several hosts those of the tasks among all hosts' tasks.
          sampling: None is the config's.
          on_episode: told of each finished episode.
        """
        size = group_size or self.config.rollout.group_size
        seats = [
            (task, Seat(self.config.seed, step, f"{stream}/{step}/{i}", member))
            for i, task in zip(numbers or range(len(tasks)), tasks, strict=True)
            for member in range(size)
        ]

        async def play(task: Task, seat: Seat) -> Trajectory:
            trajectory = await self.play(task, seat, sampling=sampling)
            if on_episode:
                on_episode(trajectory)
            return trajectory

        played = await run_bounded([lambda t=t, s=s: play(t, s) for t, s in seats], self.concurrency)
        groups = [played[i : i + size] for i in range(0, len(played), size)]
        return [Group(g[0].group_id, g[0].task_id, tuple(g)) for g in groups]

    async def play(
        self, task: Task, seat: Seat, *, sampling: SamplingConfig | None = None, reviser: Reviser | None = None
    ) -> Trajectory:
        """One episode, played again up to `rollout.retries` times after an error of the infrastructure.

        A repetition has the same seeds: it is the same episode, not a selected one.

        Args:
          reviser: makes the function that may replace each turn before the environment sees it.
        """
        retries = 0
        while True:
            trajectory = await self._attempt(task, seat, sampling or self.config.sampling, reviser)
            if trajectory.status.valid or retries == self.config.rollout.retries:
                break
            retries += 1
        return dataclasses.replace(trajectory, info=trajectory.info | {"retries": retries}) if retries else trajectory

    def pop_usage(self) -> RoleUsage:
        """What the policy has cost since the last call."""
        usage, self.usage = self.usage, RoleUsage()
        return usage

    def begin(self, task: Task, seat: Seat, sampling: SamplingConfig) -> "Episode":
        """An episode that has not been played; another kind of policy has another kind of episode."""
        return Episode(task, seat, self.chat, self.engine, sampling, self.config.rollout.step_timeout)

    async def _attempt(self, task: Task, seat: Seat, sampling: SamplingConfig, reviser: Reviser | None) -> Trajectory:
        episode = self.begin(task, seat, sampling)
        seconds = self.config.rollout.episode_timeout
        try:
            status, reward, info = await within(seconds, episode.play(self.source, reviser))
        except EpisodeTimeout:
            status, reward, info = Status.TIMEOUT, None, {"error": f"the episode took longer than {seconds:g} s"}
        except env_base.EnvironmentError as error:
            status, reward, info = Status(error.status), None, {"error": str(error)}
        except EngineDiedError:
            raise
        except EngineError as error:  # one request that failed, of the policy or of a role's endpoint
            status, reward, info = Status.ENVIRONMENT_ERROR, None, {"error": f"engine: {error}"}
        self.usage.add(episode.usage)
        self.offers_tools |= episode.offers_tools
        if status is Status.TRUNCATED and not (self.config.rollout.truncated_is_failure and episode.length):
            reward = None
        return Trajectory(
            id=seat.id,
            group_id=seat.group_id,
            member=seat.member,
            task_id=task.id,
            turns=tuple(episode.turns),
            status=status,
            reward=reward,
            messages=tuple(episode.messages),
            info=info,
            replies=episode.replies,
        )


class Episode:
    """One episode in progress; what it has so far outlives its cancellation."""

    def __init__(
        self, task: Task, seat: Seat, chat: Chat, engine: Engine, sampling: SamplingConfig, step_seconds: float
    ):
        self.task = task
        self.seat = seat
        self.chat = chat
        self.engine = engine
        self.sampling = sampling
        self.step_seconds = step_seconds
        self.turns: list[Turn] = []
        self.replies = 0  # turns without token ids
        self.usage, self.offers_tools = RoleUsage(), False
        self.messages: list[Message] = []  # for viewers and endpoints
        self._written: list[Message] = []  # the same with assistant turns as they were written, for a fresh render

    @property
    def length(self) -> int:
        return len(self.turns) or self.replies

    @property
    def cut(self) -> bool:
        """Whether the last turn was cut at the token limit."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"

    async def play(self, source: EnvironmentSource, reviser: Reviser | None) -> tuple[Status, float | None, dict]:
        """Plays to the end and closes the environment, whatever happens; returns (status, reward, info)."""
        environment = None
        try:
            environment = _make(source)
            return await self._play(environment, reviser(environment) if reviser else None)
        except ContextLengthError as error:
            return Status.TRUNCATED, 0.0, {"error": str(error)}
        finally:
            if environment:
                await _close(environment)

    async def _play(self, environment: Environment, revise: Revise | None) -> tuple[Status, float | None, dict]:
        supervised = Supervised(environment, self.step_seconds)
        start = await supervised.reset(self.task)
        tools = tuple(start.tools)
        self.offers_tools = bool(tools)
        self._show(start.messages)
        prompt_ids = self.chat.start(self._written, tools)
        for index in range(environment.max_turns):
            room = self.sampling.max_context - len(prompt_ids)
            if room < 1:
                limit = self.sampling.max_context
                return Status.TRUNCATED, 0.0, {"error": f"a prompt of {len(prompt_ids)} tokens in a context of {limit}"}
            view = TurnView(f"{self.seat.id}/{index}", index, prompt_ids, tuple(self.messages), tools)
            turn, parsed = await self._sample(view, room)
            if revise:
                turn, parsed = await revise(view, turn, parsed)
            self.turns.append(turn)
            self.messages.append(parsed.as_message())
            result = await supervised.step(parsed.turn)
            history = [*self._written, parsed.as_written()]
            self._written = [*history, *result.messages]
            self.messages.extend(result.messages)
            if result.done:
                break
            if not result.messages:
                raise env_base.EnvironmentError("the environment answered a turn with nothing and is not done")
            prompt_ids = self.chat.extend(prompt_ids, turn.response_ids, result.messages, tools, history)
        return self.outcome(await supervised.score())

    async def _sample(self, view: TurnView, room: int) -> tuple[Turn, ParsedTurn]:
        started = time.monotonic()
        result = await self.engine.generate(
            GenerateRequest(
                prompt_ids=view.prompt_ids,
                max_tokens=min(self.sampling.max_tokens, room),
                temperature=self.sampling.temperature,
                seed=self.seat.seed_of(view.index, "policy"),
                stop_token_ids=self.chat.stop_ids,
            )
        )
        self.usage.add(RoleUsage(1, len(view.prompt_ids), len(result.ids), time.monotonic() - started))
        turn = Turn(
            id=view.turn_id,
            prompt_ids=view.prompt_ids,
            response_ids=tuple(result.ids),
            sampler_logprobs=tuple(result.logprobs),
            finish_reason=result.finish_reason,
            policy_version=result.policy_version,
        )
        return turn, self.chat.parse(view.prompt_ids, turn.response_ids, view.tools)

    def _show(self, messages: Sequence[Message]) -> None:
        self.messages.extend(messages)
        self._written.extend(messages)

    def outcome(self, outcome: env_base.Outcome) -> tuple[Status, float | None, dict]:
        """A score that `Supervised` gave; a failure whose last response was cut at the token limit is truncated."""
        status = Status(outcome.status)
        if status is Status.FAILURE and self.cut:
            status = Status.TRUNCATED
        return status, outcome.reward, outcome.info


def _make(source: EnvironmentSource) -> Environment:
    try:
        return source.make()
    except env_base.EnvironmentError:
        raise
    except Exception as error:
        raise env_base.EnvironmentError(f"{type(error).__name__}: {error}") from error


async def _close(environment: Environment) -> None:
    try:
        await Supervised(environment, CLOSE_SECONDS).close()
    except env_base.EnvironmentError as error:  # the episode's result stands
        logger.warning("closing %s: %s", type(environment).__name__, error)
