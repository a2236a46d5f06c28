"""The gated delta rule (Yang et al., arXiv 2412.06464) over packed rows, in its chunked, parallel form.

A head keeps a state S [H, V] that maps keys to values. At each token of a segment, starting from S = 0,

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q / sqrt(H)

with k and q of length one. Within a chunk of tokens the corrections v - S^T k depend on each other through a unit lower
triangular system, whose inverse is made of matrix products (section 3.3 there; arXiv 2406.06484 for the system);
between chunks the state is handed on. So the cost is linear in the length and lies in matrix products.

Shape letters: B rows, T tokens, K key heads, G value heads that share a key head, H key width, V value width, C chunks,
I and J tokens of a chunk. All of it is computed in float32.
"""

import functools

import jax
import jax.numpy as jnp

from models.layers import wide

CHUNK = 64

# Sums of decays stand in exponents, and errors of the inverse multiply: neither may lose digits on an accelerator.
_exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    chunk: int = CHUNK,
) -> jax.Array:
    """Outputs o [B, T, K G, V] in v's dtype; on segment 0, padding, they are finite and mean nothing.

    Args:
      q, k: [B, T, K, H]; they are brought to length one here. v: [B, T, K G, V]; value head n reads key head n // G.
      log_decay: g [B, T, K G], at most 0. beta: [B, T, K G], in [0, 1].
      segment_ids: int [B, T], each segment's tokens side by side; states do not cross from one to another.
      chunk: tokens at a time, a power of two.
    """
    batch, length, key_heads, width = k.shape
    chunk = min(chunk, 1 << (length - 1).bit_length())

    def chunked(x):  # [B, T, K G, ...] -> [B, K, G, C, I, ...]
        x = jnp.pad(x.astype(wide(x)), ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch, -1, chunk, key_heads, x.shape[2] // key_heads, *x.shape[3:])
        return jnp.moveaxis(x, (3, 4), (1, 2))

    segments = jnp.pad(segment_ids, ((0, 0), (0, -length % chunk))).reshape(batch, -1, chunk)
    q, k = chunked(_unit(q) * width**-0.5)[:, :, 0], chunked(_unit(k))[:, :, 0]
    out = _chunks(q, k, chunked(v), chunked(log_decay), chunked(beta), segments)
    return jnp.moveaxis(out, (1, 2), (3, 4)).reshape(batch, -1, *v.shape[2:])[:, :length].astype(v.dtype)


def _chunks(q, k, v, g, beta, segments) -> jax.Array:
    """q, k [B, K, C, I, H]; v [B, K, G, C, I, V]; g, beta [B, K, G, C, I]; segments [B, C, I] -> v's shape."""
    before = jnp.roll(segments[:, :, -1:], 1, axis=1)  # what the state belongs to; the first chunk's is zero anyway
    goes_on = (segments == before)[:, None, None]  # token -> the incoming state is its segment's
    stays = (segments == segments[:, :, -1:])[:, None, None]  # token -> the outgoing state is its segment's
    size = segments.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    same = (segments[..., :, None] == segments[..., None, :])[:, None, None] & lower

    # between[i, j] = sum of g over j < l <= i, added up as it is, not as a difference of long sums
    between = _exact("IL,...LJ->...IJ", lower.astype(g.dtype), jnp.where(lower & ~lower.T, g[..., None], 0.0))
    decay = jnp.exp(jnp.where(same, between, -jnp.inf))
    since = jnp.exp(jnp.where(goes_on, _exact("IL,...L->...I", lower.astype(g.dtype), g), -jnp.inf))
    until = jnp.exp(jnp.where(stays, between[..., -1, :], -jnp.inf))

    system = beta[..., None] * jnp.einsum("BKCIH,BKCJH->BKCIJ", k, k)[:, :, None] * decay
    inverse = unit_lower_inverse(jnp.tril(system, -1))
    values = inverse @ (beta[..., None] * v)
    keys = inverse @ ((beta * since)[..., None] * k[:, :, None])
    scores = jnp.einsum("BKCIH,BKCJH->BKCIJ", q, k)[:, :, None] * decay

    def step(state, chunk):  # state [B, K, G, H, V]
        q, values, keys, scores, k, through = chunk
        new = values - keys @ state
        out = q @ state + scores @ new
        return through[..., None, None] * state + jnp.einsum("BKGIH,BKGIV->BKGHV", k, new), out

    through = since[..., -1]
    parts = (since[..., None] * q[:, :, None], values, keys, scores, until[..., None] * k[:, :, None], through)
    state = jnp.zeros((*v.shape[:3], k.shape[-1], v.shape[-1]), v.dtype)
    _, out = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 3, 0) for x in parts))
    return jnp.moveaxis(out, 0, 3)


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(1 + lower)^-1 of strictly lower triangular matrices [..., n, n], n a power of two.

    Halves are inverted as one batch and joined by two products, which is as exact as substitution row by row; a
    power series would not be, its terms grow before they cancel.
    """
    size = lower.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=lower.dtype) - lower
    half = size // 2
    first, second = unit_lower_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_exact("...IJ,...JK,...KL->...IL", second, lower[..., half:, :half], first)
    return jnp.block([[first, jnp.zeros_like(first)], [corner, second]])


def _inverse_forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, d):
    return (-jnp.tril(_exact("...JI,...JK,...LK->...IL", inverse, d, inverse), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _unit(x: jax.Array) -> jax.Array:
    """x over its length on the last axis, float32; 1e-6 as the kernels of this model have it."""
    x = x.astype(wide(x))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def causal_conv(x: jax.Array, kernel: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Depthwise convolution over the last tokens of the own segment.

    Args:
      x: [B, T, D]. kernel: [taps, 1, D], the last tap is the token itself. segment_ids: int [B, T].

    Returns [B, T, D].
    """
    taps, length = kernel.shape[0], x.shape[1]
    kernel = kernel[:, 0].astype(x.dtype)
    y = x * kernel[-1]
    for back in range(1, min(taps, length)):
        same = segment_ids[:, back:] == segment_ids[:, :-back]
        past = jnp.where(same[..., None], x[:, :-back], 0) * kernel[-1 - back]
        y += jnp.pad(past, ((0, 0), (back, 0), (0, 0)))
    return y
