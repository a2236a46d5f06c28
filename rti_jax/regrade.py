"""Recorded episodes graded once more: their turns are played again in fresh instances of the environment.

A grader that says another thing of the same turns is no ground to call a task hard. Only what an environment shows
through its interface is used, so this works for any; one that asks a simulated user gets its answers anew, and where
these differ so may the grade.
"""

from collections.abc import Mapping, Sequence

from envs.base import AssistantTurn, EnvironmentError, Message, Task
from rti_jax import endpoint_policy
from rti_jax.chat import Chat
from rti_jax.config import Config, SamplingConfig
from rti_jax.endpoint_policy import MessageEpisode, Tools
from rti_jax.environments import EnvironmentSource
from rti_jax.eval_store import Store
from rti_jax.limits import run_bounded
from rti_jax.rollout import Episode, Player, Seat
from rti_jax.types import Status, Trajectory


class ReplayEpisode(MessageEpisode):
    """An episode whose turns are those of a recorded one."""

    def __init__(self, task: Task, seat: Seat, config: Config, recorded: Trajectory, chat: Chat | None):
        super().__init__(task, seat, config.sampling, config.rollout.step_timeout)
        self._recorded, self._chat = recorded, chat

    async def say(self, index: int, tools: Tools) -> tuple[AssistantTurn, Message]:
        if index == self._recorded.length:
            raise EnvironmentError(f"goes on after {index} turns, where the recorded episode ended")
        turn = recorded_turn(self._recorded, index, tools, self._chat)
        return turn, turn.as_message()


class ReplayPlayer(Player):
    """A Player that plays recorded episodes, by their ids; `chat` reads those that are token ids."""

    def __init__(
        self, source: EnvironmentSource, config: Config, episodes: Mapping[str, Trajectory], chat: Chat | None = None
    ):
        super().__init__(source, chat, None, config)
        self._episodes = episodes

    def begin(self, task: Task, seat: Seat, sampling: SamplingConfig) -> Episode:
        return ReplayEpisode(task, seat, self.config, self._episodes[seat.id], self.chat)


def recorded_turn(episode: Trajectory, index: int, tools: Tools, chat: Chat | None) -> AssistantTurn:
    """The policy's turn at `index`, as the environment saw it."""
    if episode.turns:
        turn = episode.turns[index]
        return chat.parse(turn.prompt_ids, turn.response_ids, tools).turn
    return endpoint_policy.read(endpoint_policy.assistant_messages(episode.messages, episode.replies)[index])


def graded(episode: Trajectory) -> bool:
    """Whether the environment scored it: a truncated one may have ended before that."""
    return episode.status in (Status.SUCCESS, Status.FAILURE)


async def regrade(
    player: ReplayPlayer, places: Sequence[tuple[Task, Seat]], store: Store, on_episode=lambda: None
) -> dict[str, Trajectory]:
    """Outcomes of episodes played again, by id; those that the store has are not."""

    async def one(task: Task, seat: Seat) -> None:
        store.add(await player.play(task, seat))
        on_episode()

    jobs = [lambda t=t, s=s: one(t, s) for t, s in store.missing(places)]
    await run_bounded(jobs, player.concurrency)
    return {seat.id: store.outcome(seat.id) for _, seat in places}


def same_grade(first: Trajectory, second: Trajectory) -> bool:
    """Whether both ended after as many turns with the same reward."""
    return (first.reward, first.length) == (second.reward, second.length)
