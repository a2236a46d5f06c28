"""Dense families against transformers: logits, gradients, padding, packing, and every field of their configs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity import TOKENS, Pair, check_gradients, check_modules, check_packing, check_padding
from tiny_models import make_model, new_model

from models import dense, hf
from models.rope import Rope

# One model each; together: all families, both kinds of head, one to four queries a key, biases, an odd vocabulary.
MODELS = {
    "qwen3-tied": ("qwen3", dict(tied=True)),
    "qwen3-untied": ("qwen3", dict(tied=False, attention_bias=True, num_key_value_heads=4)),
    "qwen2-tied": ("qwen2", dict(tied=True, num_key_value_heads=1)),
    "qwen2-untied": ("qwen2", dict(tied=False, vocab_size=277)),
    "llama-tied": ("llama", dict(tied=True, num_key_value_heads=1, vocab_size=277)),
    "llama-untied": ("llama", dict(tied=False, attention_bias=True, mlp_bias=True)),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name):
        if name not in made:
            model_type, options = MODELS[name]
            made[name] = Pair(make_model(root / name, model_type, tokenizer=False, **options))
        return made[name]

    return get


@pytest.fixture
def tied(pairs):
    return pairs("qwen3-tied")


@pytest.fixture(params=MODELS)
def pair(request, pairs):
    return pairs(request.param)


class TestParity:
    def test_modules(self, pair):
        assert check_modules(pair) == 2 * 4

    def test_logits(self, pair):
        pair.assert_close(pair.ours(TOKENS), pair.reference(TOKENS))

    @pytest.mark.parametrize("left", [0, 5])
    def test_padding_is_invisible(self, tied, left):
        check_padding(tied, left)

    @pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-tied", "llama-tied"])
    def test_packed_rows_equal_separate_ones(self, pairs, name):
        check_packing(pairs(name))

    def test_gradients(self, pair):
        check_gradients(pair)

    def test_bfloat16_computes_in_bfloat16_and_stays_near(self, tied):
        model, params = hf.load(tied.model.source, dtype="bfloat16", scan_layers=False)
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        hidden = jax.jit(model.hidden)(params, TOKENS, positions, ones)
        assert hidden.dtype == jnp.bfloat16
        assert jax.tree.leaves(params)[0].dtype == jnp.float32
        exact = tied.ours(TOKENS)
        error = np.abs(np.asarray(hidden.astype(jnp.float32) @ model.head(params)) - exact).mean()
        assert 0 < error < 0.05 * np.abs(exact).mean() + 0.1


# Another valid value for each field, with what it does to a model: "values" keeps the weights and changes the logits,
# "shapes" needs other weights, "init" changes how new weights are drawn.
CHANGED = {
    "vocab_size": (300, "shapes"),
    "hidden_size": (32, "shapes"),
    "intermediate_size": (96, "shapes"),
    "num_hidden_layers": (3, "shapes"),
    "num_attention_heads": (8, "shapes"),
    "num_key_value_heads": (4, "shapes"),
    "head_dim": (16, "shapes"),
    "attention_bias": (True, "shapes"),
    "mlp_bias": (True, "shapes"),
    "tie_word_embeddings": (False, "shapes"),
    "model_type": ("qwen2", "shapes"),
    "rope": (Rope(5e5), "values"),
    "hidden_act": ("gelu", "values"),
    "rms_norm_eps": (1e-2, "values"),
    "initializer_range": (0.5, "init"),
    "max_position_embeddings": (512, "rope"),
}
SHAPES = [f for f, (_, effect) in CHANGED.items() if effect == "shapes"]


class TestConfig:
    def test_every_field_is_covered(self):
        assert set(CHANGED) == {f.name for f in dataclasses.fields(dense.Config)}

    @pytest.mark.parametrize("field", [f for f, (_, effect) in CHANGED.items() if effect == "values"])
    def test_a_changed_value_changes_the_logits(self, tied, field):
        config = dataclasses.replace(tied.model.config, **{field: CHANGED[field][0]})
        assert config != tied.model.config
        model = dataclasses.replace(tied.model, config=config)
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        logits = jax.jit(lambda p: model.hidden(p, TOKENS, positions, ones) @ model.head(p))(tied.params)
        assert np.abs(logits - tied.ours(TOKENS)).max() > 1e-2

    @pytest.mark.parametrize("field", SHAPES)
    @pytest.mark.parametrize("name", ["qwen3-tied", "llama-tied"])
    def test_a_changed_size_is_the_one_of_transformers(self, pairs, name, field):
        base = pairs(name)
        if field == "mlp_bias" and name != "llama-tied":
            pytest.skip("a setting of llama only")
        config = dataclasses.replace(base.model.config, **{field: CHANGED[field][0]})
        with torch.device("meta"):
            reference = new_model(config.model_type, {k: v for k, v in config.to_hf().items() if k != "model_type"})
        expected = {n: tuple(p.shape) for n, p in reference.named_parameters()}
        assert expected != {n: tuple(p.shape) for n, p in base.torch.named_parameters()}
        assert {n: t.hf_shape for t in dense.tensors(config) for n in t.hf_names()} == expected
        shapes = jax.eval_shape(lambda: hf.init(config, jax.random.key(0))[1])
        found = {tuple(k.key for k in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
        assert found == {t.path: t.full_shape for t in dense.tensors(config)}

    def test_initializer_range(self, tied):
        config = dataclasses.replace(tied.model.config, initializer_range=0.5)
        _, params = hf.init(config, jax.random.key(1))
        assert np.std(params["layers"]["mlp"]["up_proj"]["kernel"]) == pytest.approx(0.5, rel=0.05)
        assert np.std(params["embed_tokens"]["embedding"]) == pytest.approx(0.5, rel=0.05)
        assert (params["norm"]["scale"] == 1).all()

    def test_max_position_embeddings_stretches_yarn(self):
        raw = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}
        a, b = (Rope.from_hf(raw | {"max_position_embeddings": n}).frequencies(32)[0] for n in (64, 4096))
        assert not np.allclose(a, b)

    def test_round_trip(self, tied):
        config = dataclasses.replace(
            tied.model.config, rope=Rope(1e6, "yarn", 1.0, (("factor", 4.0), ("original_max_position_embeddings", 64)))
        )
        assert dense.Config.from_hf(config.to_hf()) == config

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding-window attention"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window .* for sliding_attention"),
            ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is no setting of qwen3"),
            ({"hidden_act": "mish"}, "hidden_act='mish'"),
            ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
            ({"hidden_size": None}, "config.json has no hidden_size"),
        ],
    )
    def test_refusals_name_the_setting(self, tied, change, message):
        with pytest.raises(ValueError, match=message):
            dense.Config.from_hf(tied.model.config.to_hf() | change)

    def test_a_window_that_no_layer_uses_is_no_window(self, tied):
        raw = tied.model.config.to_hf() | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
        assert dense.Config.from_hf(raw) == tied.model.config
        assert dense.Config.from_hf(raw | {"use_sliding_window": False, "max_window_layers": 0}) == tied.model.config

    def test_settings_of_another_family_are_refused(self, tied):
        with pytest.raises(ValueError, match="mlp_bias=true is no setting of qwen3"):
            dataclasses.replace(tied.model.config, mlp_bias=True)

    @pytest.mark.parametrize("model_type", dense.FAMILIES)
    def test_absent_keys_are_those_of_transformers(self, model_type):
        from transformers import AutoConfig

        sizes = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32)
        theirs = AutoConfig.for_model(model_type, **sizes).to_dict()
        assert dense.Config.from_hf({"model_type": model_type, **sizes}) == dense.Config.from_hf(theirs)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "dynamic", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ],
        ids=lambda r: r["rope_type"],
    )
    @pytest.mark.parametrize("model_type", ["qwen3", "llama"])
    def test_rope_types(self, tmp_path, model_type, rope):
        options = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": 64, "tokenizer": False}
        pair = Pair(make_model(tmp_path, model_type, **options))
        ours = pair.ours(TOKENS)
        pair.assert_close(ours, pair.reference(TOKENS))
        plain = dataclasses.replace(pair.model, config=dataclasses.replace(pair.model.config, rope=Rope(1e4)))
        positions = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape)
        without = plain.hidden(pair.params, TOKENS, positions, np.ones_like(TOKENS)) @ plain.head(pair.params)
        assert np.abs(without - ours).max() > 0.1

    def test_the_8b_model(self):
        raw = {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 36,
        }
        config = dense.Config.from_hf(raw)
        shapes = jax.eval_shape(lambda: hf.init(config, jax.random.key(0))[1])
        assert sum(x.size for x in jax.tree.leaves(shapes)) == 8_190_735_360
        assert sum(int(np.prod(t.full_shape)) for t in dense.tensors(config)) == 8_190_735_360
        assert config.rope == Rope(1e6)
