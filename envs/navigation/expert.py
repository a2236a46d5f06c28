"""Plays the scripted expert through an episode: transcripts for warm starts, and the check that a task is solvable."""

import dataclasses
from typing import Any

from envs.base import Message, Outcome, Task
from envs.navigation.environment import Navigation


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A whole episode in OpenAI format, as it would stand in the policy's context."""

    task: Task
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    outcome: Outcome


async def play_expert(env: Navigation, task: Task) -> Transcript:
    """Resets `env` to the task and plays the expert until the end, or until it gives up."""
    start = await env.reset(task)
    messages = list(start.messages)
    while (turn := env.expert()) is not None:
        result = await env.step(turn)
        messages += [turn.as_message(), *result.messages]
        if result.done:
            break
    return Transcript(task, tuple(messages), tuple(start.tools), await env.score())
