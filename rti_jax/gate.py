"""The perplexity gate: an intervened trajectory is admitted only if the policy could plausibly have written it."""

import enum
import math

from rti_jax.types import Correction, GateDecision, Trajectory


class GateReason(enum.StrEnum):
    """Why a trajectory was admitted or not; every decision is counted under its reason."""

    ADMITTED = "admitted"
    FAILED = "failed"  # the episode did not succeed, corrected or not
    UNCORRECTED = "uncorrected"  # it succeeded without a correction; the caller decides (rti.accept_uncorrected)
    NON_FINITE = "non_finite"  # a perplexity is NaN or infinite
    PERPLEXITY = "perplexity"  # a corrected turn is at or above delta


def passes(perplexity: float, delta: float) -> bool:
    """PPL < delta: 0 rejects all, inf bypasses the comparison, a non-finite perplexity is otherwise rejected."""
    if math.isnan(delta) or delta < 0:
        raise ValueError(f"gate.delta must be a number >= 0 or inf, got {delta}")
    return delta == math.inf or (math.isfinite(perplexity) and perplexity < delta)


def turn_passes(correction: Correction, delta: float) -> bool:
    """The gate at one turn (gate.scope = turn). Raises ValueError if the turn was not scored."""
    return passes(_perplexity(correction), delta)


def decide(trajectory: Trajectory, delta: float) -> GateDecision:
    """Admits a trajectory that succeeded with at least one correction, all of which pass (RTI, 2610.13438).

    PPL(y~) = exp(-1/|y~| sum_t log pi_old(y~_t | h_t, y~_<t)) under the rollout prompt, over all tokens of a
    corrected turn; one turn at or above delta drops the trajectory.

    Raises:
      ValueError: a corrected turn was not scored, or delta is negative or NaN.
    """
    perplexities = tuple(_perplexity(t.correction) for t in trajectory.corrected_turns)
    reason = _reason(trajectory.success, perplexities, delta)
    return GateDecision(admitted=reason is GateReason.ADMITTED, reason=reason, perplexities=perplexities)


def _reason(success: bool, perplexities: tuple[float, ...], delta: float) -> GateReason:
    if not success:
        return GateReason.FAILED
    if not perplexities:
        return GateReason.UNCORRECTED
    if all(passes(p, delta) for p in perplexities):
        return GateReason.ADMITTED
    return GateReason.PERPLEXITY if all(map(math.isfinite, perplexities)) else GateReason.NON_FINITE


def _perplexity(correction: Correction) -> float:
    if correction.rollout_logprobs is None:
        raise ValueError("the gate was asked about a correction that has not been scored under the rollout prompt")
    return correction.perplexity
