"""Each equation of docs/loss.md by hand: values, gradients, masks, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rti_jax import losses
from rti_jax.types import Author, TrainBatch

P, C, E, L = Author.POLICY, Author.CORRECTOR, Author.ENVIRONMENT, Author.TEACHER
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def total(value):
    """A sum or pair of sums in float64."""
    return np.asarray(value, np.float64).sum()


def batch_of(author, *, behavior, advantages, weights=1.0, scale=1.0, sampler=None, ref=0.0, segments=1):
    author = np.asarray(author, np.int8)
    shape = author.shape

    def full(value):
        return jnp.asarray(np.broadcast_to(np.asarray(value, np.float32), shape))

    zeros = jnp.zeros(shape, jnp.int32)
    return TrainBatch(
        tokens=zeros,
        positions=zeros,
        segment_ids=jnp.asarray(np.broadcast_to(segments, shape)),
        loss_mask=jnp.asarray(np.isin(author, (P, C, L))),
        author=jnp.asarray(author),
        trajectory=zeros,
        behavior_logprobs=full(behavior),
        ref_logprobs=full(ref),
        sampler_logprobs=full(behavior if sampler is None else sampler),
        advantages=full(advantages),
        weights=full(weights),
        loss_scale=full(scale),
        denominator=jnp.float32(1),
    )


def loss(logprobs, batch, **options):
    return losses.policy_loss(logprobs, batch, batch.author == C, **{**CLIP, **options})


@pytest.fixture
def example():
    """Two rows of unequal length, both signs of the advantage, a corrected turn, ratios inside and outside the clip."""
    author = [[E, P, P, E, C, C, C], [E, E, P, P, P, 0, 0]]
    log_ratios = np.array([[0, 0.1, -0.3, 0, 0.4, -0.05, -0.5], [0, 0, 0.3, -0.3, 0.02, 0, 0]], np.float32)
    behavior = np.linspace(-2.0, -0.3, 14, dtype=np.float32).reshape(2, 7)
    advantages = np.array([[2.0] * 7, [-0.5] * 7], np.float32)
    weights = np.array([[1, 1, 1, 1, 1.2, 0.8, 1.1], [1] * 7], np.float32)
    scale = np.array([[1 / 5] * 7, [1 / 3] * 7], np.float32)
    batch = batch_of(
        author, behavior=behavior, advantages=advantages, weights=weights, scale=scale, ref=behavior - 0.25
    )
    return jnp.asarray(behavior + log_ratios), batch


class TestClippedSurrogate:
    RATIOS = jnp.log(jnp.array([[1.5, 1.5, 0.5, 0.5, 1.1]]))
    ADVANTAGES = jnp.array([[1.0, -1.0, 1.0, -1.0, -2.0]])

    def test_is_the_pessimistic_of_the_two(self):
        surrogate, clipped = losses.clipped_surrogate(self.RATIOS, self.ADVANTAGES, 0.2, 0.2)
        # max instead of min gives 1.5, -1.2, 0.8, -0.5; clipping without min gives 1.2, -1.2, 0.8, -0.8
        np.testing.assert_allclose(surrogate, [[1.2, -1.5, 0.5, -0.8, -2.2]], rtol=1e-6)
        np.testing.assert_array_equal(clipped, [[True, False, False, True, False]])

    def test_asymmetric_clip_of_dapo(self):
        surrogate, clipped = losses.clipped_surrogate(self.RATIOS, self.ADVANTAGES, 0.6, 0.28)
        # with the two bounds swapped: 1.5 (bound 1.6), -0.72
        np.testing.assert_allclose(surrogate, [[1.28, -1.5, 0.5, -0.5, -2.2]], rtol=1e-6)
        np.testing.assert_array_equal(clipped, [[True, False, False, False, False]])

    def test_gradient_is_ratio_times_advantage_or_zero_where_clipped(self):
        gradient = jax.grad(lambda r: losses.clipped_surrogate(r, self.ADVANTAGES, 0.2, 0.2)[0].sum())(self.RATIOS)
        np.testing.assert_allclose(gradient, [[0.0, -1.5, 0.5, 0.0, -2.2]], rtol=1e-6)

    def test_gradient_at_ratio_one_is_the_whole_advantage(self):
        # at the first update both branches of the min are equal; half of it would be a wrong tie
        gradient = jax.grad(lambda r: losses.clipped_surrogate(r, self.ADVANTAGES, 0.2, 0.2)[0].sum())
        np.testing.assert_array_equal(gradient(jnp.zeros((1, 5))), self.ADVANTAGES)


class TestKL:
    def test_k3_by_hand(self):
        logprobs, ref = jnp.array([[-1.0, -1.0, -1.0]]), jnp.array([[-2.0, -0.5, 9.0]])
        kl = losses.k3_kl(logprobs, ref, jnp.array([[True, True, False]]))
        # k1 gives 1 and -0.5; the reverse sign of the exponent gives 0.7183 and 0.1065
        np.testing.assert_allclose(kl, [[0.367879, 0.148721, 0.0]], atol=1e-6)

    def test_enters_the_loss_unweighted_and_gives_its_gradient(self, example):
        logprobs, batch = example
        with_kl, without = loss(logprobs, batch, kl_beta=0.3), loss(logprobs, batch)
        difference = np.asarray(batch.ref_logprobs - logprobs)
        scaled = np.asarray(batch.loss_scale * batch.loss_mask)
        expected = 0.3 * (scaled * (np.exp(difference) - difference - 1)).sum()
        np.testing.assert_allclose(with_kl.loss_sum - without.loss_sum, expected, rtol=1e-5)
        gradient = jax.grad(lambda x: loss(x, batch, kl_beta=0.3).loss_sum - loss(x, batch).loss_sum)(logprobs)
        np.testing.assert_allclose(gradient, 0.3 * scaled * (1 - np.exp(difference)), atol=1e-6)

    def test_no_reference_is_needed_without_it(self, example):
        logprobs, batch = example
        unknown = batch._replace(ref_logprobs=jnp.full_like(logprobs, jnp.nan))
        assert loss(logprobs, unknown).loss_sum == loss(logprobs, batch).loss_sum
        assert np.isnan(loss(logprobs, unknown, kl_beta=0.1).loss_sum)  # a forgotten reference is loud


class TestPolicyLoss:
    def test_weight_multiplies_the_clipped_term(self):
        batch = batch_of([[E, C, C]], behavior=-1.0, advantages=[[0, 1.0, -1.0]], weights=[[1, 1.2, 0.8]])
        logprobs = jnp.array([[0.0, -1.0 + np.log(1.5), -1.0 + np.log(1.5)]])
        # 1.2 * 1.2 and 0.8 * -1.5; a weight inside the ratio would give min(1.8, 1.2) = 1.2 and -1.2 * 1
        np.testing.assert_allclose(loss(logprobs, batch).loss_sum, -(1.44 - 1.2), rtol=1e-6)

    def test_value_by_the_formula(self, example):
        logprobs, batch = example
        ratio = np.exp(np.asarray(logprobs - batch.behavior_logprobs, np.float64))
        advantages = np.asarray(batch.advantages)
        surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        terms = np.asarray(batch.loss_scale * batch.weights) * surrogate
        expected = -terms[np.asarray(batch.loss_mask)].sum()
        np.testing.assert_allclose(loss(logprobs, batch).loss_sum, expected, rtol=1e-6)
        unmasked = -terms.sum()  # what a loss over context and padding would give
        assert abs(unmasked - expected) > 0.1

    def test_gradient_by_the_formula(self, example):
        logprobs, batch = example
        ratio = np.exp(np.asarray(logprobs - batch.behavior_logprobs, np.float64))
        clipped = np.where(np.asarray(batch.advantages) > 0, ratio > 1.2, ratio < 0.8) | ~np.asarray(batch.loss_mask)
        expected = -np.asarray(batch.loss_scale * batch.weights * batch.advantages) * ratio * ~clipped
        gradient = jax.grad(lambda x: loss(x, batch).loss_sum)(logprobs)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)
        assert (expected[0, 1:3] != 0).all() and expected[0, 4] == 0

    @pytest.mark.parametrize(
        "field",
        ["advantages", "behavior_logprobs", "weights", "ref_logprobs", "sampler_logprobs", "loss_scale"],
    )
    @pytest.mark.parametrize("options", [{}, {"kl_beta": 0.1, "mismatch_clip": 2.0}, {"sequence_ratio": True}])
    def test_nothing_else_has_a_gradient(self, example, field, options):
        logprobs, batch = example
        gradient = jax.grad(lambda x: loss(logprobs, batch._replace(**{field: x}), **options).loss_sum)
        assert not np.asarray(gradient(getattr(batch, field))).any()

    @pytest.mark.parametrize("poison", [np.nan, 1e4, -1e4])
    @pytest.mark.parametrize("options", [{}, {"kl_beta": 0.1, "mismatch_clip": 2.0}, {"sequence_ratio": True}])
    def test_masked_positions_are_harmless(self, example, poison, options):
        logprobs, batch = example
        names = (
            "behavior_logprobs",
            "ref_logprobs",
            "sampler_logprobs",
            "advantages",
            "weights",
            "loss_scale",
        )
        poisoned = {n: jnp.where(batch.loss_mask, getattr(batch, n), poison) for n in names}
        value = jax.value_and_grad(lambda x, b: loss(x, b, **options).loss_sum)
        clean, clean_gradient = value(logprobs, batch)
        dirty, gradient = value(jnp.where(batch.loss_mask, logprobs, poison), batch._replace(**poisoned))
        assert clean == dirty  # multiplying by the mask after exp would give NaN, since exp(1e4) * 0 is NaN
        np.testing.assert_array_equal(gradient, clean_gradient)
        assert not np.asarray(gradient)[~np.asarray(batch.loss_mask)].any()

    def test_rows_without_trained_tokens_change_nothing(self, example):
        logprobs, batch = example
        more = jax.tree.map(lambda x: jnp.concatenate([x, x]) if x.ndim else x, batch)
        more = more._replace(loss_mask=more.loss_mask.at[2:].set(False))
        doubled = jnp.concatenate([logprobs, jnp.full_like(logprobs, jnp.nan)])
        np.testing.assert_allclose(loss(doubled, more).loss_sum, loss(logprobs, batch).loss_sum, rtol=1e-6)
        gradient = jax.grad(lambda x: loss(x, more, sequence_ratio=True).loss_sum)(doubled)
        assert np.isfinite(gradient).all()

    def test_rows_add_up_in_any_order(self, example):
        logprobs, batch = example
        whole = loss(logprobs, batch, kl_beta=0.1)

        def row(i):
            return loss(logprobs[i : i + 1], jax.tree.map(lambda x: x[i : i + 1] if x.ndim else x, batch), kl_beta=0.1)

        parts = [row(1), row(0)]
        np.testing.assert_allclose(sum(p.loss_sum for p in parts), whole.loss_sum, rtol=1e-6)
        for name, value in whole.sums.items():
            assert sum(total(p.sums[name]) for p in parts) == pytest.approx(total(value), rel=1e-5), name

    def test_an_overflowing_ratio_is_not_hidden(self):
        batch = batch_of([[E, P]], behavior=-200.0, advantages=-1.0)
        assert not np.isfinite(loss(jnp.zeros((1, 2)), batch).loss_sum)


class TestSequenceRatio:
    """GSPO: one ratio per segment, the geometric mean of its tokens' ratios."""

    AUTHOR = [[E, P, P, P, E, P, P, 0]]
    SEGMENTS = [[1, 1, 1, 1, 2, 2, 2, 0]]
    LOG_RATIOS = jnp.array([[9.0, 0.2, -0.1, 0.05, 9.0, -0.1, -0.04, 9.0]])

    def batch(self):
        advantages = [[1.0] * 4 + [-2.0] * 4]
        scale = [[1 / 3] * 4 + [1 / 2] * 4]
        return batch_of(self.AUTHOR, behavior=0.0, advantages=advantages, scale=scale, segments=self.SEGMENTS)

    def test_mean_over_the_segment(self):
        batch = self.batch()
        log_ratios = losses.log_ratio(self.LOG_RATIOS, batch.behavior_logprobs, batch.loss_mask)
        got = losses.sequence_log_ratio(log_ratios, batch.loss_mask, batch.segment_ids)
        # a sum instead of a mean gives 0.15 and -0.14; the mean over the whole row gives 0.002
        np.testing.assert_allclose(got, [[0, 0.05, 0.05, 0.05, 0, -0.07, -0.07, 0]], atol=1e-7)

    def test_loss_and_gradient(self):
        batch = self.batch()
        value, gradient = jax.value_and_grad(lambda x: loss(x, batch, sequence_ratio=True).loss_sum)(self.LOG_RATIOS)
        first, second = np.exp(0.05), -2.0 * np.exp(-0.07)
        np.testing.assert_allclose(value, -(first + second), rtol=1e-6)
        expected = [[0] + [-first / 3] * 3 + [0] + [-second / 2] * 2 + [0]]
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)

    def test_a_clipped_sequence_has_no_gradient(self):
        batch = self.batch()
        gradient = jax.grad(lambda x: loss(x, batch, sequence_ratio=True, clip_high=0.04, clip_low=0.5).loss_sum)
        row = np.asarray(gradient(self.LOG_RATIOS))[0]
        assert not row[:4].any() and row[5] != 0


class TestShapedSurrogate:
    """LUFFY's off-policy term f(p) A, f(p) = p / (p + gamma)."""

    LOGPROBS = jnp.log(jnp.array([[0.1, 0.9, 0.01, 0.5]]))
    ADVANTAGES = jnp.array([[1.0, -2.0, 3.0, 7.0]])
    MASK = jnp.array([[True, True, True, False]])

    def test_by_hand(self):
        got = losses.shaped_surrogate(self.LOGPROBS, self.ADVANTAGES, self.MASK, 0.1)
        # without shaping p A: 0.1, -1.8, 0.03; with p / (1 + gamma): 0.0909, -1.636, 0.0273
        np.testing.assert_allclose(got, [[0.5, -1.8, 3 / 11, 0.0]], rtol=1e-6)

    def test_gradient_is_largest_at_gamma(self):
        gradient = jax.grad(lambda x: losses.shaped_surrogate(x, self.ADVANTAGES, self.MASK, 0.1).sum())(self.LOGPROBS)
        # A gamma p / (p + gamma)^2: 0.25, -2 * 0.09 / 1, 3 * 0.001 / 0.0121; p A alone gives 0.1, -1.8, 0.03
        np.testing.assert_allclose(gradient, [[0.25, -0.18, 3 * 0.001 / 0.0121, 0.0]], rtol=1e-5)
        slope = jax.vmap(
            jax.grad(lambda x: losses.shaped_surrogate(x, jnp.ones((1, 1)), jnp.ones((1, 1), bool), 0.1)[0, 0])
        )
        values = slope(jnp.log(jnp.array([0.05, 0.1, 0.2])).reshape(3, 1, 1)).ravel()
        assert values[1] > values[0] and values[1] > values[2]

    def test_nothing_else_has_a_gradient_and_the_masked_is_harmless(self):
        gradient = jax.grad(lambda a: losses.shaped_surrogate(self.LOGPROBS, a, self.MASK, 0.1).sum())(self.ADVANTAGES)
        assert not gradient.any()
        for poison in (jnp.nan, 1e4):
            dirty = jnp.where(self.MASK, self.LOGPROBS, poison)
            gradient = jax.grad(lambda x: losses.shaped_surrogate(x, self.ADVANTAGES, self.MASK, 0.1).sum())(dirty)
            assert np.isfinite(gradient).all() and gradient[0, 3] == 0


class TestLuffy:
    """A mixed group: the teacher's tokens by their shaped term, the policy's by its ratio without a clip."""

    ADVANTAGES = [[0.875] * 4, [-0.125] * 4]
    SCALE = [[1.0] * 4, [1.0] * 4]

    def batch(self):
        author = [[E, L, L, 0], [E, P, P, P]]
        behavior = np.log(np.array([[np.nan] * 4, [np.nan, 0.5, 0.4, 0.2]], np.float32))
        return batch_of(author, behavior=behavior, advantages=self.ADVANTAGES, scale=self.SCALE)

    LOGPROBS = jnp.log(jnp.array([[1.0, 0.1, 0.3, 1.0], [1.0, 0.5, 0.8, 0.1]]))
    OPTIONS = {"clip_low": 1.0, "clip_high": np.inf}

    def loss(self, logprobs, batch, **options):
        return loss(logprobs, batch, teacher=batch.author == L, **{**self.OPTIONS, **options})

    def test_by_hand(self):
        value = self.loss(self.LOGPROBS, self.batch()).loss_sum
        # teacher 0.875 (0.5 + 0.75), policy -0.125 (1 + 2 + 0.5): the ratio 2 is not clipped
        np.testing.assert_allclose(value, -(0.875 * 1.25 - 0.125 * 3.5), rtol=1e-6)
        clipped = self.loss(self.LOGPROBS, self.batch(), clip_low=0.2, clip_high=0.2).loss_sum
        np.testing.assert_allclose(clipped, -(0.875 * 1.25 - 0.125 * (1 + 2 + 0.8)), rtol=1e-6)

    def test_gradient(self):
        gradient = jax.grad(lambda x: self.loss(x, self.batch()).loss_sum)(self.LOGPROBS)
        slopes = 0.875 * 0.1 * np.array([0.1 / 0.04, 0.3 / 0.16])
        expected = [[0, *-slopes, 0], [0, 0.125, 0.25, 0.0625]]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)

    def test_the_teacher_needs_no_behavior_and_has_no_ratio(self):
        sums = self.loss(self.LOGPROBS, self.batch()).sums
        assert sums["teacher/tokens"] == 2 and sums["policy/tokens"] == 3 and sums["corrector/tokens"] == 0
        np.testing.assert_allclose(sums["teacher/probability"], 0.4, rtol=1e-6)
        np.testing.assert_allclose(sums["policy/ratio"], 3.5, rtol=1e-6)
        assert np.isfinite(sums["mismatch/abs"])
        forgotten = loss(self.LOGPROBS, self.batch(), **self.OPTIONS).loss_sum
        assert np.isnan(forgotten)  # taken for the policy's, it would be loud

    def test_entropy_bonus(self):
        entropy = jnp.array([[jnp.nan, 0.5, 1.0, jnp.nan], [jnp.nan, 0.25, 0.5, 2.0]])
        plain = self.loss(self.LOGPROBS, self.batch()).loss_sum
        bonus = self.loss(self.LOGPROBS, self.batch(), entropy=entropy, entropy_coef=0.1)
        np.testing.assert_allclose(bonus.loss_sum, plain - 0.1 * 4.25, rtol=1e-6)
        np.testing.assert_allclose(total(bonus.sums["loss/entropy"]), 4.25, rtol=1e-6)
        gradient = jax.grad(lambda h: self.loss(self.LOGPROBS, self.batch(), entropy=h, entropy_coef=0.1).loss_sum)(
            entropy
        )
        np.testing.assert_allclose(gradient, np.where(np.isnan(entropy), 0.0, -0.1), rtol=1e-6)


class TestMismatch:
    def test_truncated_importance_by_hand(self):
        behavior, sampler = jnp.array([[-1.0, -1.0, -1.0]]), jnp.array([[-1.5, -0.5, jnp.nan]])
        mask = jnp.array([[True, True, False]])
        got = losses.truncated_importance(behavior, sampler, mask, 1.2)
        np.testing.assert_allclose(got, [[1.2, np.exp(-0.5), 1.0]], rtol=1e-6)  # inverted: 0.6065, 1.2

    def test_corrected_tokens_take_no_part(self):
        # p_corr 0.6, p_roll 0.4: the weight is 1.2; correcting by the corrector's own sampling would leave 0.8
        batch = batch_of(
            [[E, P, C]],
            behavior=np.log([[1.0, 0.5, 0.4]]),
            sampler=np.log([[1.0, 0.4, 0.6]]),
            advantages=1.0,
            weights=[[1, 1, 1.2]],
        )
        value = loss(batch.behavior_logprobs, batch, mismatch_clip=2.0)
        np.testing.assert_allclose(value.loss_sum, -(0.5 / 0.4 + 1.2), rtol=1e-6)
        np.testing.assert_allclose(value.sums["mismatch/abs"], np.log(0.5 / 0.4), rtol=1e-5)
        np.testing.assert_allclose(value.maxima["mismatch/max"], np.log(0.5 / 0.4), rtol=1e-5)


class TestMetrics:
    def test_by_source(self, example):
        logprobs, batch = example
        entropy = jnp.where(batch.author == C, 2.0, jnp.where(batch.author == P, 0.5, jnp.nan))
        sums = loss(logprobs, batch, entropy=entropy).sums
        assert sums["policy/tokens"] == 5 and sums["corrector/tokens"] == 3
        # policy: exp(-.3) at A=-.5 is below 0.8; corrector: exp(.4) at A=2 is above 1.2
        assert sums["policy/clip_fraction"] == 1 and sums["corrector/clip_fraction"] == 1
        np.testing.assert_allclose(sums["corrector/ratio"], np.exp([0.4, -0.05, -0.5]).sum(), rtol=1e-5)
        np.testing.assert_allclose(sums["corrector/weight"], 3.1, rtol=1e-6)
        np.testing.assert_allclose([sums["policy/entropy"], sums["corrector/entropy"]], [2.5, 6.0])
        gaps = np.array([0.1, -0.3, 0.3, -0.3, 0.02])
        np.testing.assert_allclose(sums["policy/approx_kl"], (np.expm1(gaps) - gaps).sum(), rtol=1e-4)

    def test_have_no_gradient(self, example):
        logprobs, batch = example
        gradient = jax.grad(lambda x: sum(map(jnp.sum, loss(x, batch, kl_beta=0.1).sums.values())))(logprobs)
        assert not np.asarray(gradient).any()


def test_shapes_are_checked(example):
    logprobs, batch = example
    with pytest.raises(AssertionError):
        loss(logprobs[:, :-1], batch)


class TestPairSum:
    def test_what_is_left_when_large_terms_cancel(self):
        assert total(losses.pair_sum(jnp.float32([[1e8, 1.0, 3.0], [-1e8, 0.25, 0.5]]))) == 4.75

    @pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 257)])
    def test_in_any_order_to_all_digits(self, shape):
        rng = np.random.default_rng(0)
        values = rng.standard_normal(shape).astype(np.float32) * 10.0 ** rng.integers(-3, 4, shape).astype(np.float32)
        exact = values.sum(dtype=np.float64)
        for order in (values, values[::-1, ::-1]):
            np.testing.assert_allclose(total(jax.jit(losses.pair_sum)(order)), exact, rtol=1e-12)
