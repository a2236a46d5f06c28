"""LUFFY (Learning to reason Under oFF-policY guidance, arXiv 2504.14945), as the baseline of RTI on the same groups.

Where every member of a group failed, a successful rollout of a teacher takes the place of one, and the group has a
gradient. The teacher's tokens are off-policy: no ratio and no clip, but p / (p + gamma) (losses.py), and advantages
that are centred and not divided by the std. The rollouts are stored ones, encoded once with the policy's tokenizer, or
played by the teacher when they are needed.
"""

import asyncio
import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from envs.base import EnvironmentError, Message, Task
from rti_jax.chat import Chat
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.intervention import put_in, triggered
from rti_jax.rollout import Player, Seat
from rti_jax.seeds import derive_seed
from rti_jax.supervised import Supervised
from rti_jax.types import Group, Status, Trajectory, Turn

logger = logging.getLogger(__name__)


class Guide(Protocol):
    """Where the teacher's rollouts come from."""

    sampled_tokens: int  # that the teacher has sampled so far

    async def rollout(self, task: Task, group: Group, step: int) -> Trajectory | None:
        """A successful rollout of the task as a member of the group, or None."""


async def guide(
    groups: Sequence[Group], tasks: Iterable[Task], teacher: Guide, config: Config, *, step: int
) -> tuple[list[Group], dict[str, float]]:
    """The groups, those that failed entirely with a teacher's rollout in the place of one failed member; metrics."""
    by_id, result = {t.id: t for t in tasks}, list(groups)
    waiting = [i for i, group in enumerate(groups) if triggered(group)]
    before = teacher.sampled_tokens
    found = await asyncio.gather(*(teacher.rollout(by_id[groups[i].task_id], groups[i], step) for i in waiting))
    for i, trajectory in zip(waiting, found, strict=True):
        if trajectory:
            result[i] = put_in(groups[i], trajectory, config.seed)
    counts = {
        "groups_triggered": len(waiting),
        "replaced": sum(t is not None for t in found),
        "missing": sum(t is None for t in found),
        "sampled_tokens": teacher.sampled_tokens - before,
    }
    return result, {f"teacher/{name}": float(value) for name, value in counts.items()}


def taught(trajectory: Trajectory) -> Trajectory:
    """The trajectory as the teacher's: no value of its sampler is used."""
    turns = (
        dataclasses.replace(t, teacher=True, sampler_logprobs=(math.nan,) * len(t.response_ids))
        for t in trajectory.turns
    )
    return dataclasses.replace(trajectory, turns=tuple(turns))


class Played:
    """The teacher plays the task itself, up to `loss.teacher.attempts` times."""

    def __init__(self, player: Player, config: Config):
        own = config.loss.teacher.temperature
        self._sampling = config.sampling.model_copy(update={} if own is None else {"temperature": own})
        self._player, self._config = player, config
        self.sampled_tokens = 0

    async def rollout(self, task: Task, group: Group, step: int) -> Trajectory | None:
        for attempt in range(self._config.loss.teacher.attempts):
            seat = Seat(self._config.seed, step, group.id, -1 - attempt)
            trajectory = await self._player.play(task, seat, sampling=self._sampling)
            self.sampled_tokens += sum(len(t.response_ids) for t in trajectory.turns)
            if trajectory.success:
                return taught(trajectory)
        return None


class Stored:
    """Episodes of a file, a JSON line each: `task_id`, `messages` in OpenAI format, and `status` (absent: success).

    `rti eval CONFIG model.path=TEACHER eval.split=train --output teacher.json` writes teacher.jsonl so. Reasoning is
    read from `reasoning_content`; text and calls are encoded once with the policy's tokenizer.

    Raises:
      ConfigError: no such file, a line that cannot be read, or no success on a task that is trained.
    """

    def __init__(self, path: str, chat: Chat, source: EnvironmentSource, tasks: Sequence[Task], config: Config):
        self._chat, self._source, self._config = chat, source, config
        self._episodes = read_episodes(path)
        self.sampled_tokens = 0
        if not any(t.id in self._episodes for t in tasks):
            known = next(iter(self._episodes), "none")
            raise ConfigError(
                f"loss.teacher.rollouts={path} has no success on a task of env.split (tasks there: {known}, ...; "
                f"here: {tasks[0].id}, ...)"
            )

    async def rollout(self, task: Task, group: Group, step: int) -> Trajectory | None:
        episodes = self._episodes.get(task.id)
        if not episodes:
            return None
        chosen = np.random.default_rng(derive_seed(self._config.seed, step, group.id, "teacher")).integers(
            len(episodes)
        )
        try:
            tools = await self._tools(task)
        except EnvironmentError as error:  # counted as a rollout that is missing
            logger.warning("the tools of %s for a stored rollout: %s", task.id, error)
            return None
        seat = Seat(self._config.seed, step, group.id, -1)
        turns = encode(self._chat, episodes[chosen], tools, seat.id)
        if len(turns[-1].prompt_ids) + len(turns[-1].response_ids) > self._config.sampling.max_context:
            return None
        return Trajectory(
            id=seat.id,
            group_id=group.id,
            member=-1,
            task_id=task.id,
            turns=turns,
            status=Status.SUCCESS,
            reward=1.0,
            messages=tuple(episodes[chosen]),
        )

    async def _tools(self, task: Task) -> Sequence[dict[str, Any]]:
        """What the policy would be shown as tools."""
        episode = Supervised(self._source.make(), self._config.rollout.step_timeout)
        try:
            return (await episode.reset(task)).tools
        finally:
            await episode.close()


def read_episodes(path: str) -> dict[str, list[list[Message]]]:
    """Task id -> conversations of its successful episodes, each up to its last assistant turn."""
    episodes: dict[str, list[list[Message]]] = {}
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"loss.teacher.rollouts={path}: {error.strerror}") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            task, messages = line["task_id"], [_with_arguments(m) for m in line["messages"]]
            end = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"loss.teacher.rollouts={path}, line {number}: no episode ({error})") from None
        if line.get("status", "success") == "success":
            episodes.setdefault(task, []).append(messages[: end + 1])
    return episodes


def _with_arguments(message: Mapping[str, Any]) -> Message:
    """The message with its calls' arguments as objects: OpenAI has them as text."""
    calls = message.get("tool_calls") or []
    parsed = [{**c, "function": {**c["function"], "arguments": _object(c["function"]["arguments"])}} for c in calls]
    return {**message, **({"tool_calls": parsed} if calls else {})}


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def encode(chat: Chat, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> tuple[Turn, ...]:
    """A conversation as the turns that the policy would have sampled, prompts as the engine would see them."""
    turns: list[Turn] = []
    written: list[Message] = []
    new: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
            continue
        last = turns[-1] if turns else None
        prompt = (
            chat.extend(last.prompt_ids, last.response_ids, new, tools, written) if last else chat.start(new, tools)
        )
        body = {k: v for k, v in message.items() if k != "reasoning_content"}
        ids = chat.encode_turn(body, message.get("reasoning_content") or "")
        turns.append(Turn(f"{name}/{len(turns)}", prompt, ids, (math.nan,) * len(ids), "stop", 0, teacher=True))
        written += [*new, chat.parse(prompt, ids, tools).as_written()]
        new = []
    return tuple(turns)
