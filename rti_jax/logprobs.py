"""Per-token log-probabilities: the only place where predictions and tokens are shifted against each other.

`token_logprobs` turns hidden states into log-probabilities that are aligned with the tokens (see `TrainBatch`): the
value at [b, t] is log p(tokens[b, t] | earlier tokens of its segment).
"""

import functools

import jax
import jax.numpy as jnp

CHUNK_BYTES = 2**28  # of float32 logits held at a time, at most
CHUNK_TOKENS = 2048  # small vocabularies: larger chunks fall out of the CPU's caches


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities of `tokens` under softmax(hidden head / temperature), never holding [B, T, V].

    Args:
      hidden: [B, T, D], states after the final norm; the state at t predicts the token at t + 1.
      head: [D, V].
      tokens, segment_ids: int [B, T]; segment 0 is padding.
      temperature: of the sampling distribution.
      entropy: also returns the entropy of each token's distribution, without gradient.
      chunk: tokens whose logits are held at a time.

    Returns:
      logprobs [B, T] float32, aligned with `tokens`, 0 at the first token of a segment and on padding; entropy in the
      same alignment, or None.
    """
    batch, length, width = hidden.shape
    targets = jnp.roll(tokens, -1, axis=1)  # the last column wraps and is masked below
    rows_chunk = chunk or max(256, min(CHUNK_TOKENS, CHUNK_BYTES // 4 // head.shape[1]))
    count = -(-batch * length // rows_chunk)
    columns = -(-length // count)
    padding = columns * -(-length // columns) - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))
    with jax.default_matmul_precision("highest" if hidden.dtype == jnp.float32 else "default"):
        values, entropies = _fused(hidden, head, targets, 1.0 / jnp.float32(temperature), columns, entropy)

    continues = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)

    def aligned(x):
        return jnp.pad(jnp.where(continues, x[:, : length - 1], 0.0), ((0, 0), (1, 0)))

    return aligned(values), aligned(jax.lax.stop_gradient(entropies)) if entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused(hidden, head, targets, scale, columns: int, entropy: bool):
    """Log-probabilities and entropies [B, T] of `targets`, with a gradient for hidden and head."""
    return _forward(hidden, head, targets, scale, columns, entropy)[0]


def _forward(hidden, head, targets, scale, columns: int, entropy: bool):
    """Log-probabilities and entropies [B, T] of `targets`, `columns` columns of the batch at a time."""
    weights = head.astype(hidden.dtype)

    def one(_, start):
        logits = _logits(_slice(hidden, start, columns), weights, scale)
        picked = jnp.take_along_axis(logits, _slice(targets, start, columns)[..., None], axis=-1)[..., 0]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        spread = normaliser - (jnp.exp(logits - normaliser[..., None]) * logits).sum(-1) if entropy else normaliser
        return None, (picked - normaliser, normaliser, spread)

    _, outputs = jax.lax.scan(one, None, jnp.arange(0, hidden.shape[1], columns))
    values, normaliser, spread = (_unchunk(x) for x in outputs)
    return (values, spread), (hidden, head, targets, scale, normaliser)


def _slice(x: jax.Array, start: jax.Array, columns: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, columns, axis=1)


def _unchunk(x: jax.Array) -> jax.Array:
    """[chunks, B, columns, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _logits(hidden: jax.Array, head: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.einsum("BTD,DV->BTV", hidden, head, preferred_element_type=jnp.float32) * scale


def _backward(columns, entropy, saved, cotangents):
    """d log p / d logits = onehot - softmax, recomputed chunk by chunk."""
    hidden, head, targets, scale, normaliser = saved
    weights = head.astype(hidden.dtype)

    def one(d_head, start):
        h = _slice(hidden, start, columns)
        logits = _logits(h, weights, scale)
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == _slice(targets, start, columns)[..., None]
        probabilities = jnp.exp(logits - _slice(normaliser, start, columns)[..., None])
        d_logits = (_slice(cotangents[0], start, columns) * scale)[..., None] * (hit - probabilities)
        d_logits = d_logits.astype(hidden.dtype)
        d_head += jnp.einsum("BTD,BTV->DV", h, d_logits, preferred_element_type=jnp.float32)
        return d_head, jnp.einsum("BTV,DV->BTD", d_logits, weights)

    starts = jnp.arange(0, hidden.shape[1], columns)
    d_head, d_hidden = jax.lax.scan(one, jnp.zeros(head.shape, jnp.float32), starts)
    return _unchunk(d_hidden), d_head.astype(head.dtype), None, None


_fused.defvjp(_forward, _backward)
