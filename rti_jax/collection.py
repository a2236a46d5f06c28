"""The groups that a step trains: rollouts, then what the method or a baseline does to the groups that failed entirely.

With `rollout.max_rounds` above 1 (DAPO's dynamic sampling, arXiv 2503.14476) a step plays further tasks until enough
groups have a gradient, intervention included. On several hosts each plays its share of the tasks.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from envs.base import Task
from rti_jax import intervention, intervention_metrics, luffy, recorded, summary
from rti_jax.advantages import with_gradient
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import EngineError
from rti_jax.environments import sample_tasks
from rti_jax.hosts import Hosts
from rti_jax.joint_scoring import JointScorer
from rti_jax.metrics import Recorder, Unrecorded
from rti_jax.roles import Roles, added
from rti_jax.rollout import Player
from rti_jax.runs import group_lines, plain
from rti_jax.types import Group


class Collected(NamedTuple):
    """The groups of a step as they are trained.

    Attributes:
      own: of this host. numbers: of these among those of all hosts; total: how many these are.
      everyone: of all hosts in process 0, elsewhere own. metrics: of all hosts; in process 0 alone all of them.
    """

    own: list[Group]
    numbers: range
    total: int
    everyone: list[Group]
    metrics: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """What `restored` needs, as JSON values; process 0's holds all hosts' groups."""
        return {"groups": list(map(plain, group_lines(self.everyone, {}))), "metrics": plain(self.metrics)}

    @classmethod
    def restored(cls, data: Mapping[str, Any], hosts: Hosts) -> "Collected":
        """The batch of `as_json`, divided among the hosts of now.

        Raises:
          ConfigError: it is something else.
        """
        try:
            everyone = recorded.groups(data["groups"])
            metrics = {name: math.nan if value is None else value for name, value in data["metrics"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the checkpoint's next batch cannot be read ({type(error).__name__}: {error}); was it made by another "
                "version?"
            ) from error
        numbers = hosts.share(len(everyone))
        own = [everyone[i] for i in numbers]
        return cls(own, numbers, len(everyone), everyone if hosts.first else own, metrics)


class Collection:
    """Plays a step's groups.

    Args:
      tasks: that are trained. scorer: the learner's, for corrections. teacher: of LUFFY; None without it.
      timed: context manager that adds to the seconds of a phase.
    """

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        player: Player,
        roles: Roles,
        scorer: JointScorer,
        teacher: luffy.Guide | None,
        recorder: Recorder | Unrecorded,
        timed: Callable[[str], AbstractContextManager],
        hosts: Hosts,
    ):
        self.config, self.tasks, self.player, self.roles, self.teacher = config, tasks, player, roles, teacher
        self._scorer, self._recorder, self._timed, self._hosts = scorer, recorder, timed, hosts
        self.intervenes, self._ever_played = config.rti.enabled and config.rti.attempts > 0, False

    async def __call__(self, step: int) -> Collected:
        """Plays the groups of the step. Every host calls it.

        Raises:
          EngineError: not one episode could be played, and none since the process began.
        """
        rollout, hosts = self.config.rollout, self._hosts
        tasks: list[Task] = []
        played: list[Group] = []
        groups: list[Group] = []
        guided: list[dict[str, float]] = []
        for n in range(rollout.max_rounds):
            drawn = step * rollout.max_rounds + n
            more = sample_tasks(self.tasks, drawn, rollout.groups_per_step, self.config.seed, rollout.mix)
            own = hosts.share(len(more))
            fresh = await self._roll_out([more[i] for i in own], own, step, n)
            tasks, played = tasks + more, played + fresh
            helped, counts = await self._help(fresh, more, step)
            groups, guided = groups + helped, [*guided, counts]
            if len(with_gradient(groups)) >= rollout.groups_per_step:
                break
        self._ever_played |= any(hosts.exchange(any(g.valid for g in played)))
        if not self._ever_played:  # rather a mistake in the setup than an outage, which stop.dropped_steps waits for
            raise EngineError(f"no episode of step {step + 1} could be played: {summary.first_error(played)}")
        trained = capped(groups, rollout.groups_per_step)
        numbers = range(len(trained)) if hosts.alone else own  # on several hosts there is one round, and no surplus
        costs = self.roles.pop_usage() if self.intervenes else {}, self.player.pop_usage()
        self._recorder.collected(step + 1, {"policy": costs[1], **costs[0]})
        gathered = hosts.collect((played, groups, *costs))
        if not hosts.first:
            return Collected(trained, numbers, len(tasks), trained, {"rollout/groups": float(len(tasks))})
        before, after = (hosts.in_order([part[i] for part in gathered]) for i in (0, 1))
        metrics = summary.group_metrics(before, tasks) | {"rollout/rounds": float(len(guided))}
        policy = added([{"policy": part[3]} for part in gathered])["policy"]
        metrics |= {f"rollout/policy_{name}": float(cost) for name, cost in dataclasses.asdict(policy).items()}
        if not self.player.offers_tools:
            del metrics["rollout/tool_calls"]
        metrics |= {name: sum(counts[name] for counts in guided) for name in guided[0]}
        if self.intervenes:
            usage = added([part[2] for part in gathered])
            metrics |= summary.after(after) | intervention_metrics.statistics(after, usage)
        elif self.teacher:
            metrics |= summary.after(after)
        metrics["rollout/sampled_tokens"] = summary.sampled_tokens(metrics)
        everyone = trained if hosts.alone else after
        return Collected(trained, numbers, len(everyone), everyone, metrics)

    async def _roll_out(self, tasks: Sequence[Task], numbers: range, step: int, n: int) -> list[Group]:
        episodes = len(tasks) * self.config.rollout.group_size
        with self._timed("rollout"), self._recorder.episodes("rollouts", episodes) as seen:
            stream = "train" if n == 0 else f"train.{n}"
            told = self._hosts.living(seen)
            return await self.player.collect(tasks, step=step, stream=stream, numbers=numbers, on_episode=told)

    async def _help(
        self, groups: list[Group], tasks: Sequence[Task], step: int
    ) -> tuple[list[Group], dict[str, float]]:
        """The groups after intervention, or with a teacher's rollouts, and what to count of the latter."""
        if self.teacher:
            with self._timed("teacher"):
                return await luffy.guide(groups, tasks, self.teacher, self.config, step=step)
        if not self.intervenes:
            return groups, {}
        waiting = sum(map(intervention.triggered, groups))
        with self._timed("intervention"), self._recorder.episodes("interventions", waiting) as seen:
            told = self._hosts.living(seen)
            work = intervention.intervene(
                groups, tasks, self.player, self.roles, self._scorer, self.config, step=step, on_episode=told
            )
            return await self._scorer.during(work), {}


def capped(groups: Sequence[Group], limit: int) -> list[Group]:
    """The groups without those that have a gradient beyond the first `limit`: a step trains no more."""
    surplus = {g.id for g in with_gradient(groups)[limit:]}
    return [g for g in groups if g.id not in surplus]
