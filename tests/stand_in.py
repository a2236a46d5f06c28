"""A model of two small layers for tests of the learner: causal, segment-aware, a pair of pure functions as any model.

As a script it prints what a few updates give as JSON, so that a test can run it on other numbers of devices
(`forced_devices`). There it also gives loss and gradient on several meshes, in several micro-batches, in float32 and
float64.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from rti_jax import batching, learner
from rti_jax.config import Config
from rti_jax.types import Correction, Group, Status, Trajectory, Turn

VOCAB, WIDTH, LAYERS = 40, 16, 2


def forced_devices(count: int) -> str:
    """XLA_FLAGS for so many devices on a CPU.

    Without the second one a program of many collectives can stop on few cores: those that may run beside each other
    block the threads that the others wait for.
    """
    return f"--xla_force_host_platform_device_count={count} --xla_cpu_enable_concurrency_optimized_scheduler=false"


class StandIn:
    """x <- x + tanh(mean of the segment so far * scale @ kernel), tied head."""

    def hidden(self, params, tokens, positions, segment_ids):
        x = params["embed_tokens"]["embedding"][tokens]
        length = tokens.shape[1]
        before = jnp.tril(jnp.ones((length, length), bool))
        seen = before & (segment_ids[:, :, None] == segment_ids[:, None, :])
        weights = seen / seen.sum(-1, keepdims=True)
        for i in range(LAYERS):
            layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
            mixed = jnp.einsum("BTS,BSD->BTD", weights, x) * layer["norm"]["scale"]
            x = x + jnp.tanh(mixed @ layer["mixer"]["kernel"] + layer["mixer"]["bias"])
        return x

    def head(self, params):
        return params["embed_tokens"]["embedding"].T


def mesh(devices=None, shape=None):
    """Of the first devices; `shape` is (data, fsdp, tensor)."""
    count = devices or jax.device_count()
    data = 2 if count % 2 == 0 else 1
    shape = shape or (data, count // data, 1)
    return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "fsdp", "tensor"))


def init_params(on, dtype=np.float32):
    """The same numbers on every mesh, sharded over fsdp, matrices over tensor too."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(0, 0.4, shape).astype(np.float32).astype(dtype)

    def spec(x):
        matrix = x.shape[-2] > LAYERS
        return PartitionSpec(*[None] * (x.ndim - 2), "tensor" if matrix else None, "fsdp")

    params = {
        "embed_tokens": {"embedding": draw(VOCAB, WIDTH)},
        "layers": {
            "mixer": {"kernel": draw(LAYERS, WIDTH, WIDTH), "bias": draw(LAYERS, WIDTH)},
            "norm": {"scale": 1 + draw(LAYERS, WIDTH)},
        },
    }
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, spec(x))), params)


def make_config(**sections):
    defaults = {
        "batch": {"buckets": [32], "rows_per_microbatch": 2},
        "optimizer": {"lr": 1e-2},
        "sampling": {"temperature": 0.8},
        "steps": 10,
    }
    return Config.model_validate(
        {k: {**v, **sections.pop(k, {})} if isinstance(v, dict) else v for k, v in defaults.items()} | sections
    )


def make_groups(corrected=True, count=3, seed=0):
    """Groups of four of unequal lengths, one success each; a turn of the first group's was written by the corrector."""
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return tuple(rng.integers(1, VOCAB, rng.integers(low, high)).tolist())

    def member(group, index):
        prompt, first, between, second = ids(3, 6), ids(1, 6), ids(1, 3), ids(1, 8)
        scores = tuple(rng.uniform(-5, -2, len(second)).tolist()), tuple(rng.uniform(-4, -2, len(second)).tolist())
        correction = Correction(ids(1, 3), *scores) if corrected and group == "0" and index == 1 else None
        name = f"{group}/{index}"
        turns = (
            Turn(f"{name}/0", prompt, first, tuple(rng.uniform(-4, -3, len(first)).tolist()), "stop", 0),
            Turn(f"{name}/1", prompt + first + between, second, (-3.5,) * len(second), "stop", 0, correction),
        )
        success = index == 1
        return Trajectory(
            name, group, index, group, turns, Status.SUCCESS if success else Status.FAILURE, float(success)
        )

    return [Group(str(g), str(g), tuple(member(str(g), i) for i in range(4))) for g in range(count)]


def run(config, on, groups, updates=2, shift=0.1, **options):
    """State and metrics after some updates whose behaviour is the initial policy's, moved by up to `shift`."""
    model, params = StandIn(), init_params(on)
    optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
    state = learner.init_state(params, optimizer, on)
    logprobs = learner.make_logprobs_step(model, config, on)
    batches = batching.build(groups, config, row_multiple=learner.row_multiple(on)).microbatches
    batches = [batching.with_behavior(b, logprobs(params, b) + shift * np.sin(b.tokens)) for b in batches]
    update = learner.make_update_step(model, config, on, optimizer, **options)
    history = []
    for _ in range(updates):
        state, metrics = update(state, batches)
        history.append(metrics)
    return state, history, update


def loss_and_gradient(on, batch, dtype=np.float32):
    """Loss and gradient of the whole batch, the latter from a step of gradient descent with rate 1."""
    config, params = make_config(batch=batch), init_params(on, dtype)
    before = jax.tree.map(np.asarray, params)
    batches = batching.build(make_groups(), config, row_multiple=learner.row_multiple(on)).microbatches
    batches = [batching.with_behavior(b, -3.5 + 0.5 * np.sin(b.tokens)) for b in batches]
    optimizer = optax.sgd(1.0)
    update = learner.make_update_step(StandIn(), config, on, optimizer)
    state, metrics = update(learner.init_state(params, optimizer, on), batches)
    gradient = jax.tree.leaves(jax.tree.map(lambda a, b: np.ravel(a - np.asarray(b)), before, state.params))
    return {"loss": metrics["loss/total"], "gradient": np.concatenate(gradient).tolist(), "microbatches": len(batches)}


WHOLE, SPLIT = {"buckets": [32], "rows_per_microbatch": 16}, {"buckets": [24], "rows_per_microbatch": 1}
MESHES = {  # name -> mesh, micro-batches
    "1": ((1, 1, 1), WHOLE),
    "1, split": ((1, 1, 1), SPLIT),
    "8 fsdp": ((1, 8, 1), WHOLE),
    "2 x 2 x 2, split": ((2, 2, 2), SPLIT),
}


if __name__ == "__main__":
    exact = {name: loss_and_gradient(mesh(shape=shape), batch) for name, (shape, batch) in MESHES.items()}
    with jax.enable_x64(True):
        wide = {name: loss_and_gradient(mesh(shape=s), b, np.float64) for name, (s, b) in MESHES.items()}
    state, history, update = run(make_config(), mesh(), make_groups(), norms_by_source=True)
    kernel = state.params["layers"]["mixer"]["kernel"]
    held = [kernel, *(x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape)]
    result = {
        "devices": jax.device_count(),
        "history": history,
        "kernel": np.asarray(kernel).ravel().tolist(),
        "shards": [x.addressable_shards[0].data.shape for x in held],
        "programs": {name: update.compiled_programs(name) for name in ("accumulate", "apply", "corrected")},
    }
    json.dump(result | {"float32": exact, "float64": wide}, sys.stdout)
