"""The chunked delta rule against its recurrence, the triangular inverse, and the convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gated_delta
from models.gated_delta import causal_conv, gated_delta_rule, unit_lower_inverse

KEY_HEADS, GROUPS, H, V = 2, 2, 8, 6


def recurrence(q, k, v, log_decay, beta, segment_ids):
    """The definition, token by token, in float64."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    out = np.zeros(v.shape)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            state, own = np.zeros((k.shape[-1], v.shape[-1])), None
            for t in range(v.shape[1]):
                if segment_ids[row, t] != own:
                    state, own = np.zeros_like(state), segment_ids[row, t]
                key, query = k[row, t, head // GROUPS], q[row, t, head // GROUPS]
                state = state * np.exp(log_decay[row, t, head])
                state += np.outer(key, beta[row, t, head] * (v[row, t, head] - state.T @ key))
                out[row, t, head] = state.T @ query / np.sqrt(k.shape[-1])
    return out


def draw(length, seed=0, rows=2, decay=1.0):
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k = (jax.random.normal(key, (rows, length, KEY_HEADS, H)) for key in keys[:2])
    v = jax.random.normal(keys[2], (rows, length, KEY_HEADS * GROUPS, V))
    log_decay = -decay * jax.random.exponential(keys[3], v.shape[:3])
    return q, k, v, log_decay, jax.random.uniform(keys[4], v.shape[:3])


def segments(length, rows=2):
    """Row 0: padding, three segments, padding; row 1: one segment."""
    cuts = [0, 2, int(0.4 * length), int(0.45 * length) + 1, int(0.9 * length), length]
    first = np.concatenate(
        [np.full(max(0, b - a), s) for s, a, b in zip((0, 1, 2, 3, 0), cuts, cuts[1:], strict=False)]
    )
    return np.stack([first[:length], np.ones(length)]).astype(np.int32)


class TestRule:
    @pytest.mark.parametrize(("length", "decay"), [(1, 0.1), (15, 0.0), (16, 0.1), (17, 30.0), (77, 0.0), (77, 1.0)])
    def test_values(self, length, decay):
        arrays, ids = draw(length, decay=decay), np.ones((2, length), np.int32)
        ours = jax.jit(lambda *a: gated_delta_rule(*a, ids, chunk=16))(*arrays)
        np.testing.assert_allclose(ours, recurrence(*arrays, ids), atol=3e-6)

    @pytest.mark.parametrize("chunk", [8, 64])
    def test_segments(self, chunk):
        length = 77
        arrays, ids = draw(length, decay=0.05), segments(length)
        ours = jax.jit(lambda *a: gated_delta_rule(*a, ids, chunk=chunk))(*arrays)
        expected, real = recurrence(*arrays, ids), ids > 0
        np.testing.assert_allclose(ours[real], expected[real], atol=3e-6)
        leaked = recurrence(*arrays, np.ones_like(ids))
        assert np.abs(leaked - expected)[0][ids[0] == 2].max() > 0.1
        assert np.isfinite(ours).all()

    def test_other_segments_change_nothing(self):
        ids = segments(77)
        run = jax.jit(lambda *a: gated_delta_rule(*a, ids, chunk=16))
        arrays = draw(77)
        first = ids == 1
        others = [jnp.where(first.reshape(first.shape + (1,) * (x.ndim - 2)), x, 3 * x) for x in arrays]
        before, after = run(*arrays), run(*others)
        assert np.array_equal(before[first], after[first])  # bit for bit
        assert not np.array_equal(before[ids == 2], after[ids == 2])

    def test_gradients(self):
        """Against the recurrence, differentiated by JAX."""
        ids = segments(37)
        weight = jax.random.normal(jax.random.key(9), (2, 37, KEY_HEADS * GROUPS, V)) * (ids > 0)[..., None, None]

        def stepwise(q, k, v, log_decay, beta):
            q, k = (jnp.repeat(gated_delta._unit(x), GROUPS, axis=2) for x in (q, k))

            def step(state, x):
                q, k, v, g, b, new = x
                state = jnp.where(new[:, None, None, None], 0.0, state) * jnp.exp(g)[..., None, None]
                delta = b[..., None] * (v - jnp.einsum("BNHV,BNH->BNV", state, k))
                state += k[..., None] * delta[..., None, :]
                return state, jnp.einsum("BNHV,BNH->BNV", state, q) * H**-0.5

            new = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            xs = tuple(jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, v, log_decay, beta, new))
            return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((2, KEY_HEADS * GROUPS, H, V)), xs)[1], 0, 1)

        def gradients(function):
            return jax.jit(jax.grad(lambda *a: (function(*a) * weight).sum(), (0, 1, 2, 3, 4)))(*draw(37, decay=0.2))

        ours = gradients(lambda *a: gated_delta_rule(*a, ids, chunk=16))
        for name, a, b in zip("qkvgb", ours, gradients(stepwise), strict=True):
            assert np.abs(b).max() > 0.1
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), err_msg=name)

    def test_gradients_of_padding_are_finite(self):
        ids = np.zeros((2, 20), np.int32)
        grads = jax.jit(jax.grad(lambda *a: gated_delta_rule(*a, ids).sum(), (0, 1, 2, 3, 4)))(*draw(20, decay=50.0))
        assert all(np.isfinite(g).all() for g in grads)

    def test_equal_keys_do_not_overflow(self):
        """The hardest system: all keys alike, nothing forgotten; a power series of its inverse would lose it."""
        q, k, v, log_decay, beta = draw(64)
        arrays = q, jnp.ones_like(k), v, 0 * log_decay, jnp.ones_like(beta)
        ids = np.ones((2, 64), np.int32)
        np.testing.assert_allclose(gated_delta_rule(*arrays, ids), recurrence(*arrays, ids), atol=1e-5)

    def test_cost_is_linear_in_the_length(self):
        def flops(length):
            arrays, ids = draw(length), np.ones((2, length), np.int32)
            analysis = jax.jit(lambda *a: gated_delta_rule(*a, ids, chunk=16)).lower(*arrays).compile().cost_analysis()
            return analysis["flops"]

        assert flops(1024) < 4.5 * flops(256)


class TestInverse:
    @pytest.mark.parametrize("size", [1, 2, 4, 32])
    def test_values_and_gradients(self, size):
        lower = jnp.tril(0.3 * jax.random.normal(jax.random.key(size), (3, size, size)), -1)
        weight = jax.random.normal(jax.random.key(1), lower.shape)
        expected = np.linalg.inv(np.eye(size) + np.asarray(lower, np.float64))
        np.testing.assert_allclose(unit_lower_inverse(lower), expected, rtol=1e-4, atol=1e-5)
        ours = jax.grad(lambda x: (unit_lower_inverse(x) * weight).sum())(lower)
        reference = jax.grad(lambda x: (jnp.linalg.inv(jnp.eye(size) + jnp.tril(x, -1)) * weight).sum())(lower)
        np.testing.assert_allclose(ours, reference, rtol=1e-3, atol=1e-4 * max(1, np.abs(reference).max()))


class TestConv:
    def test_by_hand(self):
        x = jnp.array([[[1.0], [2.0], [3.0], [4.0], [5.0]]])
        kernel = jnp.array([100.0, 10.0, 1.0]).reshape(3, 1, 1)
        ids = jnp.array([[1, 1, 1, 2, 2]])
        np.testing.assert_array_equal(causal_conv(x, kernel, ids)[0, :, 0], [1, 12, 123, 4, 45])

    def test_one_token(self):
        y = causal_conv(
            jnp.full((1, 1, 2), 3.0), jnp.array([7.0, 2.0]).reshape(2, 1, 1) * jnp.ones((1, 1, 2)), jnp.ones((1, 1))
        )
        np.testing.assert_array_equal(y, 6.0)
