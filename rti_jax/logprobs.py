"""Per-token log-probabilities: the only place where predictions and tokens are shifted against each other.

`token_logprobs` turns hidden states into log-probabilities that are aligned with the tokens (see `TrainBatch`): the
value at [b, t] is log p(tokens[b, t] | earlier tokens of its segment). `Scorer` does that for rows of any length.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rti_jax.packing import attention_cost, deal, line_counts, plan_microbatches
from rti_jax.placement import ROW_AXES, TOKEN_AXES, activation_axes, row_spec, shards

CHUNK_BYTES = 2**28  # of float32 logits held at a time, at most
CHUNK_TOKENS = 2048  # small vocabularies: larger chunks fall out of the CPU's caches
KEPT_BYTES = 2**29  # logits that take no more are kept for the backward pass, which else computes them again


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities of `tokens` under softmax(hidden head / temperature); logits [B, T, V] up to KEPT_BYTES alone.

    Args:
      hidden: [B, T, D], states after the final norm; the state at t predicts the token at t + 1.
      head: [D, V].
      tokens, segment_ids: int [B, T]; segment 0 is padding.
      temperature: of the sampling distribution.
      entropy: also returns the entropy of each token's distribution. entropy_gradient: with a gradient.
      chunk: tokens whose logits a device holds at a time.
      mesh: devices; rows and tokens are split over its axes (placement.py), and the head's gradient is summed over
        them once, not once per chunk. The result has whole rows.

    Returns:
      logprobs [B, T] float32, aligned with `tokens`, 0 at the first token of a segment and on padding; entropy in the
      same alignment, or None.
    """
    targets = jnp.roll(tokens, -1, axis=1)  # of whole rows; the last column wraps and is masked below
    fused = functools.partial(_in_chunks, chunk=chunk, entropy=entropy, through=entropy_gradient)
    over_rows, over_tokens = activation_axes(mesh, tokens.shape) if mesh is not None else ((), ())
    if mesh is not None and shards(mesh, over_rows + over_tokens) > 1:
        split, whole = PartitionSpec(over_rows or None, over_tokens or None), PartitionSpec()
        specs = {"in_specs": (split, whole, split, whole), "out_specs": (split, split)}
        axes = {*over_rows, *over_tokens}
        fused = jax.shard_map(fused, mesh=mesh, axis_names=axes, check_vma=False, **specs)
    values, entropies = fused(hidden, head, targets, 1.0 / jnp.asarray(temperature, _wide(hidden)))

    continues = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)

    def aligned(x):
        if (
            mesh is not None and shards(mesh, over_tokens) > 1
        ):  # a value moves to the next token, another device's perhaps
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(over_rows or None)))
        return jnp.pad(jnp.where(continues, x[:, :-1], 0.0), ((0, 0), (1, 0)))

    entropies = entropies if entropy_gradient else jax.lax.stop_gradient(entropies)
    return aligned(values), aligned(entropies) if entropy else None


def chunk_columns(rows: int, length: int, vocabulary: int, chunk: int | None = None) -> int:
    """Columns of a device's [rows, length] whose logits are held at a time."""
    tokens_held = chunk or max(256, min(CHUNK_TOKENS, CHUNK_BYTES // 4 // vocabulary))
    return -(-length // -(-rows * length // tokens_held))


def kept_bytes(rows: int, length: int, vocabulary: int) -> int:
    """Bytes of float32 logits of a device's [rows, length] that the forward pass keeps for the backward pass."""
    size = 4 * rows * length * vocabulary
    return size if size <= KEPT_BYTES else 0


def _in_chunks(hidden, head, targets, scale, chunk: int | None, entropy: bool, through: bool):
    """`_fused` of one device's part [B, T], filled up to whole chunks."""
    length = targets.shape[1]
    columns = chunk_columns(*targets.shape, head.shape[1], chunk)
    padding = (0, 0), (0, -length % columns)
    hidden, targets = jnp.pad(hidden, (*padding, (0, 0))), jnp.pad(targets, padding)
    return tuple(x[:, :length] for x in _fused(hidden, head, targets, scale, columns, entropy, through))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _fused(hidden, head, targets, scale, columns: int, entropy: bool, through: bool):
    """Log-probabilities and entropies [B, T] of `targets`, with a gradient for hidden and head.

    The entropies' gradient is left out unless it flows `through`.
    """
    return _values(hidden, head, targets, scale, columns, entropy, keep=False)[0]


def _forward(hidden, head, targets, scale, columns: int, entropy: bool, through: bool):
    """`_fused`, and what its backward pass needs."""
    keep = kept_bytes(*targets.shape, head.shape[1]) > 0
    outputs, saved = _values(hidden, head, targets, scale, columns, entropy, keep)
    return outputs, (hidden, head, targets, scale, *saved)


def _values(hidden, head, targets, scale, columns: int, entropy: bool, keep: bool):
    """Log-probabilities and entropies [B, T] of `targets`, `columns` columns of the batch at a time.

    And the log of the softmax's sums [B, T], and all logits [chunks, B, columns, V], or None, where they are not kept.
    """
    weights = head.astype(hidden.dtype)

    def one(_, start):
        logits = _logits(_slice(hidden, start, columns), weights, scale)
        picked = jnp.take_along_axis(logits, _slice(targets, start, columns)[..., None], axis=-1)[..., 0]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        spread = _entropy(logits - normaliser[..., None]) if entropy else normaliser
        return None, (picked - normaliser, normaliser, spread, logits if keep else None)

    _, (*outputs, kept) = jax.lax.scan(one, None, jnp.arange(0, hidden.shape[1], columns))
    values, normaliser, spread = (_unchunk(x) for x in outputs)
    return (values, spread), (normaliser, kept)


def _entropy(table: jax.Array) -> jax.Array:
    """-sum p log p over the last axis of log-probabilities."""
    # A fused sum takes four times as long on CPU.
    return -jnp.einsum("BTV,BTV->BT", jnp.exp(table), table, precision="highest")


def _slice(x: jax.Array, start: jax.Array, columns: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, columns, axis=1)


def _unchunk(x: jax.Array) -> jax.Array:
    """[chunks, B, columns, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _logits(hidden: jax.Array, head: jax.Array, scale: jax.Array) -> jax.Array:
    return _product("BTD,DV->BTV", hidden, head) * scale


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 stays float32 on accelerators, in the backward pass too, which no context of the forward pass reaches."""
    precision = "default" if a.dtype == jnp.bfloat16 else "highest"
    return jnp.einsum(spec, a, b, preferred_element_type=_wide(a), precision=precision)


def _wide(x: jax.Array) -> jnp.dtype:
    """What is accumulated in: float32, or float64 where a test computes in it."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _backward(columns, entropy, through, saved, cotangents):
    """d log p / d logits = onehot - softmax and d H / d logits = -p (log p + H), chunk by chunk."""
    hidden, head, targets, scale, normaliser, kept = saved
    weights = head.astype(hidden.dtype)

    def one(d_head, chunk):
        start, logits = chunk
        h = _slice(hidden, start, columns)
        logits = _logits(h, weights, scale) if logits is None else logits
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == _slice(targets, start, columns)[..., None]
        probabilities = jnp.exp(logits - _slice(normaliser, start, columns)[..., None])
        d_logits = (_slice(cotangents[0], start, columns) * scale)[..., None] * (hit - probabilities)
        if through:
            table = logits - _slice(normaliser, start, columns)[..., None]
            slope = -probabilities * (table + _entropy(table)[..., None])
            d_logits += (_slice(cotangents[1], start, columns) * scale)[..., None] * slope
        d_logits = d_logits.astype(hidden.dtype)
        d_head += _product("BTD,BTV->DV", h, d_logits)
        return d_head, _product("BTV,DV->BTD", d_logits, weights).astype(h.dtype)

    starts = jnp.arange(0, hidden.shape[1], columns)
    d_head, d_hidden = jax.lax.scan(one, jnp.zeros(head.shape, _wide(hidden)), (starts, kept))
    return _unchunk(d_hidden), d_head.astype(head.dtype), None, None


_fused.defvjp(_forward, _backward)


Row = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids


class Scorer:
    """Log-probabilities of responses given prompts, for rows of any length, with few compiled programs.

    Rows are packed into lines of a few lengths (see packing.py); a row that is longer than the longest bucket gets a
    line of the next power of two. Lengths are rounded up to what the mesh axis context divides. A batch has `TOKENS`
    tokens, or the `SMALL`th part where that is enough: at most two programs for each length.
    """

    BUCKETS = (256, 1024, 4096)
    TOKENS = 8192  # of one batch; a longer row is a batch of its own
    SMALL = 8  # so that a few short rows, as those of the probe after each update, do not cost a whole batch

    def __init__(
        self, model: Any, mesh: Mesh | None = None, temperature: float = 1.0, buckets: Sequence[int] | None = None
    ):
        """
        Args:
          model: models.hf.LanguageModel, or anything with its `hidden` and `head`.
          mesh: the mesh that the parameters live on; lines are split over its axes (placement.py).
          temperature: of the distribution whose log-probabilities are wanted.
          buckets: line lengths.
        """
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
        self.temperature, self.mesh = temperature, mesh
        self.compilations = 0  # traced programs so far
        self._sharding = NamedSharding(mesh, row_spec(mesh)) if mesh is not None else None
        self._multiple, self._parts = (shards(mesh, a) if mesh is not None else 1 for a in (ROW_AXES, TOKEN_AXES))
        self._buckets = tuple(sorted({self._rounded(b) for b in buckets or self.BUCKETS}))

        @jax.jit
        def run(params, tokens, positions, segment_ids, temperature):
            self.compilations += 1
            hidden = model.hidden(params, tokens, positions, segment_ids)
            return token_logprobs(hidden, model.head(params), tokens, segment_ids, temperature, mesh=mesh)[0]

        self._run = run

    def score(
        self, params: Any, rows: Sequence[Row], progress: Callable[[int, int], None] | None = None
    ) -> list[np.ndarray]:
        """log p(response | prompt) of every row, one float32 array [len(response)] per row, in order.

        Args:
          params: the model's parameters.
          rows: (prompt ids, response ids); the prompt must not be empty, because a first token has no prediction. On
            several hosts every process passes the same rows.
          progress: called as progress(rows done, rows in all).

        Raises ValueError that names the first row with an empty prompt.
        """
        if empty := [i for i, (prompt, _) in enumerate(rows) if not len(prompt)]:
            raise ValueError(f"row {empty[0]} has an empty prompt: its first token has no prediction")
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        done = 0
        for shape, lines in self._plan([len(p) + len(r) for p, r in rows]):
            values = self._values(params, *_arrays(shape, lines, rows))
            for line, members in zip(values, lines, strict=False):  # further lines are padding
                start = 0
                for i in members:
                    prompt, response = (len(part) for part in rows[i])
                    results[i] = line[start + prompt : start + prompt + response]
                    start += prompt + response
            done += sum(len(members) for members in lines)
            if progress:
                progress(done, len(rows))
        return results

    def _plan(self, lengths: Sequence[int]) -> list[tuple[tuple[int, int], list[list[int]]]]:
        """(lines, tokens) and the rows of each line, for every batch."""
        longest = self._buckets[-1]
        families: dict[tuple[int, ...], list[int]] = {}
        for i, n in enumerate(lengths):
            buckets = self._buckets if n <= longest else (self._rounded(1 << (n - 1).bit_length()),)
            families.setdefault(buckets, []).append(i)
        plan = []
        for buckets, members in families.items():
            lines = max(1, self.TOKENS // buckets[-1])
            sizes = [lengths[i] for i in members]
            counts = line_counts(buckets, lines, self._multiple)
            for (count, bucket), filled in plan_microbatches(sizes, buckets, lines, self._multiple):
                used = sorted(filter(None, filled), key=lambda line: -attention_cost(line, sizes))
                small = -(-counts[bucket] // self.SMALL // self._multiple) * self._multiple
                if len(used) <= small < count:
                    count, filled = small, deal(used, small, self._multiple)
                plan.append(((count, bucket), [[members[j] for j in line] for line in filled]))
        return plan

    def _rounded(self, length: int) -> int:
        """`length` as a multiple of the devices that share a line."""
        return -(-length // self._parts) * self._parts

    def _values(self, params, *arrays: np.ndarray) -> np.ndarray:
        """Aligned log-probabilities [lines, tokens] on the host."""
        if self._sharding is not None:
            arrays = tuple(jax.make_array_from_callback(a.shape, self._sharding, a.__getitem__) for a in arrays)
        values = self._run(params, *arrays, jnp.float32(self.temperature))
        return np.asarray(values if values.is_fully_addressable else multihost_utils.process_allgather(values, True))


def _arrays(shape: tuple[int, int], lines: Sequence[Sequence[int]], rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    """tokens, positions and segment_ids int32 [lines, tokens] of packed rows."""
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    for line, members in enumerate(lines):
        start = 0
        for segment, i in enumerate(members, 1):
            ids = (*rows[i][0], *rows[i][1])
            part = slice(start, start + len(ids))
            tokens[line, part], positions[line, part], segments[line, part] = ids, np.arange(len(ids)), segment
            start += len(ids)
    return tokens, positions, segments
