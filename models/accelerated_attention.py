"""Causal attention over packed rows by the fused kernels of GPUs and TPUs.

Both are chosen by `attention.attention`, whose contract they share.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import names
from models.layers import ATTENDED

CUDNN_BLOCK = 2048  # query tokens per call: the mask is [B, 1, block, T], never [T, T]
SPLASH_LANES = 128


def cudnn_can(q: jax.Array) -> bool:
    """cuDNN's fused attention takes half precision and head dimensions up to 128 on every supported GPU."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, part=None) -> jax.Array:
    """cuDNN flash attention, blocks of queries against the keys before their end; partitions itself over a mesh.

    cuDNN knows no segments, so they are an explicit mask; checkpointing keeps the masks out of the backward pass.

    Args:
      part: `attention.Part` of the row that q is; k and v are of the whole row.
    """

    @jax.checkpoint
    def one(q, k, v, own, others, start):
        visible = jnp.arange(k.shape[1]) <= start + jnp.arange(q.shape[1])[:, None]
        mask = visible & (own[:, :, None] == others[:, None, :])
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")

    others, first = part or (segment_ids, 0)
    outputs = []
    for start in range(0, q.shape[1], CUDNN_BLOCK):
        rows, end = slice(start, start + CUDNN_BLOCK), None if part else start + CUDNN_BLOCK
        outputs.append(one(q[:, rows], k[:, :end], v[:, :end], segment_ids[:, rows], others[:, :end], first + start))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def splash_can(q: jax.Array, parts: int = 1) -> bool:
    """Splash attention works on whole lanes of tokens, of each of a row's parts, and of head dimensions."""
    return q.shape[1] % (SPLASH_LANES * parts) == 0 and q.shape[-1] % SPLASH_LANES == 0


def splash(q, k, v, segment_ids, mesh: Mesh | None, parts: int = 1, interpret: bool = False) -> jax.Array:
    """TPU splash attention: each key/value head with its group of query heads, rows and heads split over the mesh.

    Args:
      parts: devices that share a row's tokens; each has its queries and gathers all keys and values.
    """
    if not splash_can(q, parts):
        shared = f" in each of mesh.context={parts} parts" if parts > 1 else ""
        raise ValueError(
            f"attention=splash needs a row length{shared} and a head dimension that are multiples of {SPLASH_LANES}, "
            f"not {q.shape[1] // parts} and {q.shape[-1]}; use attention=blockwise"
        )
    kernel = _splash_kernel(q.shape[1], q.shape[2] // k.shape[2], parts, interpret)
    if mesh is None or mesh.size == 1:
        return _splash(kernel, q, k, v, segment_ids, segment_ids)
    (context,) = names.SHARDING_RULES["tokens"]

    def local(kernel, q, k, v, segment_ids):
        others = segment_ids
        if parts > 1:
            k, v, others = (jax.lax.all_gather(x, context, axis=1, tiled=True) for x in (k, v, segment_ids))
        return _splash(kernel, q, k, v, segment_ids, others)

    heads = names.spec(mesh, ("rows", "tokens", "heads", None), k.shape)
    blocks = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, context if parts > 1 else None)))
    specs = (blocks, heads, heads, heads, names.spec(mesh, ("rows", "tokens"), segment_ids.shape))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    return run(kernel, q, k, v, segment_ids)


def _splash_kernel(length: int, heads: int, parts: int, interpret: bool):
    """Of the query heads that share a key/value head; its mask's blocks can be split into `parts` along the queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    block = next(b for b in (512, 256, 128) if length // parts % b == 0)
    sizes = tpu.BlockSizes(**dict.fromkeys(_BLOCK_FIELDS, block))
    mask = tpu.MultiHeadMask([tpu.CausalMask((length, length), shard_count=parts)] * heads)
    return tpu.make_splash_mqa(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        interpret=interpret,
        residual_checkpoint_name=ATTENDED,
    )


def _splash(kernel, q, k, v, segment_ids, others) -> jax.Array:
    """Segments [B, T] of the queries, [B, S] of the keys."""
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = (q * np.asarray(dim**-0.5, q.dtype)).reshape(batch, length, kv_heads, heads // kv_heads, dim)

    def row(q, k, v, own, others):  # [K, G, T, H], [K, S, H]
        ids = tpu.SegmentIds(own, others)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(q, k, v)

    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = jax.vmap(row)(grouped.transpose(0, 2, 3, 1, 4), keys, values, segment_ids, others)
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
