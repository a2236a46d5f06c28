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
    (logprobs.py, layers.py), which is twice that. Replicas (data) sum shards; tensor parallelism sums activations.

    Args:
      mesh: devices of each axis. tokens: of one device.
    """
    size, tensor, fsdp, data = memory.SIZES[model.execution.dtype], mesh["tensor"], mesh["fsdp"], mesh["data"]
    whole = memory.count(model) / tensor
    ends = sum(math.prod(t.full_shape) for t in model.tensors if not t.layers and len(t.shape) == 2) / tensor
    gathered = _ring(fsdp) * 2 * whole * size
    scattered = _ring(fsdp) * whole * memory.FLOAT32
    replicas = 2 * _ring(data) * whole / fsdp * memory.FLOAT32
    recomputed = model.execution.remat in ("full", "offload")
    sums = 4 + recomputed  # two of each layer forward, two backward, one when recomputed
    activations = 2 * _ring(tensor) * sums * model.config.num_hidden_layers * tokens * model.config.hidden_size * size
    ideal = gathered + scattered + replicas + activations
    return {"bytes": ideal + _ring(fsdp) * ends * memory.FLOAT32, "ideal": ideal}


def _ring(devices: int) -> float:
    return (devices - 1) / devices
