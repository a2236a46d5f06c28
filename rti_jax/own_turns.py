"""What the policy itself does in states that can still be won: material for the roles' transcripts of a warm start.

Scripted mistakes are never quite a policy's own. So a warm start may stop half-way, let the policy that it has so far
play, and go on with transcripts in which the roles judge those turns. After an invalid turn the expert's is played, as
in rti_jax/role_eval.py.
"""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from envs.base import AssistantTurn, Environment, Task
from rti_jax import config as config_lib
from rti_jax.chat import Chat, ParsedTurn
from rti_jax.engine import make_engine
from rti_jax.environments import EnvironmentSource
from rti_jax.limits import run_bounded
from rti_jax.rollout import Player, Seat, TurnView
from rti_jax.types import Turn


@dataclasses.dataclass(frozen=True)
class OwnTurn:
    """A turn of the policy, and how its state was reached."""

    task: Task
    history: tuple[tuple[int, ...], ...]  # ids of the turns that were played before it
    ids: tuple[int, ...]


class Recorder:
    """Keeps each turn of one episode, and plays the expert's after an invalid one."""

    def __init__(self, environment: Environment, task: Task, chat: Chat):
        self.turns: list[OwnTurn] = []
        self._env, self._task, self._chat = environment, task, chat
        self._history: tuple[tuple[int, ...], ...] = ()

    async def __call__(self, view: TurnView, turn: Turn, parsed: ParsedTurn) -> tuple[Turn, ParsedTurn]:
        self.turns.append(OwnTurn(self._task, self._history, turn.response_ids))
        if not self._env.valid(parsed.turn):
            turn, parsed = expert_turn(self._env.expert(), view, turn, self._chat)
        self._history = (*self._history, turn.response_ids)
        return turn, parsed


def expert_turn(gold: AssistantTurn, view: TurnView, turn: Turn, chat: Chat) -> tuple[Turn, ParsedTurn]:
    """The expert's turn in the place of the policy's; not a sample, so its log-probabilities mean nothing."""
    ids = chat.encode_turn(gold)
    played = dataclasses.replace(turn, response_ids=ids, sampler_logprobs=(0.0,) * len(ids), finish_reason="stop")
    return played, chat.parse(view.prompt_ids, ids, view.tools)


def collect(
    folder: pathlib.Path,
    source: EnvironmentSource,
    tasks: Sequence[Task],
    config: config_lib.Config,
    on_episode: Callable[..., None] | None = None,
) -> list[OwnTurn]:
    """Plays each task once with the policy of a Hugging Face folder, sampled by vLLM; its turns in order of tasks."""
    return asyncio.run(_collect(folder, source, tasks, config, on_episode))


async def _collect(folder, source, tasks, config, on_episode) -> list[OwnTurn]:
    chat = Chat.from_folder(folder, thinking=config.sampling.thinking)
    engine = await asyncio.to_thread(make_engine, str(folder), config)
    try:
        player = Player(source, chat, engine, config)

        async def play(index: int, task: Task) -> list[OwnTurn]:
            recorders: list[Recorder] = []

            def reviser(environment: Environment) -> Recorder:
                recorders.append(Recorder(environment, task, chat))
                return recorders[-1]

            trajectory = await player.play(task, Seat(config.seed, 0, f"own/{index}", 0), reviser=reviser)
            if on_episode:
                on_episode(trajectory)
            return recorders[-1].turns if recorders else []

        jobs = [lambda i=i, t=t: play(i, t) for i, t in enumerate(tasks)]
        return [turn for turns in await run_bounded(jobs, player.concurrency) for turn in turns]
    finally:
        await engine.close()
