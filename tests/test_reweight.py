"""Reasoning-shift weights by hand."""

import math

import numpy as np
import pytest

from rti_jax.reweight import copied_tokens, reasoning_shift_weights, weight_statistics
from rti_jax.types import Correction, Turn


class TestReasoningShiftWeights:
    def test_by_hand(self):
        corrector = np.log([0.6, 0.44, 0.4, 0.1])
        rollout = np.log([0.4, 0.4, 0.44, 0.9])
        # 1.5 and 0.111 are clipped; the inverse ratio would give 0.8, 0.909, 1.1, 1.2
        got = reasoning_shift_weights(corrector, rollout, 0.2)
        np.testing.assert_allclose(got, [1.2, 1.1, 0.909091, 0.8], rtol=1e-6)
        assert got.dtype == np.float32

    def test_no_difference_overflows(self):
        got = reasoning_shift_weights([0.0, -2000.0, -math.inf], [-2000.0, 0.0, -1.0], 0.2)
        np.testing.assert_allclose(got, [1.2, 0.8, 0.8], rtol=1e-6)

    def test_zero_epsilon_and_equal_prompts_give_exactly_one(self):
        assert (reasoning_shift_weights([-0.1, -3.0], [-2.0, -1.0], 0.0) == 1).all()
        assert (reasoning_shift_weights([-0.1, -3.0], [-0.1, -3.0], 0.2) == 1).all()

    def test_faults_are_named(self):
        with pytest.raises(ValueError, match="shapes"):
            reasoning_shift_weights([-1.0], [-1.0, -2.0], 0.2)
        with pytest.raises(ValueError, match="NaN"):
            reasoning_shift_weights([math.nan], [-1.0], 0.2)


def test_copied_tokens():
    np.testing.assert_array_equal(
        copied_tokens([1, 2, 3, 4], [1, 2, 9, 9, 4, 5]), [True, True, False, False, True, False]
    )
    assert not copied_tokens([1], [2, 3]).any()


def test_weights_of_copied_and_edited_tokens():
    scores = {"rollout_logprobs": tuple(np.log([0.5, 0.5, 0.5])), "corrector_logprobs": tuple(np.log([0.6, 0.55, 0.4]))}
    turn = Turn("t/0", (7,), (1, 8, 3), (-1.0,) * 3, "stop", 0, Correction((1, 2, 3), **scores))
    found = weight_statistics([turn], 0.2)
    assert found["copied"] == pytest.approx((2.0, 2, 0.8, 1.2)) and found["edited"] == pytest.approx((1.1, 1, 1.1, 1.1))
    assert weight_statistics([], 0.2) == {}
