"""Causal attention over packed rows, with memory linear in the row's length.

Every implementation computes softmax(q k^T / sqrt(H)) v, where a token sees itself and the earlier tokens of its own
segment. Segment 0 is padding: its outputs are finite and mean nothing.

`blockwise` is plain JAX and runs everywhere: FlashAttention's backward pass (Dao et al., arXiv 2205.14135, section 3.1)
with blocks of queries against all keys before their end. In it, heads are split into K key/value heads and G query
heads that share one, and R = G * block is the rows of one matrix product.

Where devices share a row's tokens (mesh axis context), each has the queries of its part and gathers all keys and
values; the gradients of these are summed back onto their parts. Every device then computes its queries against all keys
of the row, masked: twice what the causal half needs, but the last part, for which all wait, needs nearly that anyway.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import names
from models.accelerated_attention import cudnn, cudnn_can, splash, splash_can
from models.layers import Execution, wide

BLOCK = 128  # query tokens at a time
SHORT, SHORT_BLOCK = 512, 64  # rows up to SHORT tokens: smaller blocks skip more of the masked half
SPANS = 4  # a row is cut into at most this many unrolled spans of blocks; a block sees the keys up to its span's end
HIDDEN_SCORE = -1e30  # finite, so that a row without visible keys stays finite


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, execution: Execution) -> jax.Array:
    """Attention output [B, T, N, H].

    Args:
      q: [B, T, N, H]. k, v: [B, T, K, H], N a multiple of K. segment_ids: int [B, T].
      execution: `attention` chooses the implementation, `mesh` the devices.
    """
    parts = execution.context_shards(q.shape[1])
    implementation = execution.attention
    if implementation == "auto":
        implementation = _best(jax.default_backend(), q, parts)
    if implementation == "splash":
        return splash(q, k, v, segment_ids, execution.mesh, parts)
    run = cudnn if implementation == "cudnn" else blockwise
    if parts > 1:
        return _gathered(run, q, k, v, segment_ids, execution.mesh)
    return run(q, k, v, segment_ids)


def _best(backend: str, q: jax.Array, parts: int = 1) -> str:
    if backend == "gpu" and cudnn_can(q):
        return "cudnn"
    if backend == "tpu" and splash_can(q, parts):
        return "splash"
    return "blockwise"


def _gathered(run, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, mesh) -> jax.Array:
    """`run` for the tokens of each device, with the keys and values of the whole row."""
    (context,) = names.SHARDING_RULES["tokens"]

    def local(q, k, v, segment_ids):
        k, v, others = (jax.lax.all_gather(x, context, axis=1, tiled=True) for x in (k, v, segment_ids))
        return run(q, k, v, segment_ids, part=Part(others, jax.lax.axis_index(context) * q.shape[1]))

    heads = names.spec(mesh, ("rows", "tokens", "heads", None), k.shape)  # whole groups of query heads
    specs = (heads, heads, heads, names.spec(mesh, ("rows", "tokens"), segment_ids.shape))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, segment_ids)


class Part(NamedTuple):
    """Where queries stand in a row that is longer than they are.

    Attributes:
      segment_ids: of all keys, int [B, S]. first: place of the first query among them, int [].
    """

    segment_ids: jax.Array
    first: jax.Array


def blockwise(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int | None = None, part: Part | None = None
) -> jax.Array:
    """`attention` in plain JAX. Holds [B, N, block, T] scores at a time, in the backward pass too.

    Args:
      block: query tokens at a time.
      part: q, of T tokens, is a part of a row of S, whose keys and values k and v are.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    block = block or (SHORT_BLOCK if length <= SHORT else BLOCK)
    padding = -length % block if length > block else 0
    if padding:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
        q, *others = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in ((q, k, v) if part is None else (q,)))
        k, v = others or (k, v)
    grouped = (q * dim**-0.5).reshape(batch, length + padding, kv_heads, heads // kv_heads, dim)
    out = _blocks(
        grouped.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segment_ids, part, block
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length + padding, heads, dim)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blocks(q, k, v, segment_ids, part: Part | None, block: int):
    """q [B, K, G, T, H] (scaled), k and v [B, K, S, H] -> [B, K, G, T, H]; S is T unless q is a `part`."""
    return _forward(q, k, v, segment_ids, part, block)[0]


def _forward(q, k, v, segment_ids, part: Part | None, block: int):
    outs, normalisers = [], []
    for keys, starts in _spans(q.shape[3], block, part and k.shape[2]):

        def one(start, keys=keys):
            scores = _scores(q, k, segment_ids, part, start, keys, block)
            peak = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - peak)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            out = _product("BKRS,BKSH->BKRH", weights.astype(v.dtype), v[:, :, :keys]) / total
            return _unfold(out.astype(q.dtype), q), _unfold(peak + jnp.log(total), q)

        out, normaliser = _each(one, starts)
        outs.append(out)
        normalisers.append(normaliser)
    out, normaliser = jnp.concatenate(outs, axis=3), jnp.concatenate(normalisers, axis=3)
    return out, (q, k, v, segment_ids, part, out, normaliser)


def _backward(block: int, saved, d_out):
    q, k, v, segment_ids, part, out, normaliser = saved
    delta = jnp.sum((d_out * out).astype(wide(out)), axis=-1, keepdims=True)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, wide(k)), jnp.zeros(v.shape, wide(v))
    for keys, starts in _spans(q.shape[3], block, part and k.shape[2]):

        def one(start, keys=keys):
            scores = _scores(q, k, segment_ids, part, start, keys, block)
            weights = jnp.exp(scores - _fold(normaliser, start, block))
            d = _fold(d_out, start, block)
            d_weights = _product("BKRH,BKSH->BKRS", d, v[:, :, :keys])
            d_scores = (weights * (d_weights - _fold(delta, start, block))).astype(q.dtype)
            d_keys = _product("BKRS,BKRH->BKSH", d_scores, _fold(q, start, block))
            d_values = _product("BKRS,BKRH->BKSH", weights.astype(q.dtype), d)
            d_query = _product("BKRS,BKSH->BKRH", d_scores, k[:, :, :keys])
            return _unfold(d_query.astype(q.dtype), q), d_keys, d_values

        d_query, d_keys, d_values = _each(one, starts, sums=2)
        d_q.append(d_query)
        d_k = d_k.at[:, :, :keys].add(d_keys)
        d_v = d_v.at[:, :, :keys].add(d_values)
    return jnp.concatenate(d_q, axis=3), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_blocks.defvjp(_forward, _backward)


def _spans(length: int, block: int, keys: int | None = None) -> list[tuple[int, range]]:
    """(end of the visible keys, starts of the query blocks) of each span of a row, or of a part of a row of `keys`."""
    if keys:  # which part is known to the device alone
        return [(keys, range(0, length, block))]
    blocks = math.ceil(length / block)
    per_span = math.ceil(blocks / SPANS)
    firsts = range(0, blocks, per_span)
    return [
        (min((i + per_span) * block, length), range(i * block, min((i + per_span), blocks) * block, block))
        for i in firsts
    ]


def _each(one, starts: range, sums: int = 0):
    """`one(start)` for every block of a span: results joined along T, the last `sums` of them added up."""
    if len(starts) == 1:
        return one(starts[0])

    def step(totals, start):
        results = one(start)
        split = len(results) - sums
        return tuple(t + r for t, r in zip(totals, results[split:], strict=True)), results[:split]

    shapes = jax.eval_shape(one, starts[0])
    zeros = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes[len(shapes) - sums :])
    totals, joined = jax.lax.scan(step, zeros, jnp.asarray(starts))
    return *(_join(x) for x in joined), *totals


def _join(x: jax.Array) -> jax.Array:
    """[blocks, B, K, G, block, ...] -> [B, K, G, blocks * block, ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def _scores(q, k, segment_ids, part: Part | None, start, keys: int, block: int) -> jax.Array:
    """Scores [B, K, R, keys] in float32 of one block; `HIDDEN_SCORE` where a key is not visible."""
    others, first = part or (segment_ids, 0)
    rows = _fold(q, start, block)
    scores = _product("BKRH,BKSH->BKRS", rows, k[:, :, :keys])
    tokens = rows.shape[2] // q.shape[2]
    own = jax.lax.dynamic_slice_in_dim(segment_ids, start, tokens, axis=1)
    visible = jnp.arange(keys) <= first + start + jnp.arange(tokens)[:, None]
    visible = visible & (own[:, :, None] == others[:, None, :keys])
    grouped = scores.reshape(*scores.shape[:2], q.shape[2], tokens, keys)
    return jnp.where(visible[:, None, None], grouped, HIDDEN_SCORE).reshape(scores.shape)


def _fold(x: jax.Array, start, block: int) -> jax.Array:
    """Block of x [B, K, G, T, H] as rows [B, K, R, H]."""
    part = jax.lax.dynamic_slice_in_dim(x, start, min(block, x.shape[3]), axis=3)
    return part.reshape(*x.shape[:2], -1, x.shape[-1])


def _unfold(x: jax.Array, q: jax.Array) -> jax.Array:
    """Rows [B, K, R, H] -> [B, K, G, block, H]."""
    return x.reshape(*x.shape[:2], q.shape[2], -1, x.shape[-1])


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=wide(a))
