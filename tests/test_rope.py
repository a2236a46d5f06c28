"""Rotary positions: tables by hand and against transformers, types that are refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import Rope, rotate

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class TestRope:
    @pytest.mark.parametrize("name", ROPES)
    def test_frequencies_are_those_of_transformers(self, name):
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = name.split("_")[0]
        raw = {"rope_type": kind, "rope_theta": 5000.0, **ROPES[name]}
        config = Qwen3Config(rope_parameters=dict(raw), max_position_embeddings=256, head_dim=32)
        inverse, factor = Rope.from_hf(config.to_dict()).frequencies(32)
        if kind == "default":
            np.testing.assert_allclose(inverse, 5000.0 ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)
            assert factor == 1.0
            return
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, None)
        np.testing.assert_allclose(inverse, expected.numpy(), rtol=2e-6)
        assert factor == pytest.approx(expected_factor, rel=1e-6)

    def test_by_hand(self):
        # One pair, theta^0 = 1: position p turns (1, 0) into (cos p, sin p).
        cos, sin = Rope(10000.0).tables(jnp.array([[0, 1, 2]]), 2)
        turned = rotate(jnp.tile(jnp.array([1.0, 0.0]), (1, 3, 1, 1)).reshape(1, 3, 1, 2), cos, sin)
        np.testing.assert_allclose(turned[0, :, 0], [[np.cos(p), np.sin(p)] for p in range(3)], atol=1e-6)

    def test_partial_leaves_the_rest_of_the_head(self):
        cos, sin = Rope(10000.0, partial=0.5).tables(jnp.array([[3]]), 8)
        assert cos.shape[-1] == 2
        x = jnp.arange(8.0).reshape(1, 1, 1, 8)
        turned = rotate(x, cos, sin)
        assert np.array_equal(turned[..., 4:], x[..., 4:]) and not np.allclose(turned[..., :4], x[..., :4])

    def test_keys_of_older_config_files(self):
        old = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
        new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}
        assert Rope.from_hf(old) == Rope.from_hf(new)
        assert Rope.from_hf({"rope_theta": 1e6, "rope_scaling": None}) == Rope(1e6)
        assert Rope.from_hf({"rope_parameters": Rope.from_hf(old).to_hf()}) == Rope.from_hf(old)

    @pytest.mark.parametrize("kind", ["longrope", "mrope", "proportional"])
    def test_other_types_are_refused_by_name(self, kind):
        with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported; supported are default, linear"):
            Rope.from_hf({"rope_parameters": {"rope_type": kind, "factor": 2.0}})

    def test_a_missing_key_is_named(self):
        with pytest.raises(ValueError, match="'llama3' needs low_freq_factor, high_freq_factor"):
            Rope.from_hf({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}, "max_position_embeddings": 64})


class TestDynamic:
    """Frequencies follow the length of each segment, so that packing and padding change nothing."""

    ROPE = Rope.from_hf({"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16})

    def test_a_segment_of_any_length_has_the_tables_of_transformers(self):
        import torch
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        raw = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        config = LlamaConfig(rope_parameters=raw, max_position_embeddings=16, head_dim=8, hidden_size=32)
        lengths = (40, 10, 16, 17)
        positions = np.concatenate([np.arange(n) for n in lengths])[None]
        segments = np.repeat(np.arange(len(lengths)) + 1, lengths)[None]
        cos, sin = self.ROPE.tables(jnp.asarray(positions), 8, jnp.asarray(segments))
        start = 0
        for n in lengths:
            inverse, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=torch.tensor(n))
            angles = np.arange(n)[:, None] * inverse.numpy()
            np.testing.assert_allclose(cos[0, start : start + n], np.cos(angles), atol=1e-5)
            np.testing.assert_allclose(sin[0, start : start + n], np.sin(angles), atol=1e-5)
            start += n
        plain, _ = Rope(10000.0).tables(jnp.asarray(positions), 8)
        assert np.abs(cos - plain)[0, :40].max() > 0.1 and np.array_equal(cos[0, 40:66], plain[0, 40:66])
