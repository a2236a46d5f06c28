"""Causal attention over packed rows, with memory linear in the row's length.

Every implementation computes softmax(q k^T / sqrt(H)) v, where a token sees itself and the earlier tokens of its own
segment, whose tokens follow each other. Segment 0 is padding: its outputs are finite and mean nothing.

`blockwise` is plain JAX and runs everywhere: FlashAttention in tiles of queries and keys (Dao, arXiv 2307.08691,
algorithms 1 and 2). Tiles after the diagonal are not computed, nor, but for short rows, those before the segments of
their queries and those of padding alone. In it, heads are split into K key/value heads and G query heads
that share one, and R = G * block is the rows of one matrix product.

Where devices share a row's tokens (mesh axis context), each has the queries of its part and gathers all keys and
values; the gradients of these are summed back onto their parts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models import names
from models.accelerated_attention import cudnn, cudnn_can, splash, splash_can
from models.layers import ATTENDED, Execution, precision, wide

# Queries, and keys, of a tile: on CPU what fits its caches, elsewhere what keeps a device busy.
CPU_BLOCKS, ACCELERATOR_BLOCKS = (64, 256), (1024, 1024)  # least and most; in between, a quarter of the row
UNROLLED = 512  # tokens of a row up to which all tiles before the diagonal are in the program, to run beside each other
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
    if parts > 1 or (run is blockwise and execution.mesh is not None and execution.mesh.size > 1):
        return _on_each(run, q, k, v, segment_ids, execution.mesh, parts)
    return run(q, k, v, segment_ids)


def _best(backend: str, q: jax.Array, parts: int = 1) -> str:
    if backend == "gpu" and cudnn_can(q):
        return "cudnn"
    if backend == "tpu" and splash_can(q, parts):
        return "splash"
    return "blockwise"


def _on_each(run, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, mesh, parts: int) -> jax.Array:
    """`run` for the rows, heads and tokens of each device, with the keys and values of whole rows.

    So a device visits its own rows' tiles and no others; left to the compiler, all would visit those of any.
    """
    (context,) = names.SHARDING_RULES["tokens"]

    def local(q, k, v, segment_ids):
        if parts == 1:
            return run(q, k, v, segment_ids)
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
    """`attention` in plain JAX. Holds the scores [B, N, block, block] of a tile at a time, in the backward pass too.

    Args:
      block: queries, and keys, of a tile.
      part: q, of T tokens, is a part of a row of S, whose keys and values k and v are.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    block = min(block or _block(length), length)
    q, k, v, segment_ids = (_fill(x, block) for x in (q, k, v, segment_ids))
    part = part and part._replace(segment_ids=_fill(part.segment_ids, block))
    grouped = (q * dim**-0.5).reshape(batch, -1, block, kv_heads, heads // kv_heads, dim)
    rows = grouped.transpose(1, 0, 3, 4, 2, 5).reshape(grouped.shape[1], batch, kv_heads, -1, dim)
    out = _tiles(rows, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segment_ids, part, block)
    out = out.reshape(-1, batch, kv_heads, heads // kv_heads, block, dim).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, -1, heads, dim)[:, :length]


def _block(length: int) -> int:
    least, most = CPU_BLOCKS if jax.default_backend() == "cpu" else ACCELERATOR_BLOCKS
    return max(least, min(-(-length // 4), most))


def _fill(x: jax.Array, multiple: int) -> jax.Array:
    """x [B, T, ...] with zeros after its tokens, up to a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), *((0, 0),) * (x.ndim - 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _tiles(q, k, v, segment_ids, part: Part | None, block: int):
    """Scaled queries in blocks [T / block, B, K, R, H], k and v [B, K, S, H] -> as q."""
    return _forward(q, k, v, segment_ids, part, block)[0]


def _forward(q, k, v, segment_ids, part: Part | None, block: int):
    """Algorithm 1 of arXiv 2307.08691: of each tile the highest score, the softmax's sum and the weighted values."""

    def of_block(_, inputs):
        place, rows = inputs

        def of_tile(tile):
            keys = _tile(k, tile, block)
            hidden = functools.partial(_scores, rows, keys, segment_ids, part, place.block, tile, block)
            if isinstance(place.block, int):
                scores = hidden()
            else:  # the maximum below would write the hidden scores out, and most tiles of a long row have none
                plain = functools.partial(_product, "BKRH,BKSH->BKRS", rows, keys)
                scores = jax.lax.cond(_whole(segment_ids, part, place.block, tile, block), plain, hidden)
            peak = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - peak)
            values = _product("BKRS,BKSH->BKRH", weights.astype(v.dtype), _tile(v, tile, block))
            return peak, jnp.sum(weights, axis=-1, keepdims=True), values

        def join(state, part, _):
            peak = jnp.maximum(state[0], part[0])
            old, new = jnp.exp(state[0] - peak), jnp.exp(part[0] - peak)
            return peak, *(a * old + b * new for a, b in zip(state[1:], part[1:], strict=True))

        column = jnp.zeros((*rows.shape[:-1], 1), wide(rows))
        nothing = column + HIDDEN_SCORE, column, jnp.zeros(rows.shape, wide(rows))
        peak, total, out = _over_tiles(place, of_tile, join, nothing)
        total = jnp.maximum(total, 1.0)  # as it is where a key is visible: the highest score's own term
        return None, ((out / total).astype(q.dtype), peak + jnp.log(total))

    blocks = _visible_tiles(segment_ids, part, block), q
    _, outputs = _over_blocks(of_block, None, blocks, _unrolled(q, part, block))
    out, normaliser = (checkpoint_name(x, ATTENDED) for x in outputs)
    return out, (q, k, v, segment_ids, part, out, normaliser)


def _backward(block: int, saved, d_out):
    """Algorithm 2 of arXiv 2307.08691, queries outside: the three gradients are sums over tiles."""
    q, k, v, segment_ids, part, out, normaliser = saved
    delta = jnp.sum((d_out * out).astype(wide(out)), axis=-1, keepdims=True)

    def of_block(gradients, inputs):
        place, rows, d, normaliser, delta = inputs
        columns, d_columns = _swapped(rows), _swapped(d)  # so that no product has to turn a tile

        def of_tile(tile):
            keys, values = _tile(k, tile, block), _tile(v, tile, block)
            scores = _scores(rows, keys, segment_ids, part, place.block, tile, block)
            weights = jnp.exp(scores - normaliser)
            d_scores = (weights * (_product("BKRH,BKSH->BKRS", d, values) - delta)).astype(q.dtype)
            d_keys = _product("BKHR,BKRS->BKHS", columns, d_scores)
            d_values = _product("BKHR,BKRS->BKHS", d_columns, weights.astype(q.dtype))
            return _product("BKRS,BKSH->BKRH", d_scores, keys), d_keys, d_values

        def join(state, part, tile):
            return state[0] + part[0], *(_add(a, b, tile, block) for a, b in zip(state[1:], part[1:], strict=True))

        d_rows, *gradients = _over_tiles(place, of_tile, join, (jnp.zeros(rows.shape, wide(rows)), *gradients))
        return tuple(gradients), d_rows.astype(q.dtype)

    zeros = tuple(jnp.zeros_like(_swapped(x), wide(x)) for x in (k, v))
    blocks = _visible_tiles(segment_ids, part, block), q, d_out, normaliser, delta
    (d_k, d_v), d_q = _over_blocks(of_block, zeros, blocks, _unrolled(q, part, block))
    return d_q, _swapped(d_k).astype(k.dtype), _swapped(d_v).astype(v.dtype), None, None


_tiles.defvjp(_forward, _backward)


class Place(NamedTuple):
    """Of each block of queries, int [T / block]: its number, and the tiles of keys from `first` to `end`, exclusive.

    In unrolled rows a block's number is a Python int.
    """

    block: jax.Array | int
    first: jax.Array
    end: jax.Array


def _visible_tiles(segment_ids: jax.Array, part: Part | None, block: int) -> Place:
    """From the tile in which the first query's segment begins, in any row, to that of the last query's own key."""
    others, first = part or (segment_ids, 0)
    begins = jnp.pad(others[:, 1:] != others[:, :-1], ((0, 0), (1, 0)))
    begin = jax.lax.cummax(jnp.where(begins, jnp.arange(others.shape[1]), 0), axis=1).min(0)
    starts = jnp.arange(0, segment_ids.shape[1], block)
    first_tile, end = begin[first + starts] // block, -(-(first + starts + block) // block)
    filled = (segment_ids != 0).any(0).reshape(-1, block).any(1)
    end = jnp.where(filled, jnp.minimum(end, others.shape[1] // block), first_tile)
    return Place(jnp.arange(len(starts)), first_tile, end)


def _unrolled(blocks, part: Part | None, block: int) -> bool:
    return part is None and len(blocks) * block <= UNROLLED


def _over_blocks(of_block, carry, blocks, unroll: bool):
    """`jax.lax.scan`, or the same written out."""
    if not unroll:
        return jax.lax.scan(of_block, carry, blocks)
    outputs = []
    for i in range(len(blocks[0].first)):
        place, *inputs = jax.tree.map(lambda x, i=i: x[i], blocks)
        carry, output = of_block(carry, (place._replace(block=i), *inputs))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def _over_tiles(place: Place, of_tile, join, state):
    """join(state, of_tile(tile), tile) for every visible tile; of an unrolled row, for all before the diagonal."""
    if not isinstance(place.block, int):
        return jax.lax.fori_loop(place.first, place.end, lambda tile, state: join(state, of_tile(tile), tile), state)
    for tile in range(place.block + 1):
        state = join(state, of_tile(tile), tile)
    return state


def _scores(rows, keys, segment_ids, part: Part | None, block_number, tile, block: int) -> jax.Array:
    """Scores [B, K, R, keys] of a tile in float32; `HIDDEN_SCORE` where a key is not visible."""
    others, first = part or (segment_ids, 0)
    query, key = (i * block + jnp.arange(block) for i in (block_number, tile))
    own, others = (
        jax.lax.dynamic_slice_in_dim(ids, i * block, block, axis=1)
        for ids, i in ((segment_ids, block_number), (others, tile))
    )
    visible = (key <= first + query[:, None]) & (own[:, :, None] == others[:, None, :])
    scores = _product("BKRH,BKSH->BKRS", rows, keys)
    grouped = scores.reshape(*scores.shape[:2], -1, block, block)
    return jnp.where(visible[:, None, None], grouped, HIDDEN_SCORE).reshape(scores.shape)


def _whole(segment_ids, part: Part | None, block_number, tile, block: int) -> jax.Array:
    """Whether every query of a block sees every key of a tile, in all rows: a segment's tokens follow each other.

    Not so for padding, which may be on both sides.
    """
    others, first = part or (segment_ids, 0)
    last = jax.lax.dynamic_slice_in_dim(segment_ids, (block_number + 1) * block - 1, 1, axis=1)
    one = jax.lax.dynamic_slice_in_dim(others, tile * block, 1, axis=1)
    return ((tile + 1) * block <= first + block_number * block + 1) & jnp.all((last == one) & (one != 0))


def _tile(x: jax.Array, tile, block: int) -> jax.Array:
    """Tokens of a tile of x [B, K, S, H]."""
    return jax.lax.dynamic_slice_in_dim(x, tile * block, block, axis=2)


def _add(x: jax.Array, values: jax.Array, tile, block: int) -> jax.Array:
    """x [B, K, H, S] with `values` added to the tokens of a tile."""
    old = jax.lax.dynamic_slice_in_dim(x, tile * block, block, axis=3)
    return jax.lax.dynamic_update_slice_in_dim(x, old + values, tile * block, axis=3)


def _swapped(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=wide(a), precision=precision(a.dtype))
