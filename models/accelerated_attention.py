"""Causal attention over packed rows by the fused kernels of GPUs and TPUs.

Both are chosen by `attention.attention`, whose contract they share.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

CUDNN_BLOCK = 2048  # query tokens per call: the mask is [B, 1, block, T], never [T, T]
SPLASH_LANES = 128


def cudnn_can(q: jax.Array) -> bool:
    """cuDNN's fused attention takes half precision and head dimensions up to 128 on every supported GPU."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """cuDNN flash attention, blocks of queries against the keys before their end; partitions itself over a mesh.

    cuDNN knows no segments, so they are an explicit mask; checkpointing keeps the masks out of the backward pass.
    """

    @functools.partial(jax.checkpoint, static_argnums=(5,))
    def one(q, k, v, own, others, start):
        visible = jnp.arange(k.shape[1]) <= start + jnp.arange(q.shape[1])[:, None]
        mask = visible & (own[:, :, None] == others[:, None, :])
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")

    outputs = []
    for start in range(0, q.shape[1], CUDNN_BLOCK):
        rows, end = slice(start, start + CUDNN_BLOCK), start + CUDNN_BLOCK
        outputs.append(one(q[:, rows], k[:, :end], v[:, :end], segment_ids[:, rows], segment_ids[:, :end], start))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def splash_can(q: jax.Array) -> bool:
    """Splash attention works on whole lanes of tokens and of head dimensions."""
    return q.shape[1] % SPLASH_LANES == 0 and q.shape[-1] % SPLASH_LANES == 0


def splash(q, k, v, segment_ids, mesh: Mesh | None, interpret: bool = False) -> jax.Array:
    """TPU splash attention: each key/value head with its group of query heads, rows and heads split over the mesh."""
    if not splash_can(q):
        raise ValueError(
            f"attention=splash needs a row length and a head dimension that are multiples of {SPLASH_LANES}, "
            f"not {q.shape[1]} and {q.shape[-1]}; use attention=blockwise"
        )
    run = functools.partial(_splash, interpret=interpret)
    if mesh is None or mesh.size == 1:
        return run(q, k, v, segment_ids)
    rows = tuple(a for a in ("data", "fsdp") if a in mesh.axis_names)
    tensor = "tensor" if "tensor" in mesh.axis_names and k.shape[2] % mesh.shape["tensor"] == 0 else None
    heads = PartitionSpec(rows, None, tensor, None)
    specs = (heads, heads, heads, PartitionSpec(rows, None))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, segment_ids)


def _splash(q, k, v, segment_ids, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    block = next(b for b in (512, 256, 128) if length % b == 0)
    sizes = tpu.BlockSizes(**dict.fromkeys(_BLOCK_FIELDS, block))
    mask = tpu.MultiHeadMask([tpu.CausalMask((length, length))] * (heads // kv_heads))
    kernel = tpu.make_splash_mqa(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    grouped = (q * np.asarray(dim**-0.5, q.dtype)).reshape(batch, length, kv_heads, heads // kv_heads, dim)

    def row(q, k, v, segments):  # [K, G, T, H], [K, T, H]
        ids = tpu.SegmentIds(segments, segments)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(q, k, v)

    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = jax.vmap(row)(grouped.transpose(0, 2, 3, 1, 4), keys, values, segment_ids)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


_BLOCK_FIELDS = (
    "block_q",
    "block_kv",
    "block_kv_compute",
    "block_q_dkv",
    "block_kv_dkv",
    "block_kv_dkv_compute",
    "block_q_dq",
    "block_kv_dq",
)
