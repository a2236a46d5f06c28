"""Records that travel between the stages, checked on construction.

Data flows one way: an environment and the engine make `Turn`s, a `Trajectory` is an episode of them, a `Group` is
the G trajectories of one task, `Intervention`s say what the three roles did to a turn, and batching.py turns groups
into a `TrainBatch` of arrays. Records are frozen: a stage that changes something makes a new one.

Nothing in a `Turn`, `Trajectory`, `Group` or `TrainBatch` can hold evidence: role prompts, reasons and rejected
proposals live in `Intervention` records only, keyed by turn id, for statistics and the viewer.

Shape letters, used throughout the project: B rows, T tokens, G rollouts of a group, N heads, K key/value heads,
H head dimension, D model width, F mlp width, V vocabulary.
"""

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import numpy as np

ROLES = ("validator", "corrector", "verifier")  # of an intervened rollout: keys of rti.roles, and in metrics' names
SAMPLERS = ("policy", *ROLES)  # whose tokens are counted


class Author(enum.IntEnum):
    """Who wrote a token. Only what policy, corrector and teacher wrote is trained and counted."""

    PADDING = 0
    TEMPLATE = 1  # prompt: system, tools, request, role markers and generation prompts
    ENVIRONMENT = 2  # tool results and simulated users
    POLICY = 3
    CORRECTOR = 4
    TEACHER = 5  # another model, in a baseline (LUFFY): off-policy, without a ratio


class Status(enum.StrEnum):
    """How an episode ended (docs/design: outcomes). Only the first three are members of a group's statistics."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    ENVIRONMENT_ERROR = "environment_error"
    USER_ERROR = "user_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"

    @property
    def valid(self) -> bool:
        """True if the episode says something about the policy (errors of the infrastructure are never reward 0)."""
        return self in (Status.SUCCESS, Status.FAILURE, Status.TRUNCATED)


class RejectReason(enum.StrEnum):
    """Why a proposed correction was not taken."""

    MALFORMED = "malformed"  # empty, truncated or unparsable replacement
    UNCHANGED = "unchanged"  # the corrector repeated the original turn
    INCONSISTENT = "inconsistent"  # verifier: does not lead to the gold path
    LEAK = "leak"  # verifier: reveals privileged information
    IMPLAUSIBLE = "implausible"  # verifier: not something this policy would write
    UNREADABLE = "unreadable"  # verifier's verdict could not be parsed
    LEAK_GUARD = "leak_guard"  # deterministic guard: a value that only the evidence holds
    GATE = "gate"  # perplexity at or above delta (gate.scope = turn)


@dataclasses.dataclass(frozen=True)
class Correction:
    """What a corrected turn replaced, and its two scored log-probability vectors.

    Attributes:
      original_ids: y, the ids that the policy sampled and that were replaced.
      rollout_logprobs: log pi_old(y~_t | h, y~_<t), denominator of the ratio, input of the gate; None until scored.
      corrector_logprobs: log pi_old(y~_t | h_corr, y~_<t); None until scored.
    """

    original_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...] | None = None
    corrector_logprobs: tuple[float, ...] | None = None

    @property
    def perplexity(self) -> float:
        """PPL(y~) under the rollout prompt, over all of its tokens."""
        if not self.rollout_logprobs:
            return math.nan
        mean = -sum(self.rollout_logprobs) / len(self.rollout_logprobs)
        return math.exp(mean) if mean < 700 else math.inf


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn, as token ids that were sampled.

    Attributes:
      id: unique, "<trajectory id>/<turn index>".
      prompt_ids: everything the engine saw before the first response token (h_t, never h_corr).
      response_ids: the sampled ids, end-of-turn token included if it was sampled.
      sampler_logprobs: the engine's log-probabilities of response_ids at the sampling temperature; under h_corr for a
        corrected turn, where they take no part in any ratio.
      finish_reason: "stop" or "length".
      policy_version: weights version that sampled it.
      correction: set if the turn was written by the corrector.
      teacher: True if a teacher wrote it (LUFFY); then nothing of sampler_logprobs is used.
    """

    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish_reason: str
    policy_version: int
    correction: Correction | None = None
    teacher: bool = False

    def __post_init__(self):
        if not self.prompt_ids or not self.response_ids:
            raise ValueError(f"turn {self.id}: prompt and response must not be empty")
        if len(self.sampler_logprobs) != len(self.response_ids):
            raise ValueError(
                f"turn {self.id}: {len(self.sampler_logprobs)} log-probabilities for {len(self.response_ids)} tokens"
            )
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(f"turn {self.id}: finish_reason is {self.finish_reason!r}, not 'stop' or 'length'")
        if c := self.correction:
            for name in ("rollout_logprobs", "corrector_logprobs"):
                values = getattr(c, name)
                if values is not None and len(values) != len(self.response_ids):
                    raise ValueError(
                        f"turn {self.id}: {name} has {len(values)} values for {len(self.response_ids)} tokens"
                    )

    @property
    def author(self) -> Author:
        if self.teacher:
            return Author.TEACHER
        return Author.CORRECTOR if self.correction else Author.POLICY


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """An episode. `reward` is None exactly if it is no member of its group's statistics: after an error of the
    infrastructure, or truncated, where that is no failure (rollout.truncated_is_failure) or came before any turn.

    Attributes:
      id: unique within the run.
      group_id: explicit group, never derived from the prompt's text.
      member: index within the group; interventions use -1 - attempt.
      messages: the visible conversation in OpenAI format, for the viewer; never re-encoded for training.
      info: numbers and strings from the environment's score (sub-scores, reason of failure).
      replies: turns of a policy that has no token ids here (another model's endpoint), which `turns` cannot hold.
    """

    id: str
    group_id: str
    member: int
    task_id: str
    turns: tuple[Turn, ...]
    status: Status
    reward: float | None
    messages: tuple[dict[str, Any], ...] = ()
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    replies: int = 0

    def __post_init__(self):
        if self.status.valid != self.valid and self.status is not Status.TRUNCATED:
            raise ValueError(f"trajectory {self.id}: status {self.status} with reward {self.reward}")
        if self.valid and not self.length:
            raise ValueError(f"trajectory {self.id}: a {self.status} needs at least one turn")

    @property
    def valid(self) -> bool:
        """Whether it counts in its group's statistics."""
        return self.reward is not None

    @property
    def length(self) -> int:
        """Assistant turns that the policy played."""
        return len(self.turns) or self.replies

    @property
    def success(self) -> bool:
        return self.status is Status.SUCCESS

    @property
    def corrected_turns(self) -> tuple[Turn, ...]:
        return tuple(t for t in self.turns if t.correction)


@dataclasses.dataclass
class RoleUsage:
    """What the policy, or it in one of the three roles, has cost so far; the one record that grows."""

    calls: int = 0
    prompt_tokens: int = 0
    tokens: int = 0  # sampled
    seconds: float = 0.0  # summed over calls, which overlap

    def add(self, other: "RoleUsage") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One attempt of the corrector at one turn. `prompt_ids` is h_corr and holds evidence."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    rejected: RejectReason | None
    verifier_text: str | None = None
    detail: str = ""  # e.g. the value the leak guard found
    wins: bool | None = None  # the episode could still be won after it; None where nothing tells
    reveals: str | None = None  # what the environment's scripted check says that it gives away


@dataclasses.dataclass(frozen=True)
class Intervention:
    """What the roles did at one turn of an intervened rollout. Holds evidence: statistics and viewer only."""

    turn_id: str
    validator_text: str
    flagged: bool
    readable: bool  # False if the validator's verdict could not be parsed (counts as valid)
    reason: str
    original_text: str
    proposals: tuple[Proposal, ...] = ()
    valid: bool | None = None  # the truth about the original turn; None where nothing tells, or all was lost before

    @property
    def accepted(self) -> Proposal | None:
        """The proposal that replaced the turn, if any."""
        return next((p for p in self.proposals if p.rejected is None), None)


@dataclasses.dataclass(frozen=True)
class GateDecision:
    """Result of the perplexity gate for a trajectory; perplexities in order of its corrected turns."""

    admitted: bool
    reason: str
    perplexities: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class IntervenedRollout:
    """One intervened episode with the record of its turns; `decision` is set by the gate."""

    trajectory: Trajectory
    interventions: tuple[Intervention, ...]
    decision: GateDecision | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """The trajectories of one task that share a baseline.

    Attributes:
      trajectories: on-policy members; after replacement, one of them is an admitted intervened trajectory.
      attempts: intervened rollouts of this task, admitted or not.
      replaced: the failed member that an admitted trajectory took the place of.
    """

    id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]
    attempts: tuple[IntervenedRollout, ...] = ()
    replaced: Trajectory | None = None

    def __post_init__(self):
        for t in self.trajectories:
            if t.group_id != self.id:
                raise ValueError(f"group {self.id}: holds trajectory {t.id} of group {t.group_id}")

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """Members that have a reward; the others are out of the statistics."""
        return tuple(t for t in self.trajectories if t.valid)

    @property
    def all_failed(self) -> bool:
        """The trigger: at least one valid member, and every valid one failed."""
        return bool(self.valid) and not any(t.success for t in self.valid)


class TrainBatch(NamedTuple):
    """Packed rows; every array is [B, T] unless said otherwise and is aligned with `tokens` (no shift anywhere).

    A value at [b, t] belongs to the token at [b, t]: `logprobs[b, t]` is log p(tokens[b, t] | tokens of the same
    segment before t). The first token of a segment has no log-probability and is never trained. Only logprobs.py
    shifts by one. Positions that were not sampled hold NaN in the log-probability arrays, so a mask error is loud.

    Attributes:
      tokens: int32. positions: int32, restart at 0 in each segment. segment_ids: int32, 0 is padding, 1.. in a row.
      loss_mask: bool, True on tokens of policy, corrector and teacher. author: int8, see `Author`.
      trajectory: int32 index of the trajectory in the batch, -1 on padding (a trajectory may span rows).
      behavior_logprobs, ref_logprobs, sampler_logprobs: float32.
      advantages, weights: float32; weights are 1 except on corrected tokens.
      loss_scale: float32, what one token counts in the aggregation before the division by `denominator`.
      denominator: float32 scalar over the *global* batch: trajectories, tokens or a constant.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    author: np.ndarray
    trajectory: np.ndarray
    behavior_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    loss_scale: np.ndarray
    denominator: np.ndarray
