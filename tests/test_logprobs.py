"""Per-token log-probabilities: values by hand, alignment, gradients, memory, and the batched scorer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make_model, make_qwen3, reference_logprobs

from models import hf
from rti_jax import logprobs
from rti_jax.logprobs import Scorer, token_logprobs

SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


def draw(batch=2, length=7, width=5, vocabulary=11):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, length, width))
    head = jax.random.normal(keys[1], (width, vocabulary))
    tokens = jax.random.randint(keys[2], (batch, length), 0, vocabulary)
    return hidden, head, tokens, jax.random.normal(keys[3], (batch, length))  # the last: cotangents of both signs


def naive(hidden, head, tokens, segment_ids, temperature):
    """The definition, with [B, T, V] logits: logprobs and entropies aligned with tokens."""
    table = jax.nn.log_softmax(hidden @ head / temperature)[:, :-1]
    values = jnp.take_along_axis(table, tokens[:, 1:, None], axis=-1)[..., 0]
    entropies = -(jnp.exp(table) * table).sum(-1)
    real = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return [jnp.pad(jnp.where(real, x, 0.0), ((0, 0), (1, 0))) for x in (values, entropies)]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
def test_every_product_of_a_float32_gradient_is_computed_in_float32(model_type, tmp_path):
    """On accelerators the default is less; a custom gradient is traced outside of its forward pass's context."""
    model, params = hf.load(make_model(tmp_path, model_type, tokenizer=False))
    tokens = jnp.ones((1, 600), jnp.int32)  # longer than what attention unrolls

    def loss(params):
        hidden = model.hidden(params, tokens, jnp.arange(600)[None], tokens)
        outputs = token_logprobs(hidden, model.head(params), tokens, tokens, entropy=True, entropy_gradient=True)
        return sum(x.sum() for x in outputs)

    program = jax.jit(jax.grad(loss)).lower(params).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 10
    assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


class TestValues:
    @pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.2395), (0.5, -0.0360)])
    def test_by_hand(self, temperature, expected):
        # logits [2, 0, 0], token 0: -log(1 + 2 exp(-2 / temperature))
        hidden, head = jnp.array([[[2.0], [5.0]]]), jnp.array([[1.0, 0.0, 0.0]])
        logprobs, _ = token_logprobs(hidden, head, jnp.array([[1, 0]]), jnp.ones((1, 2), jnp.int32), temperature)
        np.testing.assert_allclose(logprobs, [[0.0, expected]], atol=5e-5)

    def test_state_before_predicts_token(self):
        # The state at t bets on id t + 1, which is the token at t + 1; a shift by one would give about -10 everywhere.
        hidden = 10 * jnp.eye(6)[None, jnp.array([1, 2, 3, 4, 5, 0])]
        logprobs, _ = token_logprobs(hidden, jnp.eye(6), jnp.arange(6)[None], jnp.ones((1, 6), jnp.int32))
        np.testing.assert_allclose(logprobs, 0.0, atol=1e-3)
        shifted, _ = token_logprobs(hidden, jnp.eye(6), jnp.arange(6)[None, ::-1], jnp.ones((1, 6), jnp.int32))
        assert (shifted[0, 1:] < -9).sum() >= 4

    @pytest.mark.parametrize("chunk", [None, 1, 4, 6, 1000])
    def test_chunks_change_nothing(self, chunk):
        hidden, head, tokens, _ = draw()
        expected = naive(hidden, head, tokens, SEGMENTS, 0.6)
        ours = token_logprobs(hidden, head, tokens, SEGMENTS, 0.6, entropy=True, chunk=chunk)
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert (ours[0][0, [0, 3, 5, 6]] == 0).all() and (ours[0][0, [1, 2, 4]] < 0).all()

    def test_large_logits_and_padding_stay_finite(self):
        hidden, head, tokens, _ = draw()
        hidden = hidden.at[0, 6].set(1e4).at[0, 2].set(1e3)  # padding, and a state that predicts across segments
        value, grad = jax.value_and_grad(lambda h: token_logprobs(h, head, tokens, SEGMENTS)[0].sum())(hidden)
        assert np.isfinite(value) and np.isfinite(grad).all()
        assert (grad[0, [2, 4, 5, 6]] == 0).all()  # last states of segments and padding predict nothing

    def test_one_token_rows(self):
        logprobs, _ = token_logprobs(
            jnp.ones((2, 1, 3)), jnp.ones((3, 4)), jnp.ones((2, 1), int), jnp.ones((2, 1), int)
        )
        assert logprobs.shape == (2, 1) and (logprobs == 0).all()


@pytest.fixture(params=["kept", "computed again"])
def logits(request, monkeypatch):
    """Whether the backward pass finds the logits or computes them."""
    if request.param == "computed again":
        monkeypatch.setattr(logprobs, "KEPT_BYTES", 0)


class TestGradient:
    @pytest.mark.usefixtures("logits")
    @pytest.mark.parametrize("chunk", [None, 4])
    def test_equals_the_naive_one(self, chunk):
        hidden, head, tokens, d = draw()

        def ours(hidden, head):
            return (token_logprobs(hidden, head, tokens, SEGMENTS, 0.7, entropy=True, chunk=chunk)[0] * d).sum()

        def reference(hidden, head):
            return (naive(hidden, head, tokens, SEGMENTS, 0.7)[0] * d).sum()

        for a, b in zip(*(jax.grad(f, (0, 1))(hidden, head) for f in (ours, reference)), strict=True):
            assert np.abs(b).max() > 0.1
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_entropy_has_none(self):
        hidden, head, tokens, _ = draw()
        grads = jax.grad(lambda h, w: token_logprobs(h, w, tokens, SEGMENTS, entropy=True)[1].sum(), (0, 1))
        assert all((g == 0).all() for g in grads(hidden, head))

    @pytest.mark.usefixtures("logits")
    @pytest.mark.parametrize("chunk", [None, 4])
    def test_entropy_has_one_where_it_is_asked_for(self, chunk):
        hidden, head, tokens, d = draw()

        def ours(hidden, head):
            both = token_logprobs(hidden, head, tokens, SEGMENTS, 0.7, entropy=True, entropy_gradient=True, chunk=chunk)
            return (both[0] * d - 2 * both[1] * d[::-1]).sum()

        def reference(hidden, head):
            values, entropies = naive(hidden, head, tokens, SEGMENTS, 0.7)
            return (values * d - 2 * entropies * d[::-1]).sum()

        for a, b in zip(*(jax.grad(f, (0, 1))(hidden, head) for f in (ours, reference)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_head_gradient_is_float32_for_bfloat16_states(self):
        hidden, head, tokens, _ = draw()
        grad = jax.grad(lambda w: token_logprobs(hidden.astype(jnp.bfloat16), w, tokens, SEGMENTS)[0].sum())(head)
        assert grad.dtype == jnp.float32

    @pytest.mark.parametrize(("kept", "largest"), [(256 * 512 * 4, 256 * 512), (256 * 512 * 4 - 1, 32 * 512)])
    def test_all_logits_are_never_held_beyond_a_bound(self, kept, largest, monkeypatch):
        monkeypatch.setattr(logprobs, "KEPT_BYTES", kept)
        hidden, head, tokens, _ = draw(batch=4, length=64, width=2, vocabulary=512)
        ones = jnp.ones((4, 64), jnp.int32)

        def loss(hidden, head):
            return token_logprobs(hidden, head, tokens, ones, entropy=True, chunk=32)[0].sum()

        def sizes(function):
            text = str(jax.make_jaxpr(function)(hidden, head))
            assert "f32[4,8,512]" in text  # 32 tokens
            return [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]

        assert max(sizes(jax.grad(loss, (0, 1)))) == largest  # all logits are 256 * 512, a chunk's 32 * 512
        assert max(sizes(loss)) == 32 * 512  # without a gradient never

    def test_memory_does_not_grow_with_the_vocabulary(self):
        """But for the head and its gradient: what is laid out beside them, with Qwen3.5's vocabulary and an eighth."""
        width, length = 16, 8192

        def temporaries(vocabulary):
            def loss(hidden, head, tokens):
                return token_logprobs(hidden, head, tokens, jnp.ones_like(tokens), entropy=True)[0].sum()

            shapes = ((1, length, width), jnp.float32), ((width, vocabulary), jnp.float32), ((1, length), jnp.int32)
            lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
            return lowered.compile().memory_analysis().temp_size_in_bytes

        small, large = temporaries(2**15), temporaries(248_320)
        assert large < 1.1 * small + 4 * 248_320 * width * 3
        assert large < 4 * 248_320 * length / 8  # all logits once


class Counting:
    """A model whose log-probability of a token depends on its position and its predecessor alone, in closed form."""

    vocabulary = 8

    def hidden(self, params, tokens, positions, segment_ids):
        return jax.nn.one_hot(tokens, 8) * params + jax.nn.one_hot(positions % 8, 8)

    def head(self, params):
        return jnp.eye(8)

    def expected(self, params, prompt, response, temperature):
        ids = [*prompt, *response]
        values = []
        for t in range(len(prompt), len(ids)):
            logits = params * np.eye(8)[ids[t - 1]] + np.eye(8)[(t - 1) % 8]
            values.append(logits[ids[t]] / temperature - np.log(np.exp(logits / temperature).sum()))
        return np.array(values)


def rows_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 8, rng.integers(1, 6)).tolist(), rng.integers(0, 8, n).tolist()) for n in lengths]


class TestScorer:
    LENGTHS = (1, 3, 90, 0, 7, 2, 15, 1, 40, 16)

    def test_values_in_input_order(self):
        model, rows = Counting(), rows_of(self.LENGTHS)
        values = Scorer(model, temperature=0.6, buckets=(8, 16, 32)).score(2.0, rows)
        for (prompt, response), ours in zip(rows, values, strict=True):
            assert ours.dtype == np.float32 and len(ours) == len(response)
            np.testing.assert_allclose(ours, model.expected(2.0, prompt, response, 0.6), atol=1e-5)

    def test_few_programs(self):
        scorer = Scorer(Counting(), buckets=(8, 16, 32))
        rng = np.random.default_rng(0)
        for seed in range(6):
            scorer.score(1.0, rows_of(rng.integers(1, 28, rng.integers(1, 30)), seed))
        assert scorer.compilations <= 2 * 3

    @pytest.mark.parametrize(("rows", "lines"), [(1, 128), (128, 128), (129, 1024), (1024, 1024), (1025, 1152)])
    def test_a_few_rows_do_not_cost_a_whole_batch(self, rows, lines):
        scorer = Scorer(Counting(), buckets=(8,))
        assert sum(count for (count, _), _ in scorer._plan([8] * rows)) == lines

    @pytest.mark.parametrize(
        ("rows", "shape", "of_device"), [(3, (4, 512), [1, 2]), (5, (16, 512), [2, 3]), (16, (16, 512), [8, 8])]
    )
    def test_devices_share_the_lines_of_small_and_whole_batches(self, rows, shape, of_device):
        scorer = Scorer(Counting(), buckets=(512,))
        scorer._multiple, scorer.SMALL = 2, 4
        ((found, lines),) = scorer._plan([512] * rows)
        lines += [[]] * (shape[0] - len(lines))
        halves = lines[: shape[0] // 2], lines[shape[0] // 2 :]
        assert found == shape and sorted(sum(map(bool, half)) for half in halves) == of_device
        assert sorted(sum(lines, [])) == list(range(rows))

    def test_the_small_shape_is_that_of_what_is_left_over(self):
        """Long buckets have a smaller shape for it already: no third one."""
        scorer = Scorer(Counting(), buckets=(1024, 32768))
        scorer.TOKENS = 2**17
        shapes = {shape for n in range(1, 200, 7) for shape, _ in scorer._plan([900] * n)}
        assert shapes <= {(128, 1024), (16, 1024), (4, 32768), (1, 32768)}

    def test_new_parameters_need_no_new_program(self):
        scorer = Scorer(Counting(), buckets=(16,))
        a, b = (scorer.score(p, rows_of((4, 5)))[0] for p in (jnp.float32(1), jnp.float32(3)))
        assert scorer.compilations == 1 and not np.allclose(a, b)

    def test_progress(self):
        seen = []
        Scorer(Counting(), buckets=(8, 16)).score(1.0, rows_of((1, 3, 9, 40)), lambda *a: seen.append(a))
        assert seen[-1] == (4, 4) and [d for d, _ in seen] == sorted({d for d, _ in seen})

    def test_nothing_to_do(self):
        assert Scorer(Counting()).score(1.0, []) == []

    def test_an_empty_prompt_is_named(self):
        with pytest.raises(ValueError, match="row 1 has an empty prompt"):
            Scorer(Counting()).score(1.0, [([1], [2]), ([], [3])])

    def test_temperature_must_be_positive(self):
        with pytest.raises(ValueError, match="temperature is 0"):
            Scorer(Counting(), temperature=0)

    def test_packing_is_invisible_and_agrees_with_transformers(self, tmp_path):
        model, params = hf.load(make_qwen3(tmp_path, tokenizer=False))
        rng = np.random.default_rng(1)
        rows = [(rng.integers(0, 272, 5).tolist(), rng.integers(0, 272, n).tolist()) for n in (1, 20, 9, 40, 3)]
        scorer = Scorer(model, temperature=0.8, buckets=(64,))
        together = scorer.score(params, rows)
        for row, value in zip(rows, together, strict=True):
            np.testing.assert_allclose(value, reference_logprobs(tmp_path, *row, 0.8), atol=1e-5)
            np.testing.assert_allclose(value, scorer.score(params, [row])[0], atol=1e-5)
