"""Causal attention over packed rows, with memory linear in the row's length.

Every implementation computes softmax(q k^T / sqrt(H)) v, where a token sees itself and the earlier tokens of its own
segment. Segment 0 is padding: its outputs are finite and mean nothing.
"""

import jax
import jax.numpy as jnp

from models.layers import Execution

BLOCK = 128  # query tokens at a time


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, execution: Execution) -> jax.Array:
    """Attention output [B, T, N, H] of q [B, T, N, H], k and v [B, T, K, H] and segment_ids [B, T]."""
    return blockwise(q, k, v, segment_ids)


def blockwise(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int = BLOCK) -> jax.Array:
    """Query blocks against the keys before their end; scores are recomputed in the backward pass.

    Holds [B, N, block, T] scores at a time.
    """
    length = q.shape[1]
    one = jax.checkpoint(_attend, static_argnums=(5,))
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        rows = slice(start, end)
        outputs.append(one(q[:, rows], k[:, :end], v[:, :end], segment_ids[:, rows], segment_ids[:, :end], start))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _attend(q, k, v, q_segments, k_segments, start: int) -> jax.Array:
    """Queries at positions start.. against keys at positions 0.. ."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * dim**-0.5
    causal = jnp.arange(k.shape[1]) <= start + jnp.arange(tokens)[:, None]
    visible = causal & (q_segments[:, :, None] == k_segments[:, None, :])
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(q.shape)
