"""Role replay: after each update a supervised step on transcripts of the three roles, so that they stay what they were.

The roles share their weights with the agent, and every update moves them; a small policy with a large learning rate
loses them within a few dozen steps. With `rti.replay.rows` each update is followed by one step of the same optimizer
on fresh transcripts of validators, correctors and verifiers (rti_jax/transcripts.py) on training tasks. No transcript
has a turn of the agent that is trained, and no row of the reinforcement batch changes. A comparison with GRPO is fair
only if both replay, or neither.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import optax

from envs.base import Task
from rti_jax import sft
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.learner import TrainState, row_multiple
from rti_jax.runtime import Policy
from rti_jax.seeds import derive_seed
from rti_jax.transcripts import Transcripts
from rti_jax.types import ROLES


class Replay:
    """Supervised steps on role transcripts.

    Raises:
      ConfigError: the environment has no scripted transcripts.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        source: EnvironmentSource,
        tasks: Sequence[Task],
        optimizer: optax.GradientTransformation,
    ):
        check(config)
        self._config, self._chat, self._tasks = config, policy.chat, tasks
        self._env = source.make()
        self._step = sft.make_step(policy.model, optimizer, policy.mesh)
        shards = row_multiple(policy.mesh)
        self._rows = -(-config.rti.replay.rows // shards) * shards

    def __call__(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, float]]:
        """The state after one more update, on transcripts that `step` determines; the state that goes in is donated."""
        own = self._config.rti.replay
        stream = Transcripts(
            self._env,
            self._tasks,
            self._chat,
            style=self._config.rti.prompts,
            shares=dict.fromkeys(ROLES, 1.0),
            leak_share=own.leak_share,
            text_weight=0.0,
            seed=derive_seed(self._config.seed, "replay", step),
        )

        def make() -> sft.Batch:
            with contextlib.closing(iter(stream)) as rows:
                return sft.pack(sft.fitting(rows, own.row_length), self._rows, own.row_length, [], depth=8)

        with ThreadPoolExecutor(1) as pool:  # transcripts are made in an event loop of their own
            batch = pool.submit(make).result()
        state, _, answers = self._step(state, batch)
        return state, {"replay/loss": float(answers)}


def check(config: Config) -> None:
    """Raises ConfigError if replay is asked for where there are no scripted transcripts."""
    if config.rti.replay.rows and config.env.name != "navigation":
        raise ConfigError(
            f"rti.replay.rows: scripted role transcripts exist for navigation only, not {config.env.name}"
        )
    if config.rti.replay.rows and config.env.own.get("tasks_file"):  # so it is on every map but the embedded one
        raise ConfigError("rti.replay.rows: transcripts are scripted on generated tasks only, not on env.tasks_file")
