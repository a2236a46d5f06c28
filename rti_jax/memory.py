"""Bytes that a device holds at the peak of an update, by formulas; docs/plan.md compares them with TPU's compiler.

The peak is in `accumulate` (learner.py) at the longest bucket: weights and gradients, what the forward pass keeps for
the backward pass, and the working set of what is being computed. Optimizer state and a colocated engine wait beside it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from models import gated_delta, names
from models.names import Tensor
from rti_jax import learner
from rti_jax.config import Config
from rti_jax.logprobs import chunk_columns, kept_bytes
from rti_jax.optimizer import make_optimizer, total_updates

FLOAT32 = 4
SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
FULL, LINEAR = "full_attention", "linear_attention"


def learner_parts(model: Any, config: Config, mesh: Any, rows: int, length: int) -> dict[str, float]:
    """Bytes of the learner on one device, by what they are for; the workspace is the larger of `workspaces`.

    With `optimizer.offload` the moments are on the device while they are applied, when a micro-batch's gradients,
    activations and workspace are not: "optimizer" is what they need beyond the room of these.

    Args:
      model: models.hf.LanguageModel. mesh: of the run, abstract or not.
      rows: of a micro-batch that a device takes part in. length: of these rows; the device has its share of the tokens.
    """
    weights, moments = held(parameters(model, mesh)), moment_bytes(model, config, mesh)
    # Summed over micro-batches; this micro-batch's; and those of corrected tokens alone, for the norms by source.
    gradients = 2 + bool(config.rti.enabled and config.rti.attempts or config.loss.baseline == "luffy")
    passing = {
        "compute_weights": compute_weights(model, mesh),
        "activations": activations(model, device_tokens(mesh, rows, length), mesh.shape["context"]),
        "workspace": max(workspaces(model, mesh, rows, length).values()),
    }
    if config.optimizer.offload:
        moments = max(0.0, moments - (gradients - 1) * weights - sum(passing.values()))
    return {
        "parameters": weights,
        "gradients": gradients * weights,
        "optimizer": moments,
        "reference": weights if config.loss.kl_beta else 0.0,
        "held": weights if config.rollout.staleness and config.rti.enabled and config.rti.attempts else 0.0,
        **passing,
    }


def moment_bytes(model: Any, config: Config, mesh: Any) -> float:
    """Bytes of a device's part of the optimizer state."""
    params = parameters(model, mesh)
    optimizer = make_optimizer(config.optimizer, params, total_updates(config))
    return held(learner.abstract_state(params, optimizer, mesh).opt_state)


def host_parts(model: Any, config: Config, mesh: Any, rows: int, length: int) -> dict[str, float]:
    """Bytes that a device keeps in its host's memory: moments, and layers' inputs with remat = offload."""
    inputs = model.config.num_hidden_layers * model.config.hidden_size * SIZES[model.execution.dtype]
    offloaded = model.execution.remat == "offload"
    return {
        "optimizer": moment_bytes(model, config, mesh) if config.optimizer.offload else 0.0,
        "activations": float(device_tokens(mesh, rows, length) * inputs) if offloaded else 0.0,
    }


def device_tokens(mesh: Any, rows: int, length: int) -> int:
    """Tokens of these rows that one device computes."""
    return rows * length // mesh.shape["context"]


def parameters(model: Any, mesh: Any) -> Any:
    """Shapes and shardings of the float32 master weights."""
    placed = names.shardings(model.tensors, mesh)
    return names.nest(
        {
            t.path: jax.ShapeDtypeStruct(t.full_shape, jnp.float32, sharding=names.get(placed, t.path))
            for t in model.tensors
        }
    )


def held(tree: Any) -> float:
    """Bytes of a pytree of shapes with shardings on one device."""
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def count(model: Any) -> int:
    """Parameters."""
    return sum(math.prod(t.full_shape) for t in model.tensors)


def compute_weights(model: Any, mesh: Any) -> float:
    """The layers' weights in the compute dtype: XLA casts a stack once, before the loop over its layers."""
    if model.execution.dtype == "float32":
        return 0.0
    layers = parameters(model, mesh)["layers"]
    return held(layers) * SIZES[model.execution.dtype] / FLOAT32


def activations(model: Any, tokens: int, context: int = 1) -> float:
    """What the forward pass keeps on the device for its `tokens`, by `Execution.remat`.

    Args:
      context: devices that share a row; where nothing is computed again, the keys and values of all of it are kept.
    """
    layer, kinds = model.config.hidden_size * SIZES[model.execution.dtype], layer_kinds(model.config)
    if model.execution.remat == "offload":
        return float(tokens * 2 * layer)  # on the way to the host and back
    inputs = model.config.num_hidden_layers * layer
    if model.execution.remat == "full":
        return float(tokens * inputs)
    head = model.config.head_dim * SIZES[model.execution.dtype] + FLOAT32  # output, and the log of the softmax's sum
    kept = model.execution.attention != "cudnn"  # whose output no policy can name
    attended = kept * kinds.get(FULL, 0) * model.config.num_attention_heads * head
    if model.execution.remat == "attention":
        return float(tokens * (inputs + attended))
    if model.execution.remat == "dots":
        return float(tokens * (inputs + attended + sum(n * products(model, kind) for kind, n in kinds.items())))
    others = (context - 1) * kinds.get(FULL, 0) * 2 * model.config.num_key_value_heads * model.config.head_dim
    own = sum(n * residuals(model, kind) for kind, n in kinds.items())
    return float(tokens * (own + others * SIZES[model.execution.dtype]))


def workspaces(model: Any, mesh: Any, rows: int, length: int) -> dict[str, float]:
    """Working sets that follow each other: a layer's backward pass, and the head's."""
    tensor, part = mesh.shape["tensor"], length // mesh.shape["context"]
    layer = layer_workspace(model, rows * part, recurrent_share(model, mesh)) + gathered_keys(model, mesh, rows, length)
    return {"layer": layer / tensor, "logits": logits_workspace(model, rows, part) / tensor}


def gathered_keys(model: Any, mesh: Any, rows: int, length: int) -> float:
    """Keys and values of whole rows where devices share them, and their float32 gradients."""
    if mesh.shape["context"] == 1:
        return 0.0
    width = 2 * model.config.num_key_value_heads * model.config.head_dim
    return float(rows * length * width * (SIZES[model.execution.dtype] + FLOAT32))


def recurrent_share(model: Any, mesh: Any) -> int:
    """How many times its share of a recurrence a device computes: heads that cannot be split are everywhere."""
    heads, context = getattr(model.config, "linear_num_key_heads", 0), mesh.shape["context"]
    return context if heads % (mesh.shape["tensor"] * context) else 1


def layer_workspace(model: Any, tokens: int, recurrent_share: int = 1) -> float:
    """Recomputed tensors and their gradients, and the layer's gathered weights and whole gradients.

    Args:
      recurrent_share: factor of what a recurrence reads and keeps.
    """
    size, again = SIZES[model.execution.dtype], model.execution.remat != "none"

    def of(kind: str) -> float:
        weights = sum(math.prod(t.shape) for t in layer_tensors(model, kind))
        more = (recurrent_share - 1) * FLOAT32 * _delta_widths(model.config) * 1.5 if kind == LINEAR else 0.0
        return tokens * (again * residuals(model, kind) + cotangents(model, kind) + more) + weights * (size + FLOAT32)

    return max(of(kind) for kind in layer_kinds(model.config))


def logits_workspace(model: Any, rows: int, length: int) -> float:
    """A chunk's logits, probabilities and their gradient, the head in the compute dtype, and its float32 gradient.

    And all logits, where they are few enough to be kept for the backward pass.
    """
    c, size = model.config, SIZES[model.execution.dtype]
    chunk = rows * chunk_columns(rows, length, c.vocab_size) * c.vocab_size
    head, hidden = c.hidden_size * c.vocab_size, rows * length * c.hidden_size
    kept = kept_bytes(rows, length, c.vocab_size)
    return chunk * (2 * FLOAT32 + size) + kept + head * (size + FLOAT32) + 2 * hidden * size


def layer_kinds(config: Any) -> dict[str, int]:
    """How many layers of each kind there are."""
    kinds = list(getattr(config, "layer_types", ())) or [FULL] * config.num_hidden_layers
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def layer_tensors(model: Any, kind: str) -> list[Tensor]:
    """The tensors of one layer of a kind."""
    number = (list(getattr(model.config, "layer_types", ())) or [FULL]).index(kind)
    return [t for t in model.tensors if number in t.layers]


def products(model: Any, kind: str) -> float:
    """Bytes per token of a layer's products with weights; the norms' scales and biases are vectors."""
    outputs = [t.shape[-1] for t in layer_tensors(model, kind) if len(t.shape) == 2]
    return float(SIZES[model.execution.dtype] * sum(outputs))


def residuals(model: Any, kind: str) -> float:
    """Bytes per token that a layer's gradient needs of its forward pass: inputs of products, of norms and of gates."""
    c, size = model.config, SIZES[model.execution.dtype]
    around = size * (3 * c.hidden_size + 3 * c.intermediate_size)  # two normed inputs, their sum; gate, up, product
    if kind == LINEAR:
        return around + size * (3 * (2 * c.key_dim + c.value_dim) + 2 * c.value_dim) + FLOAT32 * _delta_widths(c)
    gate = len(getattr(c, "layer_types", ())) > 0  # Qwen3.5 gates attention's output
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return around + size * ((3 + 2 * gate) * heads + 3 * kv)  # before and after norm and rotation; output


def cotangents(model: Any, kind: str) -> float:
    """Bytes per token of gradients that a layer's backward pass holds at once."""
    c, size = model.config, SIZES[model.execution.dtype]
    mlp = size * (2 * c.hidden_size + 3 * c.intermediate_size)
    if kind == LINEAR:
        return max(mlp, size * 3 * c.value_dim + FLOAT32 * _delta_widths(c) / 2)
    return mlp


def _delta_widths(c: Any) -> float:
    """Float32 numbers per token that the gated delta rule keeps (models/gated_delta.py, in its order)."""
    chunk, heads = gated_delta.CHUNK, c.linear_num_value_heads
    key, value = heads * c.linear_key_head_dim, heads * c.linear_value_head_dim
    states = key * c.linear_value_head_dim / chunk  # one at the start of each chunk
    within = 5 * heads * chunk  # decays, system, inverse, products of keys, scores
    return 2 * c.key_dim + 5 * value + 4 * key + within + states


def cache_bytes(model: Any, dtype: str) -> tuple[float, float]:
    """(bytes per token, bytes per sequence) that an engine keeps: keys and values, and states of linear layers."""
    c, kinds = model.config, layer_kinds(model.config)
    per_token = 2 * kinds.get(FULL, 0) * c.num_key_value_heads * c.head_dim * SIZES[dtype]
    if not kinds.get(LINEAR):
        return float(per_token), 0.0
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * FLOAT32
    window = (c.linear_conv_kernel_dim - 1) * (2 * c.key_dim + c.value_dim) * SIZES[dtype]
    return float(per_token), float(kinds[LINEAR] * (state + window))
