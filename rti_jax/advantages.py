"""Group-relative advantages, on complete groups, after replacement."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rti_jax.types import Group


@dataclasses.dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of the groups that are trained.

    Attributes:
      groups: groups with at least two valid members, in the order given.
      advantages: trajectory id -> advantage, valid members of these groups.
      dropped: groups with fewer than two valid members: no baseline, so they are left out.
      filtered: groups without a gradient that DAPO leaves out; else 0.
      flat: trained groups without a gradient; they stay in the denominators.
    """

    groups: tuple[Group, ...]
    advantages: dict[str, float]
    dropped: int
    filtered: int
    flat: int

    @property
    def has_gradient(self) -> bool:
        """False if every advantage is exactly 0: with no KL there is nothing to learn and the update is skipped."""
        return any(a != 0.0 for a in self.advantages.values())


def group_advantages(rewards: Sequence[float], normalize: bool = True) -> np.ndarray:
    """A_i = (R_i - mean R) / std R with the population std, [G] float64 (GRPO, arXiv 2402.03300 section 4.1.2).

    Exactly 0 for all if the rewards are equal, decided by comparing the rewards (to one part in 1e9, so that float
    residue of equal sub-scores is no signal): 0.1 eight times has a float std of 1e-17, which would pass a guard
    of `std > 0`.

    Args:
      rewards: [G], finite.
      normalize: False leaves out the division by the std (Dr. GRPO, arXiv 2503.20783).
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"rewards of a group must be a vector of finite numbers, got {rewards!r}")
    if np.ptp(values) <= 1e-9 * np.abs(values).max():
        return np.zeros_like(values)
    centered = values - values.mean()
    return centered / values.std() if normalize else centered


def with_gradient(groups: Sequence[Group]) -> list[Group]:
    """The groups whose valid members do not all have one reward."""
    return [g for g in groups if len(g.valid) >= 2 and group_advantages([t.reward for t in g.valid]).any()]


def distillation_advantages(logprobs: np.ndarray, teacher_logprobs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A_t = -(log pi_student(y_t | h_t) - log pi_teacher(y_t | h_t)) on the student's own tokens, [B, T] float32.

    On-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation; MiniLLM, arXiv 2306.08543): the
    policy gradient with it descends the reverse KL to the teacher, one token at a time (no return of later tokens).
    Exactly 0 where both are equal, and where the mask is False.

    Raises:
      ValueError: different shapes, or a masked-in value that is not finite.
    """
    if not logprobs.shape == teacher_logprobs.shape == mask.shape:
        raise ValueError(f"log-probabilities of shapes {logprobs.shape} and {teacher_logprobs.shape} for {mask.shape}")
    gap = np.where(mask, teacher_logprobs, 0) - np.where(mask, logprobs, 0)
    if not np.isfinite(gap).all():
        raise ValueError("a token's log-probability under student or teacher is not finite")
    return gap.astype(np.float32)


def ungrouped(groups: Sequence[Group]) -> GroupAdvantages:
    """Groups whose members are trained without a baseline (on-policy distillation): every valid one; advantages NaN.

    The advantages are per token and not known before both models have scored the batch.
    """
    kept = tuple(g for g in groups if g.valid)
    advantages = {t.id: float("nan") for g in kept for t in g.valid}
    return GroupAdvantages(kept, advantages, len(groups) - len(kept), 0, 0)


def assign_advantages(groups: Sequence[Group], variant: str = "grpo") -> GroupAdvantages:
    """Advantage of every valid member of every group that has a baseline.

    Args:
      groups: complete groups after replacement, told apart by their id, never by their task's text.
      variant: "dr_grpo" does not divide by the std; "dapo" leaves out groups without a gradient.

    Raises:
      ValueError: two groups share an id, or two trajectories do.
    """
    _check_unique([g.id for g in groups], "group")
    _check_unique([t.id for g in groups for t in g.trajectories], "trajectory")
    kept, advantages, filtered, flat = [], {}, 0, 0
    usable = [g for g in groups if len(g.valid) >= 2]
    for group in usable:
        values = group_advantages([t.reward for t in group.valid], normalize=variant != "dr_grpo")
        if not values.any():
            if variant == "dapo":
                filtered += 1
                continue
            flat += 1
        kept.append(group)
        advantages.update({t.id: float(a) for t, a in zip(group.valid, values, strict=True)})
    return GroupAdvantages(tuple(kept), advantages, len(groups) - len(usable), filtered, flat)


def _check_unique(ids: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for i in ids:
        if i in seen:
            raise ValueError(f"two {what} records have the id {i!r}")
        seen.add(i)
