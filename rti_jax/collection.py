"""The groups that a step trains: rollouts, then what the method or a baseline does to the groups that failed entirely.

With `rollout.max_rounds` above 1 (DAPO's dynamic sampling, arXiv 2503.14476) a step plays further tasks until enough
groups have a gradient, intervention included.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from envs.base import Task
from rti_jax import intervention, intervention_metrics, luffy, summary
from rti_jax.advantages import with_gradient
from rti_jax.config import Config
from rti_jax.engine_errors import EngineError
from rti_jax.environments import sample_tasks
from rti_jax.metrics import Recorder
from rti_jax.roles import Roles
from rti_jax.rollout import Player
from rti_jax.types import Group


class Collection:
    """Plays a step's groups.

    Args:
      tasks: that are trained. score: the learner's scorer, for corrections. teacher: of LUFFY; None without it.
      timed: context manager that adds to the seconds of a phase.
    """

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        player: Player,
        roles: Roles,
        score: intervention.Score,
        teacher: luffy.Guide | None,
        recorder: Recorder,
        timed: Callable[[str], AbstractContextManager],
    ):
        self.config, self.tasks, self.player, self.roles, self.teacher = config, tasks, player, roles, teacher
        self._score, self._recorder, self._timed = score, recorder, timed
        self._intervenes = config.rti.enabled and config.rti.attempts > 0

    async def __call__(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """Groups of the step as they are trained, and their metrics.

        Raises:
          EngineError: not one episode could be played.
        """
        rollout = self.config.rollout
        tasks: list[Task] = []
        played: list[Group] = []
        groups: list[Group] = []
        guided: list[dict[str, float]] = []
        for n in range(rollout.max_rounds):
            drawn = step * rollout.max_rounds + n
            more = sample_tasks(self.tasks, drawn, rollout.groups_per_step, self.config.seed, rollout.mix)
            fresh = await self._roll_out(more, step, n)
            tasks, played = tasks + more, played + fresh
            helped, counts = await self._help(fresh, more, step)
            groups, guided = groups + helped, [*guided, counts]
            if len(with_gradient(groups)) >= rollout.groups_per_step:
                break
        if not any(g.valid for g in played):
            raise EngineError(f"no episode of step {step + 1} could be played: {summary.first_error(played)}")
        metrics = summary.group_metrics(played, tasks) | {"rollout/rounds": float(len(guided))}
        metrics |= {name: sum(counts[name] for counts in guided) for name in guided[0]}
        if self._intervenes:
            metrics |= summary.after(groups) | intervention_metrics.statistics(groups, self.roles.pop_usage())
        elif self.teacher:
            metrics |= summary.after(groups)
        metrics["rollout/sampled_tokens"] = summary.sampled_tokens(metrics)
        return capped(groups, rollout.groups_per_step), metrics

    async def _roll_out(self, tasks: Sequence[Task], step: int, n: int) -> list[Group]:
        episodes = len(tasks) * self.config.rollout.group_size
        with self._timed("rollout"), self._recorder.episodes("rollouts", episodes) as seen:
            stream = "train" if n == 0 else f"train.{n}"
            return await self.player.collect(tasks, step=step, stream=stream, on_episode=seen)

    async def _help(
        self, groups: list[Group], tasks: Sequence[Task], step: int
    ) -> tuple[list[Group], dict[str, float]]:
        """The groups after intervention, or with a teacher's rollouts, and what to count of the latter."""
        if self.teacher:
            with self._timed("teacher"):
                return await luffy.guide(groups, tasks, self.teacher, self.config, step=step)
        if not self._intervenes:
            return groups, {}
        waiting = sum(map(intervention.triggered, groups))
        with self._timed("intervention"), self._recorder.episodes("interventions", waiting) as seen:
            helped = await intervention.intervene(
                groups, tasks, self.player, self.roles, self._score, self.config, step=step, on_episode=seen
            )
        return helped, {}


def capped(groups: Sequence[Group], limit: int) -> list[Group]:
    """The groups without those that have a gradient beyond the first `limit`: a step trains no more."""
    surplus = {g.id for g in with_gradient(groups)[limit:]}
    return [g for g in groups if g.id not in surplus]
