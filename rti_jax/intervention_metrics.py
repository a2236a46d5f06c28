"""What the intervention did in a step, counted from its records."""

import collections
import math
from collections.abc import Mapping, Sequence

from rti_jax.gate import GateReason
from rti_jax.intervention import triggered
from rti_jax.types import Group, IntervenedRollout, RejectReason, RoleUsage


def statistics(groups: Sequence[Group], usage: Mapping[str, RoleUsage] | None = None) -> dict[str, float]:
    """Counters by metric name, all present even where 0.

    Args:
      groups: as `intervene` returned them. usage: of the roles since the last step.
    """
    attempts = [a for g in groups for a in g.attempts]
    turns = [i for a in attempts for i in a.interventions]
    proposals = [p for i in turns for p in i.proposals]
    rejected = collections.Counter(p.rejected for p in proposals if p.rejected)
    counts = {
        "groups_triggered": sum(bool(g.attempts) or triggered(g) for g in groups),
        "attempts": len(attempts),
        "attempts_in_error": sum(not a.trajectory.status.valid for a in attempts),
        "turns_validated": len(turns),
        "turns_flagged": sum(i.flagged for i in turns),
        "validator_unreadable": sum(not i.readable for i in turns),
        "proposals": len(proposals),
        "accepted": sum(p.rejected is None for p in proposals),
        "leak_guard_found": sum(p.rejected not in _FORM and bool(p.detail) for p in proposals),
        **{f"rejected_{reason.value}": rejected[reason] for reason in RejectReason},
        **_outcomes(attempts),
        "replaced": sum(g.replaced is not None for g in groups),
        **_perplexities(attempts),
        **_lengths(attempts),
        **_truths(attempts),
        **_foresight(attempts),
        "policy_tokens": sum(_policy_tokens(a) for a in attempts),
    }
    for role, cost in (usage or {}).items():
        counts |= {
            f"{role}_calls": cost.calls,
            f"{role}_prompt_tokens": cost.prompt_tokens,
            f"{role}_tokens": cost.tokens,
            f"{role}_seconds": cost.seconds,
        }
    return {f"rti/{name}": float(value) for name, value in counts.items()}


_FORM = (RejectReason.MALFORMED, RejectReason.UNCHANGED)  # whose detail is not the leak guard's


def _outcomes(attempts: Sequence[IntervenedRollout]) -> dict[str, int]:
    reasons = collections.Counter(a.decision.reason for a in attempts if a.decision)
    return {
        "successes": sum(a.trajectory.success for a in attempts),
        "successes_uncorrected": sum(a.trajectory.success and not a.trajectory.corrected_turns for a in attempts),
        "gate_admitted": reasons[GateReason.ADMITTED],
        "gate_rejected": reasons[GateReason.PERPLEXITY] + reasons[GateReason.NON_FINITE],
    }


def _perplexities(attempts: Sequence[IntervenedRollout]) -> dict[str, float]:
    """Over corrected turns of successes, before the gate and by its decision; NaN where there is none."""
    decided = [a.decision for a in attempts if a.decision and a.decision.perplexities]
    before = [p for d in decided for p in d.perplexities]
    return {
        "perplexity_before_gate": _mean(before),
        "perplexity_before_gate_max": max(before, default=math.nan),
        "perplexity_admitted": _mean([p for d in decided if d.admitted for p in d.perplexities]),
        "perplexity_rejected": _mean([p for d in decided if not d.admitted for p in d.perplexities]),
    }


def _lengths(attempts: Sequence[IntervenedRollout]) -> dict[str, float]:
    """Turns and tokens of the intervened episodes as played, and how many turns of admitted ones were rewritten."""
    played = [a.trajectory for a in attempts if a.trajectory.status.valid]
    admitted = [a.trajectory for a in attempts if a.decision and a.decision.admitted]
    return {
        "turns_per_attempt": _mean([len(t.turns) for t in played]),
        "tokens_per_attempt": _mean([sum(len(turn.response_ids) for turn in t.turns) for t in played]),
        "turns_per_admitted": _mean([len(t.turns) for t in admitted]),
        "corrected_turns_per_admitted": _mean([len(t.corrected_turns) for t in admitted]),
    }


def _foresight(attempts: Sequence[IntervenedRollout]) -> dict[str, float]:
    """The validator against the outcome, in episodes whose every turn was the policy's own after all.

    Without a correction the end of an episode shows whether its turns derailed it, in any environment: a flag that was
    overruled should be followed by failure (precision), and a failure have been flagged (recall).
    """
    own = [a for a in attempts if a.interventions and a.trajectory.status.valid and not a.trajectory.corrected_turns]
    flagged = [any(i.flagged for i in a.interventions) for a in own]
    failed = [not a.trajectory.success for a in own]
    return {
        "validator_precision_outcome": _mean([f for f, raised in zip(failed, flagged, strict=True) if raised]),
        "validator_recall_outcome": _mean([raised for f, raised in zip(failed, flagged, strict=True) if f]),
    }


def _truths(attempts: Sequence[IntervenedRollout]) -> dict[str, float]:
    """How right the roles were, where the environment can tell (envs.base.Environment.valid); NaN where it cannot."""
    turns = [i for a in attempts for i in a.interventions if i.valid is not None]
    caught = [i for i in turns if i.flagged and not i.valid]
    first = [i.proposals[0] for i in caught if i.proposals]
    admitted = [a for a in attempts if a.decision and a.decision.admitted]
    return {
        "validator_precision": _mean([not i.valid for i in turns if i.flagged]),
        "validator_recall": _mean([i.flagged for i in turns if not i.valid]),
        "corrector_success": _mean([bool(p.wins) and not p.reveals for p in first]),
        "proposals_revealing": sum(bool(p.reveals) for i in turns for p in i.proposals),
        "accepted_revealing": sum(bool(i.accepted and i.accepted.reveals) for i in turns),
        "admitted_revealing": sum(bool(i.accepted and i.accepted.reveals) for a in admitted for i in a.interventions),
    }


def _policy_tokens(attempt: IntervenedRollout) -> int:
    """Tokens that the policy sampled as the agent, those of replaced turns included."""
    turns = attempt.trajectory.turns
    return sum(len(t.correction.original_ids if t.correction else t.response_ids) for t in turns)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
