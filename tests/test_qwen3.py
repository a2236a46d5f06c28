"""Qwen3 against transformers: logits, gradients, padding, packing, and every field of its config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import make_qwen3
from transformers import AutoModelForCausalLM

from models import hf, qwen3
from models.layers import Rope
from rti_jax.logprobs import token_logprobs

TOLERANCE = 1e-5  # of the largest logit
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 75)).astype(np.int32)  # 256 is padding: no gradient in torch


class Pair:
    """The same weights in transformers and here."""

    def __init__(self, path):
        self.torch = AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager").eval()
        self.model, self.params = hf.load(path)
        self._logits = jax.jit(lambda p, *a: self.model.hidden(p, *a) @ self.model.head(p))

    def ours(self, tokens, positions=None, segment_ids=None):
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        segment_ids = np.ones_like(tokens) if segment_ids is None else segment_ids
        return np.asarray(
            self._logits(self.params, *(np.asarray(x, np.int32) for x in (tokens, positions, segment_ids)))
        )

    def reference(self, tokens):
        with torch.no_grad():
            return self.torch(torch.tensor(np.asarray(tokens)).long()).logits.numpy()


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return Pair(make_qwen3(tmp_path_factory.mktemp("tied"), tied=True, tokenizer=False))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return Pair(make_qwen3(tmp_path_factory.mktemp("untied"), tied=False, tokenizer=False, attention_bias=True))


@pytest.fixture(params=["tied", "untied"])
def pair(request):
    return request.getfixturevalue(request.param)


def assert_close(ours, reference):
    assert np.abs(reference).max() > 1  # std 0.2 gives logits that a mistake would move
    np.testing.assert_allclose(ours, reference, atol=TOLERANCE * np.abs(reference).max())


class TestParity:
    def test_logits(self, pair):
        assert_close(pair.ours(TOKENS), pair.reference(TOKENS))

    @pytest.mark.parametrize("left", [0, 5])
    def test_padding_is_invisible(self, tied, left):
        real, length = 30, TOKENS.shape[1]
        tokens, positions, segment_ids = (np.zeros((1, length), np.int32) for _ in range(3))
        part = slice(left, left + real)
        tokens[:], tokens[0, part], positions[0, part], segment_ids[0, part] = 7, TOKENS[0, :real], np.arange(real), 1
        ours = tied.ours(np.tile(tokens, (2, 1)), np.tile(positions, (2, 1)), np.tile(segment_ids, (2, 1)))
        assert_close(ours[:1, part], tied.reference(TOKENS[:1, :real]))

    def test_packed_rows_equal_separate_ones(self, tied):
        lengths = (20, 3, 40)
        tokens, positions, segment_ids = (np.zeros((2, 75), np.int32) for _ in range(3))
        start = 0
        for segment, n in enumerate(lengths, 1):
            part = slice(start, start + n)
            tokens[:, part], positions[:, part] = TOKENS[:, part], np.arange(n)
            segment_ids[:, part], start = segment, start + n
        ours, start = tied.ours(tokens, positions, segment_ids), 0
        for n in lengths:
            part = slice(start, start + n)
            assert_close(ours[:, part], tied.reference(TOKENS[:, part]))
            start += n
        wrong = tied.ours(tokens, positions, (segment_ids > 0).astype(np.int32))  # what a leak would give
        assert np.abs(wrong - ours)[:, 20:23].max() > 0.1

        tokens[:, :20] = (tokens[:, :20] + 1) % 256
        assert np.array_equal(tied.ours(tokens, positions, segment_ids)[:, 20:63], ours[:, 20:63])  # bit for bit

    def test_gradients(self, pair):
        temperature = 0.7
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)

        def total(params):
            hidden = pair.model.hidden(params, TOKENS, positions, ones)
            return token_logprobs(hidden, pair.model.head(params), TOKENS, ones, temperature, chunk=64)[0].sum()

        value, grads = jax.jit(jax.value_and_grad(total))(pair.params)
        ids = torch.tensor(TOKENS).long()
        pair.torch.zero_grad()
        table = (pair.torch(ids).logits / temperature).log_softmax(-1)
        reference = table[:, :-1].gather(-1, ids[:, 1:, None]).sum()
        reference.backward()
        np.testing.assert_allclose(value, reference.item(), rtol=1e-6)
        expected = dict(pair.torch.named_parameters())
        compared = 0
        for name, ours in hf.to_hf(pair.model, grads):
            theirs = expected[name].grad.numpy()
            np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), err_msg=name)
            compared += 1
        assert compared == len(expected)

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
    "tie_word_embeddings": (False, "shapes"),
    "rope": (Rope(5e5), "values"),
    "hidden_act": ("gelu", "values"),
    "rms_norm_eps": (1e-2, "values"),
    "initializer_range": (0.5, "init"),
    "max_position_embeddings": (512, "rope"),
}


class TestConfig:
    def test_every_field_is_covered(self):
        assert set(CHANGED) == {f.name for f in dataclasses.fields(qwen3.Config)}

    @pytest.mark.parametrize("field", [f for f, (_, effect) in CHANGED.items() if effect == "values"])
    def test_a_changed_value_changes_the_logits(self, tied, field):
        config = dataclasses.replace(tied.model.config, **{field: CHANGED[field][0]})
        assert config != tied.model.config
        model = dataclasses.replace(tied.model, config=config)
        positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
        logits = jax.jit(lambda p: model.hidden(p, TOKENS, positions, ones) @ model.head(p))(tied.params)
        assert np.abs(logits - tied.ours(TOKENS)).max() > 1e-2

    @pytest.mark.parametrize("field", [f for f, (_, effect) in CHANGED.items() if effect == "shapes"])
    def test_a_changed_size_is_the_one_of_transformers(self, tied, field):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = dataclasses.replace(tied.model.config, **{field: CHANGED[field][0]})
        with torch.device("meta"):
            reference = Qwen3ForCausalLM(Qwen3Config(**config.to_hf()))
        expected = {n: tuple(p.shape) for n, p in reference.named_parameters()}
        assert expected != {n: tuple(p.shape) for n, p in tied.torch.named_parameters()}
        names = {n: t.hf_shape for t in qwen3.tensors(config) for n in t.hf_names()}
        assert names == expected
        model = dataclasses.replace(tied.model, config=config)
        shapes = jax.eval_shape(lambda: hf.init(config, jax.random.key(0))[1])
        assert jax.tree.leaves(shapes) and {t.path for t in model.tensors} == {
            tuple(k.key for k in path) for path, _ in jax.tree.leaves_with_path(shapes)
        }
        for path, leaf in jax.tree.leaves_with_path(shapes):
            table = next(t for t in model.tensors if t.path == tuple(k.key for k in path))
            assert leaf.shape == table.full_shape

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
        assert qwen3.Config.from_hf(config.to_hf()) == config

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"use_sliding_window": True, "sliding_window": 16}, "sliding-window attention"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
            ({"hidden_act": "mish"}, "hidden_act='mish'"),
            ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
            ({"hidden_size": None}, "config.json has no hidden_size"),
        ],
    )
    def test_refusals_name_the_setting(self, tied, change, message):
        with pytest.raises(ValueError, match=message):
            qwen3.Config.from_hf(tied.model.config.to_hf() | change)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ],
        ids=lambda r: r["rope_type"],
    )
    def test_rope_types(self, tmp_path, rope):
        pair = Pair(make_qwen3(tmp_path, tokenizer=False, rope_parameters=rope))
        assert_close(pair.ours(TOKENS), pair.reference(TOKENS))

    def test_the_8b_model(self):
        raw = {
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
        config = qwen3.Config.from_hf(raw)
        count = sum(int(np.prod(t.full_shape)) for t in qwen3.tensors(config))
        assert count == 8_190_735_360
        assert config.rope == Rope(1e6)
