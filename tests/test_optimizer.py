"""What is decayed, which rate, and that Muon treats a stack layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rti_jax.config import OptimizerConfig
from rti_jax.optimizer import learning_rate, make_optimizer


def tree(value=1.0):
    shapes = {
        "embed_tokens": {"embedding": (6, 4)},
        "layers": {
            "input_layernorm": {"scale": (2, 4)},
            "self_attn": {"q_proj": {"kernel": (2, 4, 4), "bias": (2, 4)}, "q_norm": {"scale": (2, 2)}},
        },
        "lm_head": {"kernel": (4, 6)},
        "norm": {"scale": (4,)},
    }
    return jax.tree.map(lambda s: jnp.full(s, value), shapes, is_leaf=lambda s: isinstance(s, tuple))


def step(config, params, gradients, total_steps=10):
    optimizer = make_optimizer(config, params, total_steps)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


class TestAdamW:
    def test_decay_by_path(self):
        # by ndim the stacked norms [2, 4] would be decayed as matrices
        after = step(OptimizerConfig(lr=1.0, weight_decay=0.1), tree(), tree(0.0))
        for path, leaf in jax.tree.leaves_with_path(after):
            name = jax.tree_util.keystr(path)
            expected = 1.0 if "norm" in name or "bias" in name else 0.9
            np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=name)

    def test_a_hundred_updates_of_one_millionth_arrive(self):
        config = OptimizerConfig(lr=1e-6, weight_decay=0.0)
        params, gradients = tree(), tree(0.01)
        optimizer = make_optimizer(config, params, 100)
        state = optimizer.init(params)

        @jax.jit
        def update(params, state):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(100):
            params, state = update(params, state)
        for leaf in jax.tree.leaves(params):
            assert leaf.dtype == jnp.float32
            np.testing.assert_allclose(leaf, 0.9999, atol=2e-6)  # bfloat16 would still hold 1.0

    def test_moments_follow_the_config(self):
        # the first update is lr * sign; the second depends on b1 and b2: g = 1, then 3
        config = OptimizerConfig(lr=1.0, b1=0.9, b2=0.98, weight_decay=0.0, clip_norm=1e9)
        params = {"w": jnp.zeros(())}
        optimizer = make_optimizer(config, params, 10)
        state = optimizer.init(params)
        for gradient in (1.0, 3.0):
            updates, state = optimizer.update({"w": jnp.float32(gradient)}, state, params)
        mean, square = (0.09 + 0.3) / 0.19, (0.0196 + 0.18) / 0.0396
        assert updates["w"] == pytest.approx(-mean / np.sqrt(square), rel=1e-5)  # b2 = 0.999 gives -0.9177

    def test_clips_by_the_global_norm(self):
        # with Adam the norm is invisible in the first step, so look at the second of a small after a large gradient
        config = OptimizerConfig(lr=1.0, weight_decay=0.0, clip_norm=1.0)
        params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
        optimizer = make_optimizer(config, params, 10)
        _, state = optimizer.update({"a": jnp.float32(30.0), "b": jnp.float32(40.0)}, optimizer.init(params), params)
        moments = [s for s in jax.tree.leaves(state) if s.ndim == 0]
        np.testing.assert_allclose(sorted(float(m) for m in moments if 0 < m < 0.5)[-2:], [0.06, 0.08], rtol=1e-5)


class TestMuon:
    CONFIG = OptimizerConfig(name="muon", lr=1e-3, muon_lr=0.5, weight_decay=0.0, clip_norm=1e9)

    def test_each_layer_of_a_stack_is_orthogonalised_by_itself(self):
        rng = np.random.default_rng(0)
        params, gradients = tree(0.0), tree(0.01)
        # the second layer's gradient is a thousand times larger; together it would drown the first
        kernel = rng.normal(size=(2, 4, 4)).astype(np.float32) * np.array([1.0, 1000.0])[:, None, None]
        gradients["layers"]["self_attn"]["q_proj"]["kernel"] = jnp.asarray(kernel)
        after = step(self.CONFIG, params, gradients)["layers"]["self_attn"]["q_proj"]["kernel"]
        for layer in after:
            singular = np.linalg.svd(np.asarray(layer), compute_uv=False)
            assert (singular > 0.2).all() and (singular < 0.7).all()  # 0.5 * about 1; one matrix [2, 16] gives zeros

    def test_the_rest_is_adams(self):
        # lr times the first step of Nesterov's Adam, b1 m1 / (1 - b1^2) + g; by Muon it would go with muon_lr
        first = 1e-3 * (0.9 * 0.1 / (1 - 0.9**2) + 1)
        after = step(self.CONFIG, tree(0.0), tree(0.01))
        for path, leaf in jax.tree.leaves_with_path(after):
            if "q_proj']['kernel" not in jax.tree_util.keystr(path):
                np.testing.assert_allclose(leaf, -first, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


class TestSchedule:
    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [
            ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
            ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]),
            ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.0]),
        ],
    )
    def test_by_hand(self, schedule, expected):
        # two warm-up steps of six; a warm-up from 0 would waste the first update
        rate = learning_rate(OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=2), total_steps=6)
        np.testing.assert_allclose([rate(s) for s in (0, 1, 2, 3, 4, 6)], 2.0 * np.array(expected), atol=1e-6)

    def test_no_warmup(self):
        assert learning_rate(OptimizerConfig(lr=2.0), 6)(0) == 2.0
