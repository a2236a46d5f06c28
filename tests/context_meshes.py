"""Loss, gradient and scores of tiny models on meshes, also where devices share rows (axis context), against one device.

As a script, on eight devices (XLA_FLAGS as `stand_in.forced_devices(8)` gives them), it prints, as JSON, the largest
differences for each model and mesh, relative to the largest gradient of a parameter.
"""

import functools
import json
import sys

import jax
import numpy as np
import optax
from stand_in import make_config, make_groups

from models import attention, hf, names
from models.accelerated_attention import splash
from rti_jax import batching, learner, logprobs

AXES = ("data", "fsdp", "tensor", "context")
MESHES = {  # name -> devices of each axis
    "fsdp": (1, 8, 1, 1),
    "data x fsdp x tensor": (2, 2, 2, 1),
    "data x context": (2, 1, 1, 2),
    "fsdp x context": (1, 2, 1, 4),
    "tensor x context": (1, 1, 2, 2),
    "fsdp x tensor x context": (1, 2, 2, 2),
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
MODELS = {"dense": SIZES | {"model_type": "qwen3"}, "hybrid": SIZES | RECURRENT | {"model_type": "qwen3_5_text"}}
BATCH = {"buckets": [32], "rows_per_microbatch": 8}  # packed rows, so that segments begin and end within every part


def mesh(shape):
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=axis_types, devices=jax.devices()[: np.prod(shape)])


def make_model(name: str, on, dtype: str, remat: str = "none"):
    """A model and its parameters, the same numbers on every mesh."""
    raw = MODELS[name]
    config = hf.family(raw["model_type"]).Config.from_hf(raw)
    execution = hf.Execution(dtype=dtype, remat=remat, mesh=on)
    model = hf.LanguageModel(config, raw["model_type"], None, execution)
    rng, placed = np.random.default_rng(0), model.shardings()

    def draw(tensor):
        centre = len(tensor.shape) == 1 and name == "dense"
        values = (centre + rng.normal(0, 0.3, tensor.full_shape)).astype(dtype)
        return jax.device_put(values, names.get(placed, tensor.path))

    return model, names.nest({t.path: draw(t) for t in model.tensors})


def packed(on):
    """A micro-batch of rows that hold several segments."""
    config = make_config(batch=BATCH)
    (batch,) = batching.build(make_groups(), config, row_multiple=learner.row_multiple(on)).microbatches
    return batching.with_behavior(batch, -3.5 + 0.5 * np.sin(batch.tokens))


def loss_and_gradient(name: str, shape, dtype: str):
    """A sum over log-probabilities and entropies, weighted by both signs, and its gradient."""
    on = mesh(shape)
    model, params = make_model(name, on, dtype)
    batch = packed(on)

    def loss(params):
        hidden = model.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        both = logprobs.token_logprobs(
            hidden,
            model.head(params),
            batch.tokens,
            batch.segment_ids,
            0.8,
            entropy=True,
            entropy_gradient=True,
            mesh=on,
        )
        return (both[0] * np.sin(batch.tokens) + both[1] * np.cos(3 * batch.tokens)).sum()

    placed = jax.tree.map(lambda p: p.sharding, params)
    value, gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, placed))(params)
    return float(value), jax.tree.map(np.asarray, gradient)


def update(name: str, shape, dtype: str):
    """Loss of the learner's update, with layers computed again, and its gradient: a step of descent with rate 1."""
    on = mesh(shape)
    model, params = make_model(name, on, dtype, remat="full")
    before = jax.tree.map(np.asarray, params)
    optimizer = optax.sgd(1.0)
    step = learner.make_update_step(model, make_config(batch=BATCH), on, optimizer)
    state, metrics = step(learner.init_state(params, optimizer, on), [packed(on)])
    return metrics["loss/total"], jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)


def differences(expected, got) -> dict[str, float]:
    """Of the loss, relative to itself, and of each parameter's gradient, relative to its largest element."""
    (loss, gradient), (other_loss, other) = expected, got
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(a).max()), gradient, other)
    return {"loss": abs(other_loss / loss - 1), "gradient": max(jax.tree.leaves(apart))}


def compare(one, name: str, dtype: str, meshes) -> dict[str, dict[str, float]]:
    """`differences` between one device and each mesh, of what `one` gives."""
    expected = one(name, (1, 1, 1, 1), dtype)
    return {key: differences(expected, one(name, MESHES[key], dtype)) for key in meshes}


def scores(name: str, shape, rows):
    model, params = make_model(name, mesh(shape), "float32")
    return np.concatenate(logprobs.Scorer(model, model.mesh, 0.8, [15, 64]).score(params, rows))


def splash_apart() -> float:
    """Splash attention, interpreted, on two devices that share rows against one device with all of them."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(2, 256, n, 128)).astype(np.float32) for n in (2, 1, 1))
    ids = np.stack([np.repeat([1, 2, 3, 4], [100, 30, 100, 26]), np.ones(256)]).astype(np.int32)
    run = jax.jit(functools.partial(splash, interpret=True), static_argnums=(4, 5))
    whole, parts = run(q, k, v, ids, None, 1), run(q, k, v, ids, mesh((2, 1, 1, 2)), 2)
    return float(np.abs(np.asarray(whole) - np.asarray(parts)).max() / np.abs(whole).max())


if __name__ == "__main__":
    attention.CPU_BLOCKS = 12, 12  # two blocks in a part of 16, the last not full
    attention.UNROLLED = 0  # smaller programs
    logprobs.chunk_columns = lambda rows, length, vocabulary, chunk=None: 5  # and several chunks of logits
    rng = np.random.default_rng(2)
    rows = [(rng.integers(0, 40, 4).tolist(), rng.integers(0, 40, n).tolist()) for n in (1, 3, 30, 9, 11, 70)]
    result = {"update": compare(update, "dense", "float32", ["fsdp x context"])}
    with jax.enable_x64(True):
        for name, meshes in (("dense", MESHES), ("hybrid", ["fsdp x tensor x context"])):
            result[name] = compare(loss_and_gradient, name, "float64", meshes)
    one, other = (scores("dense", shape, rows) for shape in ((1, 1, 1, 1), (2, 1, 1, 4)))
    result["scores"] = {"largest": float(np.abs(one).max()), "apart": float(np.abs(one - other).max())}
    model, params = make_model("dense", mesh(MESHES["fsdp x context"]), "float32")
    ids = np.ones((4, 32), np.int32)
    hidden = jax.jit(model.hidden)(params, ids, ids, ids)
    result["splash"] = splash_apart()
    result["hidden"] = hidden.sharding.shard_shape(hidden.shape)
    json.dump(result, sys.stdout)
