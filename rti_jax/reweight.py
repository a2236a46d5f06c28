"""Reasoning-shift weights of corrected tokens: how much more the corrector expected them than the policy did.

The weight is emphasis, not an importance weight: the ratio's denominator stays the policy's own probability. It is
constant for the gradient and denominators never count it.
"""

import difflib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rti_jax.types import Turn


def reasoning_shift_weights(
    corrector_logprobs: Sequence[float], rollout_logprobs: Sequence[float], epsilon_cal: float
) -> np.ndarray:
    """w_t = clip(pi_old(y_t | h_corr) / pi_old(y_t | h), 1 - eps_cal, 1 + eps_cal), [T] float32 (RTI, 2610.13438).

    Clipped in log space, so no difference overflows. Raises ValueError for vectors of different lengths or NaN.
    """
    corrector = np.asarray(corrector_logprobs, np.float64)
    rollout = np.asarray(rollout_logprobs, np.float64)
    if corrector.ndim != 1 or corrector.shape != rollout.shape:
        raise ValueError(f"log-probabilities of shapes {corrector.shape} and {rollout.shape} for the same tokens")
    shift = corrector - rollout
    if np.isnan(shift).any():
        raise ValueError("log-probabilities of corrected tokens hold NaN")
    clipped = np.clip(shift, math.log1p(-epsilon_cal), math.log1p(epsilon_cal))
    return np.exp(clipped).astype(np.float32)


def copied_tokens(original_ids: Sequence[int], replaced_ids: Sequence[int]) -> np.ndarray:
    """[T] bool over the replacing turn: True on tokens taken over from the original turn (metrics only).

    The original stands in the corrector's prompt, so copied tokens are likely there whatever they say, and their
    weights may saturate; the mean weight is reported on copied and on edited tokens apart.
    """
    matcher = difflib.SequenceMatcher(a=list(original_ids), b=list(replaced_ids), autojunk=False)
    copied = np.zeros(len(replaced_ids), bool)
    for block in matcher.get_matching_blocks():
        copied[block.b : block.b + block.size] = True
    return copied


class Weights(NamedTuple):
    """Of a kind of tokens: the sum of their weights, how many there are, the least and the largest weight."""

    total: float
    count: float
    least: float
    largest: float


def weight_statistics(turns: Sequence[Turn], epsilon_cal: float) -> dict[str, Weights]:
    """Weights on "copied" and on "edited" tokens of scored, corrected turns; no kind without tokens."""
    if not turns:
        return {}
    scored = [(t.correction.corrector_logprobs, t.correction.rollout_logprobs) for t in turns]
    weights = np.concatenate([reasoning_shift_weights(*pair, epsilon_cal) for pair in scored])
    copied = np.concatenate([copied_tokens(t.correction.original_ids, t.response_ids) for t in turns])
    kinds = {"copied": weights[copied], "edited": weights[~copied]}
    return {
        kind: Weights(float(values.mean()) * values.size, float(values.size), float(values.min()), float(values.max()))
        for kind, values in kinds.items()
        if values.size
    }
