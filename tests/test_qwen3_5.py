"""Qwen3.5's text model against transformers: modules, logits, gradients, padding, packing and its config."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity import TOKENS, Pair, check_gradients, check_modules, check_packing, check_padding
from tiny_models import make_model, new_model

from models import hf, qwen3_5
from models.rope import Rope

# Norms of small numbers magnify rounding: transformers itself is 2.4e-5 from its own values in float64.
TOLERANCE = 5e-5
L, F = qwen3_5.LINEAR, qwen3_5.FULL
MODELS = {
    "tied": dict(tied=True),
    "untied": dict(tied=False, attention_bias=True, vocab_size=277, num_key_value_heads=1, layer_types=[L, F]),
    "equal-heads": dict(tied=True, num_key_value_heads=4, linear_num_value_heads=2, layer_types=[L, F, L, F]),
    "uneven": dict(tied=True, layer_types=[F, L, L]),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name):
        if name not in made:
            options = {"num_hidden_layers": len(MODELS[name].get("layer_types", range(8))), **MODELS[name]}
            folder = make_model(root / name, "qwen3_5_text", tokenizer=False, **options)
            made[name] = Pair(folder, TOLERANCE)
        return made[name]

    return get


@pytest.fixture
def tied(pairs):
    return pairs("tied")


@pytest.fixture(params=MODELS)
def pair(request, pairs):
    return pairs(request.param)


class TestParity:
    def test_modules(self, pair):
        assert check_modules(pair) == 4 * pair.model.config.num_hidden_layers

    def test_logits(self, pair):
        pair.assert_close(pair.ours(TOKENS), pair.reference(TOKENS))

    @pytest.mark.parametrize("left", [0, 5])
    def test_padding_is_invisible(self, tied, left):
        check_padding(tied, left)

    def test_packed_rows_equal_separate_ones(self, tied):
        check_packing(tied)

    @pytest.mark.parametrize("name", [pytest.param("tied", marks=pytest.mark.slow), "untied", "equal-heads"])
    def test_gradients(self, pairs, name):
        check_gradients(pairs(name), 1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options", [pytest.param({"scan_layers": False}, marks=pytest.mark.exhaustive), {"remat": "full"}]
    )
    def test_every_way_to_run_it_is_the_same(self, pairs, options):
        tied = pairs("equal-heads")
        model = dataclasses.replace(tied.model, execution=dataclasses.replace(tied.model.execution, **options))
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)

        def run(model):
            def total(params):
                hidden = model.hidden(params, TOKENS, positions, ones)
                return jnp.square(hidden).mean() + hidden[..., 0].sum()

            return jax.jit(jax.value_and_grad(total))(tied.params)

        (value, grads), (expected, reference) = run(model), run(tied.model)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())

    def test_bfloat16_computes_in_bfloat16_and_stays_near(self, tied):
        model, params = hf.load(tied.model.source, dtype="bfloat16")
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        hidden = jax.jit(model.hidden)(params, TOKENS, positions, ones)
        assert hidden.dtype == jnp.bfloat16 and jax.tree.leaves(params)[0].dtype == jnp.float32
        exact = tied.ours(TOKENS)
        error = np.abs(np.asarray(hidden.astype(jnp.float32) @ model.head(params)) - exact).mean()
        assert 0 < error < 0.1 * np.abs(exact).mean() + 0.1


# Another valid value for each field, with what it does to a model (see test_dense.py).
CHANGED = {
    "vocab_size": (300, "shapes"),
    "hidden_size": (32, "shapes"),
    "intermediate_size": (96, "shapes"),
    "num_hidden_layers": (4, "shapes"),
    "num_attention_heads": (8, "shapes"),
    "num_key_value_heads": (4, "shapes"),
    "head_dim": (16, "shapes"),
    "linear_conv_kernel_dim": (3, "shapes"),
    "linear_key_head_dim": (8, "shapes"),
    "linear_value_head_dim": (16, "shapes"),
    "linear_num_key_heads": (4, "shapes"),
    "linear_num_value_heads": (2, "shapes"),
    "layer_types": ((F,) * 2 + (L,) * 6, "shapes"),
    "attention_bias": (True, "shapes"),
    "tie_word_embeddings": (False, "shapes"),
    "rope": (Rope(5e5, partial=0.25), "values"),
    "hidden_act": ("gelu", "values"),
    "rms_norm_eps": (1e-2, "values"),
    "initializer_range": (0.5, "init"),
    "max_position_embeddings": (512, "rope"),
}


def changed(config, field):
    value = CHANGED[field][0]
    more = {"layer_types": config.layer_types[:value]} if field == "num_hidden_layers" else {}
    return dataclasses.replace(config, **{field: value}, **more)


class TestConfig:
    def test_every_field_is_covered(self):
        assert set(CHANGED) == {f.name for f in dataclasses.fields(qwen3_5.Config)}

    @pytest.mark.parametrize("field", [f for f, (_, effect) in CHANGED.items() if effect == "values"])
    def test_a_changed_value_changes_the_logits(self, pairs, field):
        tied = pairs("untied")
        model = dataclasses.replace(tied.model, config=changed(tied.model.config, field))
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        logits = jax.jit(lambda p: model.hidden(p, TOKENS, positions, ones) @ model.head(p))(tied.params)
        assert np.abs(logits - tied.ours(TOKENS)).max() > 1e-2

    @pytest.mark.parametrize("partial", [0.5, 1.0])
    def test_the_rotated_part(self, pairs, partial):
        tied = pairs("untied")
        rope = dataclasses.replace(tied.model.config.rope, partial=partial)
        model = dataclasses.replace(tied.model, config=dataclasses.replace(tied.model.config, rope=rope))
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        logits = jax.jit(lambda p: model.hidden(p, TOKENS, positions, ones) @ model.head(p))(tied.params)
        assert np.abs(logits - tied.ours(TOKENS)).max() > 1e-2

    @pytest.mark.parametrize("field", [f for f, (_, effect) in CHANGED.items() if effect == "shapes"])
    def test_a_changed_size_is_the_one_of_transformers(self, tied, field):
        config = changed(tied.model.config, field)
        with torch.device("meta"):
            reference = new_model("qwen3_5_text", {k: v for k, v in config.to_hf().items() if k != "model_type"})
        expected = {n: tuple(p.shape) for n, p in reference.named_parameters()}
        assert expected != {n: tuple(p.shape) for n, p in tied.torch.named_parameters()}
        table = {t.hf_name(i): t.hf_shape for t in qwen3_5.tensors(config) for i in range(len(t.layers)) if t.layers}
        table |= {t.name: t.hf_shape for t in qwen3_5.tensors(config) if not t.layers}
        assert table == expected
        shapes = jax.eval_shape(lambda: hf.init(config, jax.random.key(0))[1])
        found = {tuple(k.key for k in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
        assert found == {t.path: t.full_shape for t in qwen3_5.tensors(config)}

    def test_initial_values(self, tied):
        _, params = hf.init(changed(tied.model.config, "initializer_range"), jax.random.key(1))
        layer = params["layers"]["layer_0"]
        assert np.std(layer["mlp"]["up_proj"]["kernel"]) == pytest.approx(0.5, rel=0.05)
        assert np.std(layer["linear_attn"]["conv1d"]["kernel"]) == pytest.approx(0.5, rel=0.15)
        assert (layer["input_layernorm"]["scale"] == 0).all() and (layer["linear_attn"]["norm"]["scale"] == 1).all()
        rates = np.exp(layer["linear_attn"]["A_log"])
        assert (rates >= 0.01).all() and (rates <= 16).all() and np.std(rates) > 1

    def test_round_trip(self, tied):
        config = changed(tied.model.config, "layer_types")
        assert qwen3_5.Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config

    @pytest.mark.parametrize(
        ("kinds", "unit"), [("LLLF" * 2, "LLLF"), ("LLLL", "L"), ("FLL", "FLL"), ("LFLF", "LF"), ("LLFLF", "LLFLF")]
    )
    def test_the_repeating_unit(self, tied, kinds, unit):
        names = {"L": L, "F": F}
        kinds = tuple(names[k] for k in kinds)
        config = dataclasses.replace(tied.model.config, num_hidden_layers=len(kinds), layer_types=kinds)
        assert config.unit == tuple(names[k] for k in unit)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layer_types": [F]}, "layer_types has 1 entries of full_attention; expected 8"),
            ({"layer_types": ["sliding_attention"] * 8}, "entries of sliding_attention"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
            ({"hidden_act": "mish"}, "hidden_act='mish'"),
            ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2"),
            ({"attn_output_gate": False}, "attn_output_gate=false"),
            ({"hidden_size": None}, "config.json has no hidden_size"),
        ],
    )
    def test_refusals_name_the_setting(self, tied, change, message):
        with pytest.raises(ValueError, match=message):
            qwen3_5.Config.from_hf(tied.model.config.to_hf() | change)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_the_9b_model(self, wrapped):
        from transformers import Qwen3_5TextConfig

        raw = Qwen3_5TextConfig().to_dict()
        config = qwen3_5.Config.from_hf({"model_type": "qwen3_5", "text_config": raw} if wrapped else raw)
        shapes = jax.eval_shape(lambda: hf.init(config, jax.random.key(0))[1])
        assert sum(x.size for x in jax.tree.leaves(shapes)) == 8_953_803_264
        assert sum(int(np.prod(t.full_shape)) for t in qwen3_5.tensors(config)) == 8_953_803_264
        bare = {k: raw[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        assert qwen3_5.Config.from_hf(bare | {"num_attention_heads": 16}) == config
