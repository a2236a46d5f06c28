"""The perplexity gate by hand."""

import math

import pytest

from rti_jax.gate import GateReason, decide, passes, turn_passes
from rti_jax.types import Correction, Status, Trajectory, Turn


def turn(index, logprobs=None, scored=True):
    correction = None
    if logprobs is not None:
        correction = Correction((1,), tuple(logprobs) if scored else None, (-0.1,) * len(logprobs) if scored else None)
    length = len(logprobs or (0,))
    return Turn(f"t/{index}", (1, 2), tuple(range(length)), (-9.0,) * length, "stop", 0, correction)


def trajectory(*turns, success=True):
    status = Status.SUCCESS if success else Status.FAILURE
    return Trajectory("t", "g", -1, "task", turns, status, float(success))


LOW = [math.log(0.5), math.log(0.25)]  # perplexity 2.8284
FOUR = [-math.log(4.0)] * 3  # perplexity 4


class TestDecide:
    def test_perplexity_over_all_tokens_of_the_turn(self):
        decision = decide(trajectory(turn(0, LOW), turn(1), turn(2, FOUR)), delta=5)
        assert decision.admitted and decision.reason == GateReason.ADMITTED
        # a mean of probabilities would give 2.67; the sampler's values would give 8103
        assert decision.perplexities == pytest.approx((2.828427, 4.0))

    def test_one_turn_at_or_above_delta_drops_the_trajectory(self):
        both = trajectory(turn(0, LOW), turn(1, FOUR))
        at = decide(both, delta=both.turns[1].correction.perplexity)
        assert not at.admitted and at.reason == GateReason.PERPLEXITY
        assert not decide(both, 3).admitted  # the mean over turns, 3.41, would pass 3.5
        assert not decide(both, 3.5).admitted
        assert decide(both, 4.001).admitted

    def test_zero_rejects_all_and_inf_admits_all(self):
        certain = trajectory(turn(0, [0.0, 0.0]))
        assert not decide(certain, 0).admitted
        absurd = trajectory(turn(0, [-1e6]))
        assert decide(absurd, math.inf).admitted
        assert not decide(absurd, 1e300).admitted

    @pytest.mark.parametrize("bad", [math.nan, -math.inf])
    def test_non_finite_is_rejected_unless_bypassed(self, bad):
        broken = trajectory(turn(0, [bad, -0.1]))
        assert decide(broken, 1e300).reason == GateReason.NON_FINITE
        assert decide(broken, math.inf).admitted

    def test_a_success_and_a_correction_are_needed(self):
        assert decide(trajectory(turn(0, LOW), success=False), math.inf).reason == GateReason.FAILED
        assert decide(trajectory(turn(0)), math.inf).reason == GateReason.UNCORRECTED
        assert not decide(trajectory(turn(0)), math.inf).admitted

    def test_an_unscored_correction_is_an_error(self):
        with pytest.raises(ValueError, match="scored"):
            decide(trajectory(turn(0, LOW, scored=False)), 5)


def test_one_turn():
    assert turn_passes(Correction((1,), tuple(LOW)), 5) and not turn_passes(Correction((1,), tuple(LOW)), 2.8)


@pytest.mark.parametrize("delta", [math.nan, -1.0])
def test_a_bad_delta_is_an_error(delta):
    with pytest.raises(ValueError, match="delta"):
        passes(2.0, delta)
