"""What plays in an evaluation: a Hugging Face folder, a checkpoint of a run, or another model's endpoint.

`identify` says which one it is before anything is started, so that recorded episodes can be told from another
policy's; `opened` starts it.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from rti_jax import checkpoint, endpoint_policy, fingerprint, weight_sync
from rti_jax.chat import Chat
from rti_jax.config import Config, ConfigError
from rti_jax.engine import make_engine
from rti_jax.environments import EnvironmentSource
from rti_jax.eval_setup import Identity
from rti_jax.rollout import Player
from rti_jax.runtime import Policy, check_folder, load_policy


async def identify(config: Config, step: int | None = None) -> Identity:
    """The policy that a config names: its endpoint, else the checkpoint of `step`, else `model.path`.

    Raises:
      ConfigError: two policies are named, or there is no such folder or checkpoint.
      EngineDiedError: the endpoint cannot be reached or refuses the key.
    """
    if config.eval.endpoint.url:
        if step is not None:
            raise ConfigError(
                f"eval.endpoint.url={config.eval.endpoint.url} and a run's checkpoint are two policies; leave one out "
                "(eval.endpoint.url= for none)"
            )
        name = config.eval.endpoint.model or await _first_model(config)
        return Identity("eval.endpoint.model", name, fingerprint.of_bytes(f"endpoint {name}".encode()))
    folder = check_folder(config.model.path)
    if step is None:
        return Identity("model.path", str(config.model.path), fingerprint.of_folder(folder))
    saved = config.run_dir / "checkpoints" / str(step)
    if reason := checkpoint.fault(saved):
        there = [str(s) for s in usable_steps(config)]
        has = f"there are {', '.join(there)}" if there else "there is none"
        raise ConfigError(f"checkpoint {saved}: {reason} ({has})")
    marker = fingerprint.of_bytes((saved / checkpoint.MARKER).read_bytes())
    return Identity("step", f"{config.run_dir}, step {step}", marker)


async def _first_model(config: Config) -> str:
    endpoint = endpoint_policy.connect(config.eval.endpoint)
    try:
        return await endpoint.connect()
    finally:
        await endpoint.close()


def usable_steps(config: Config) -> list[int]:
    """Steps of the run's checkpoints that are whole, newest first."""
    folder = config.run_dir / "checkpoints"
    return [s for s in checkpoint.steps(folder) if checkpoint.fault(folder / str(s)) is None]


def chosen_step(config: Config, step: int | str | None) -> int | None:
    """The step, for "newest" that of the run's newest whole checkpoint. Raises ConfigError if there is none."""
    if not isinstance(step, str):
        return step
    if steps := usable_steps(config):
        return steps[0]
    raise ConfigError(f"{config.run_dir} has no checkpoint yet; give a model: rti eval CONFIG model.path=...")


@contextlib.asynccontextmanager
async def opened(config: Config, source: EnvironmentSource, step: int | None = None) -> AsyncIterator[Player]:
    """A player of the policy that `identify` names; its engine or its connections are closed afterwards."""
    if config.eval.endpoint.url:
        endpoint = endpoint_policy.connect(config.eval.endpoint)
        try:
            await endpoint.connect()
            yield endpoint_policy.EndpointPlayer(source, endpoint, config)
        finally:
            await endpoint.close()
        return
    async with engine_player(config, source, restored(config, step) if step is not None else None, step) as player:
        yield player


@contextlib.asynccontextmanager
async def engine_player(
    config: Config, source: EnvironmentSource, policy: Policy | None = None, step: int | None = None
) -> AsyncIterator[Player]:
    """A player with vLLM on `model.path`, or with a policy's weights in it as those after `step` updates."""
    check_folder(config.model.path)
    chat = Chat.from_folder(config.model.path, thinking=config.sampling.thinking)
    engine = await asyncio.to_thread(make_engine, config.model.path, config)
    try:
        if policy is not None and step is not None:
            await weight_sync.sync(engine, policy.model, policy.params, version=max(1, step))
        yield Player(source, chat, engine, config)
    finally:
        await engine.close()


def restored(config: Config, step: int | None) -> Policy:
    """The learner's policy: `model.path`, or the run's checkpoint of `step`."""
    policy = load_policy(config)
    if step is None:
        return policy
    params = checkpoint.restore_params(config.run_dir / "checkpoints", policy.params, step)[1]
    return dataclasses.replace(policy, params=params)
