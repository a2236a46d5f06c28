"""Bytes that a device sends over the links in an update, by formulas: what our programs do, and the least for the mesh.

A ring of n devices sends (n - 1) / n of the whole for a gather or a scattered sum, twice that for a sum that all keep.
"""

import math
from typing import Any

from rti_jax import memory


def per_microbatch(model: Any, mesh: dict[str, int], tokens: int) -> dict[str, float]:
    """{"bytes": as the programs send, "ideal": the least} for one device and one micro-batch.

    The least: the compute weights gathered for the forward and for the backward pass and the float32 gradients summed
    once onto their shards. Ours gathers them as often, but the gradients of head and embedding arrive whole
    (logprobs.py, layers.py), which is twice that. Replicas (data, context) sum shards; tensor parallelism sums
    activations; devices that share rows (context) gather keys and values and scatter their gradients (`context_bytes`).

    Args:
      mesh: devices of each axis. tokens: of one device.
    """
    size, tensor, fsdp, data = memory.SIZES[model.execution.dtype], mesh["tensor"], mesh["fsdp"], mesh["data"]
    whole = memory.count(model) / tensor
    ends = sum(math.prod(t.full_shape) for t in model.tensors if not t.layers and len(t.shape) == 2) / tensor
    gathered = _ring(fsdp) * 2 * whole * size
    scattered = _ring(fsdp) * whole * memory.FLOAT32
    replicas = 2 * _ring(data * mesh["context"]) * whole / fsdp * memory.FLOAT32
    recomputed = model.execution.remat in ("attention", "full", "offload")
    sums = 4 + recomputed  # two of each layer forward, two backward, one when recomputed
    activations = 2 * _ring(tensor) * sums * model.config.num_hidden_layers * tokens * model.config.hidden_size * size
    ideal = gathered + scattered + replicas + activations + context_bytes(model, mesh["context"], tokens) / tensor
    return {"bytes": ideal + _ring(fsdp) * ends * memory.FLOAT32, "ideal": ideal}


def context_bytes(model: Any, context: int, tokens: int) -> float:
    """What a device sends because it has `tokens` of longer rows alone, forward, backward and where recomputed.

    Attention gathers the keys and values of whole rows, and sums their gradients back. A recurrence exchanges its
    tokens of all heads for all tokens of its heads, and its outputs the other way.
    """
    c, kinds, size = model.config, memory.layer_kinds(model.config), memory.SIZES[model.execution.dtype]
    passes = 2 + (model.execution.remat != "none")
    kept = 2 * c.num_key_value_heads * c.head_dim * context  # of a device's tokens, to each of the others
    sent = kinds.get(memory.FULL, 0) * kept
    if recurrent := kinds.get(memory.LINEAR, 0):
        sent += recurrent * 2 * (c.key_dim + c.value_dim + c.linear_num_value_heads)
    return passes * _ring(context) * tokens * sent * size


def host_bytes(per_device: dict[str, float], updates: int, microbatches: int) -> float:
    """Bytes of a step over the link to the host, both ways: moments in every update, activations in every micro-batch.

    Args:
      per_device: as `memory.host_parts` gives it.
    """
    return 2 * (per_device["optimizer"] * updates + per_device["activations"] * microbatches)


def _ring(devices: int) -> float:
    return (devices - 1) / devices
