"""The tasks of a run: what it trains and what it evaluates."""

from typing import NamedTuple

from envs.base import Task
from rti_jax import evaluate, luffy, replay, role_eval, roles, task_sets
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource, environment_source, sample_tasks


class RunTasks(NamedTuple):
    """The environment, and what is trained and what is evaluated."""

    source: EnvironmentSource
    trained: list[Task]
    held_out: list[Task]

    @classmethod
    def load(cls, config: Config) -> "RunTasks":
        """Raises ConfigError for unknown splits, tasks in both, and what would stop the run at its first step."""
        if config.sampling.max_context > max(config.batch.buckets):
            raise ConfigError(
                f"sampling.max_context={config.sampling.max_context} lets rows grow beyond the largest of "
                f"batch.buckets={config.batch.buckets}; add a bucket or lower it"
            )
        source = environment_source(config.env)
        source.check()
        trained, held_out = task_sets.trained(source, config), task_sets.held_out(source, config)
        evaluate.check_disjoint(trained, held_out)
        roles.RolePrompts(config.rti.prompts)
        replay.check(config)
        if config.eval.roles:
            role_eval.check(source.cls)
        if config.loss.teacher.rollouts:
            luffy.read_episodes(config.loss.teacher.rollouts)
        sample_tasks(trained, 0, config.rollout.groups_per_step, config.seed, config.rollout.mix)
        return cls(source, trained, task_sets.limited(held_out, config.eval.limit))
