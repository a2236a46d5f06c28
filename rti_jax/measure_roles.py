"""`rti eval CONFIG --roles`: the measurement of rti_jax/role_eval.py on a policy, with its engine and its scorer."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from envs.base import Task
from rti_jax import frozen, policies, role_eval, rollout, runs
from rti_jax import roles as roles_lib
from rti_jax.config import Config, ConfigError
from rti_jax.environments import environment_source
from rti_jax.eval_play import COLUMNS
from rti_jax.logprobs import Scorer
from rti_jax.runtime import Policy
from rti_jax.task_sets import limited


def main(
    config: Config, output: pathlib.Path | None = None, step: int | None = None, turns: pathlib.Path | None = None
) -> int:
    """Measures `model.path`, or the checkpoint of `step` of the config's run; writes one JSON file, prints the table.

    Args:
      turns: judge the turns of this earlier measurement.

    Raises:
      ConfigError: an endpoint, several splits, or an environment without a scripted expert.
    """
    if config.eval.endpoint.url:
        raise ConfigError("--roles needs the policy's own weights (for perplexities), not an endpoint")
    if config.eval.splits:
        raise ConfigError(f"--roles measures one split, not eval.splits={config.eval.splits}; give --split NAME")
    return asyncio.run(_main(config, output, step, role_eval.read_turns(turns) if turns else []))


async def _main(config: Config, output, step: int | None, recorded: Sequence[role_eval.Recorded]) -> int:
    source = environment_source(config.env)
    source.check()
    role_eval.check(source.cls)
    tasks = source.tasks(config.eval.split, "eval.split")
    tasks = tasks if recorded else limited(tasks, config.eval.limit)
    policy = policies.restored(config, step)
    async with policies.engine_player(config, source, policy, step) as player:
        with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
            bar = progress.add_task("turns" if recorded else "episodes", total=len(recorded) or len(tasks))
            result, lines = await _ask_roles(player, policy, tasks, config, recorded, lambda *_: progress.advance(bar))
    name = f"{config.eval.split}_roles_{'model' if step is None else f'step_{step:06d}'}.json"
    path = output or config.run_dir / "evals" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(path, {"model": config.model.path, "step": step, "split": config.eval.split, **result})
    runs.write_lines(path.with_suffix(".jsonl"), map(dataclasses.asdict, lines))
    Console().print(role_eval.table(result))
    print(f"wrote {path} and every judged turn beside it")
    return 0


async def _ask_roles(player: rollout.Player, policy: Policy, tasks: Sequence[Task], config, recorded, on_episode):
    """(summary, judged turns); see role_eval."""
    scorer = Scorer(policy.model, policy.mesh, config.sampling.temperature, config.batch.buckets)

    async def score(rows):
        return await asyncio.to_thread(scorer.score, policy.params, rows)

    endpoints, folders = roles_lib.connect(config.rti), config.rti.role_folders
    for role, folder in folders.items():
        frozen.check_vocabulary(player.chat, folder, f"rti.roles.{role}.model")
    async with frozen.serving(folders, config) as engines:
        team = roles_lib.Roles(player.chat, player.engine, config.sampling, config.rti, endpoints, engines)
        return await role_eval.measure(player, team, score, tasks, recorded=recorded, on_episode=on_episode)
