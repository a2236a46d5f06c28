"""All-failed groups + evidence → intervened trajectories (RTI, arXiv 2610.13438; docs/intervention.md).

The only reader of `Evidence`. A group whose every valid member failed is played once more with the three roles at each
turn; an episode that now succeeds by corrections that the policy could plausibly have written takes the place of one
failed member. What the roles saw and said stays in `Intervention` records; a corrected `Turn` holds h_t and the
corrector's sampled ids, nothing else.
"""

import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np

from envs import base as env_base
from envs.base import AssistantTurn, Environment, Evidence, Task
from rti_jax import gate, leakage
from rti_jax.chat import Chat, ParsedTurn
from rti_jax.config import Config, ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.limits import run_bounded
from rti_jax.roles import Replacement, Roles, Verdict
from rti_jax.rollout import Player, Seat, TurnView
from rti_jax.seeds import derive_seed
from rti_jax.types import (
    Correction,
    GateDecision,
    Group,
    IntervenedRollout,
    Intervention,
    Proposal,
    RejectReason,
    Trajectory,
    Turn,
)

# (prompt_ids, response_ids) rows -> log-probabilities of each response, [len(response)], under the weights that
# sampled the group, at the rollout temperature.
Row = tuple[tuple[int, ...], tuple[int, ...]]
Score = Callable[[Sequence[Row]], Awaitable[Sequence[np.ndarray]]]


def triggered(group: Group) -> bool:
    """Whether a group is intervened in: every valid member failed, and there are enough of them for a baseline."""
    return group.all_failed and len(group.valid) >= 2


async def intervene(
    groups: Sequence[Group],
    tasks: Iterable[Task],
    player: Player,
    roles: Roles,
    score: Score,
    config: Config,
    *,
    step: int,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Group]:
    """Plays intervened rollouts of the groups that failed entirely and puts admitted ones into them.

    Attempts of one group follow each other and stop at the first admission; all groups run at once. Must run before
    the update: the weights, hence the versions of all turns, are those that sampled the groups.

    Args:
      tasks: at least the tasks of `groups`.
      score: the learner's scorer; called once per round of attempts (and per correction with gate.scope = turn).

    Returns:
      The groups in order, those that were triggered with their attempts and perhaps a replaced member.
    """
    tasks = list(tasks)
    result, by_id = list(groups), {t.id: t for t in tasks}
    waiting = [i for i, group in enumerate(groups) if triggered(group)]
    swapped = await _foreign_evidence(tasks, player.source) if config.rti.control == "swapped_evidence" else {}

    async def play(group: Group, attempt: int) -> IntervenedRollout:
        seat = Seat(config.seed, step, group.id, -1 - attempt)
        task = by_id[group.task_id]
        rollout = await intervened_rollout(task, seat, player, roles, score, config, swapped.get(task.id))
        if on_episode:
            on_episode(rollout.trajectory)
        return rollout

    for attempt in range(config.rti.attempts):
        jobs = [lambda g=result[i], a=attempt: play(g, a) for i in waiting]
        rollouts = await score_corrections(await run_bounded(jobs, config.rollout.concurrency), score)
        for i, rollout in zip(waiting, rollouts, strict=True):
            settled = dataclasses.replace(rollout, decision=decide(rollout.trajectory, config))
            group = dataclasses.replace(result[i], attempts=(*result[i].attempts, settled))
            result[i] = replace(group, settled, config.seed) if settled.decision.admitted else group
        waiting = [i for i in waiting if result[i].replaced is None]
    return result


async def _foreign_evidence(tasks: Sequence[Task], source: EnvironmentSource) -> dict[str, Evidence]:
    """For each task the evidence of the next one: a control, under which nothing should be admitted."""
    if len(tasks) < 2:
        raise ConfigError("rti.control=swapped_evidence needs two tasks a step; raise rollout.groups_per_step")
    evidence = []
    for task in tasks:
        environment = source.make()
        await environment.reset(task)
        evidence.append(environment.evidence())
        await environment.close()
    return {task.id: evidence[(i + 1) % len(tasks)] for i, task in enumerate(tasks)}


async def intervened_rollout(
    task: Task,
    seat: Seat,
    player: Player,
    roles: Roles,
    score: Score,
    config: Config,
    evidence: Evidence | None = None,
) -> IntervenedRollout:
    """A fresh episode with the three roles at every turn; corrections are not scored yet.

    Args:
      evidence: instead of the environment's, for a control.
    """
    reviewers: list[Reviewer] = []

    def reviser(environment: Environment) -> Reviewer:
        reviewers.append(Reviewer(environment, seat, roles, score, config, evidence))
        return reviewers[-1]

    trajectory = await player.play(task, seat, reviser=reviser)
    return IntervenedRollout(trajectory, tuple(reviewers[-1].interventions) if reviewers else ())


class Reviewer:
    """Steps 1 to 4 of an intervened rollout at each turn of one episode, and the record of them."""

    def __init__(
        self,
        environment: Environment,
        seat: Seat,
        roles: Roles,
        score: Score,
        config: Config,
        evidence: Evidence | None = None,
    ):
        self.interventions: list[Intervention] = []
        self._evidence = evidence
        self._environment = environment
        self._seat = seat
        self._roles = roles
        self._score = score
        self._config = config

    async def __call__(self, view: TurnView, turn: Turn, parsed: ParsedTurn) -> tuple[Turn, ParsedTurn]:
        """The turn that is played: the policy's, or the first correction of it that is not rejected."""
        evidence, rules = self._privileged()
        seed = self._seat.seed_of(view.index, "validator")
        verdict = _fixed_verdict(self._config.rti.control) or await self._roles.validate(
            view, evidence, rules, parsed.text, seed
        )
        proposals: list[Proposal] = []
        played = turn, parsed
        for retry in range(self._config.rti.retries + 1 if verdict.flagged else 0):
            seed = self._seat.seed_of(view.index, f"corrector/{retry}")
            new = await self._roles.correct(view, evidence, rules, parsed.text, verdict.reason, seed)
            seed = self._seat.seed_of(view.index, f"verifier/{retry}")
            proposals.append(await self._judge(view, turn, parsed, new, evidence, rules, seed))
            if proposals[-1].rejected is None:
                played = corrected_turn(turn, new), new.parsed
                break
        self.interventions.append(
            Intervention(
                turn_id=view.turn_id,
                validator_text=verdict.text,
                flagged=verdict.flagged,
                readable=verdict.readable,
                reason=verdict.reason,
                original_text=parsed.text,
                proposals=tuple(proposals),
                valid=self._wins(parsed.turn),
            )
        )
        return played

    def _privileged(self) -> tuple[Evidence, str]:
        try:
            return self._evidence or self._environment.evidence(), self._environment.role_rules()
        except Exception as error:  # its text may hold evidence
            raise env_base.EnvironmentError(f"evidence() or role_rules() raised {type(error).__name__}") from error

    async def _judge(
        self,
        view: TurnView,
        turn: Turn,
        parsed: ParsedTurn,
        new: Replacement,
        evidence: Evidence,
        rules: str,
        seed: int,
    ) -> Proposal:
        """Checks a proposal: form, post-check (verifier and leak guard, both always asked), gate of the turn."""
        detail, verdict_text = "", None
        rejected = self._malformed(view, new)
        if rejected:
            detail = new.parsed.malformed or "longer than the context"
        elif new.response_ids == turn.response_ids or new.parsed.text == parsed.text:
            rejected = RejectReason.UNCHANGED
        elif self._config.rti.post_check:
            if self._config.rti.control != "always_accept":
                rejected, verdict_text = await self._roles.verify(
                    view, evidence, rules, parsed.text, new.parsed.text, seed
                )
            if found := self._leaks(view, parsed, new, evidence):
                rejected, detail = rejected or RejectReason.LEAK_GUARD, ", ".join(found)
        if rejected is None and self._config.gate.scope == "turn" and not await self._plausible(view, turn, new):
            rejected = RejectReason.GATE
        return Proposal(
            prompt_ids=new.prompt_ids,
            response_ids=new.response_ids,
            text=new.parsed.text,
            rejected=rejected,
            verifier_text=verdict_text,
            detail=detail,
            wins=self._wins(new.parsed.turn),
            reveals=self._environment.reveals(new.parsed.turn),
        )

    def _wins(self, turn: AssistantTurn) -> bool | None:
        """The truth about a turn, for statistics; None once all is lost, or where the environment cannot tell."""
        wins = self._environment.valid(turn)
        return None if wins is None or self._environment.expert() is None else wins

    def _malformed(self, view: TurnView, new: Replacement) -> RejectReason | None:
        fits = len(view.prompt_ids) + len(new.response_ids) <= self._config.sampling.max_context
        return RejectReason.MALFORMED if new.parsed.malformed or not fits else None

    def _leaks(self, view: TurnView, parsed: ParsedTurn, new: Replacement, evidence: Evidence) -> tuple[str, ...]:
        if not self._config.rti.leak_guard:
            return ()
        visible = visible_text(self._roles.chat, view, parsed, self._environment)
        return leakage.leaks(new.parsed.text, evidence.values, visible, evidence.text)

    async def _plausible(self, view: TurnView, turn: Turn, new: Replacement) -> bool:
        (logprobs,) = await self._score([(view.prompt_ids, new.response_ids)])
        scored = Correction(turn.response_ids, rollout_logprobs=tuple(map(float, logprobs)))
        return gate.turn_passes(scored, self._config.gate.delta)


def _fixed_verdict(control: str) -> Verdict | None:
    """The validator's verdict under a control that does not ask it."""
    if control not in ("always_invalid", "never_invalid"):
        return None
    return Verdict(flagged=control == "always_invalid", readable=True, reason="", text="")


def visible_text(chat: Chat, view: TurnView, parsed: ParsedTurn, environment: Environment) -> list[str]:
    """Texts whose values are not privileged for the leak guard: history, original turn, tool schemas, public text."""
    tools = json.dumps(view.tools, ensure_ascii=False)
    return [chat.decode(view.prompt_ids), parsed.text, tools, environment.public_values()]


def corrected_turn(turn: Turn, new: Replacement) -> Turn:
    """The turn as trained: h_t and the corrector's ids as they were sampled; h_corr stays behind."""
    return Turn(
        id=turn.id,
        prompt_ids=turn.prompt_ids,
        response_ids=new.response_ids,
        sampler_logprobs=new.logprobs,
        finish_reason="stop",
        policy_version=new.policy_version,
        correction=Correction(original_ids=turn.response_ids),
    )


async def score_corrections(rollouts: Sequence[IntervenedRollout], score: Score) -> list[IntervenedRollout]:
    """Fills both log-probability vectors of every correction of the successful rollouts, in one call of the scorer.

    log pi_old(y~ | h) is the denominator of the ratio and the gate's input; log pi_old(y~ | h_corr), with the accepted
    attempt's exact prompt, less the former is the log of the reasoning-shift weight.
    """
    rows: list[Row] = []
    for rollout in rollouts:
        if rollout.trajectory.success:
            prompts = {i.turn_id: i.accepted.prompt_ids for i in rollout.interventions if i.accepted}
            for turn in rollout.trajectory.corrected_turns:
                rows += [(turn.prompt_ids, turn.response_ids), (prompts[turn.id], turn.response_ids)]
    values = iter(await score(rows) if rows else ())

    def scored(turn: Turn) -> Turn:
        if not turn.correction:
            return turn
        under_h, under_corrector = (tuple(map(float, next(values))) for _ in range(2))
        correction = dataclasses.replace(turn.correction, rollout_logprobs=under_h, corrector_logprobs=under_corrector)
        return dataclasses.replace(turn, correction=correction)

    done = []
    for rollout in rollouts:
        trajectory = rollout.trajectory
        if trajectory.success:
            trajectory = dataclasses.replace(trajectory, turns=tuple(map(scored, trajectory.turns)))
        done.append(dataclasses.replace(rollout, trajectory=trajectory))
    return done


def decide(trajectory: Trajectory, config: Config) -> GateDecision:
    """Whether a scored rollout is admitted: it succeeded, has a correction, and all corrections pass the gate."""
    if not trajectory.success:
        return GateDecision(False, gate.GateReason.FAILED)
    if not trajectory.corrected_turns:
        return GateDecision(config.rti.accept_uncorrected, gate.GateReason.UNCORRECTED)
    return gate.decide(trajectory, config.gate.delta)


def replace(group: Group, rollout: IntervenedRollout, seed: int) -> Group:
    """The group with one valid failed member, drawn uniformly, replaced by an admitted trajectory.

    Raises:
      ValueError: other weights played the rollout than the group, or no member failed.
    """
    versions = {t.policy_version for m in (*group.valid, rollout.trajectory) for t in m.turns}
    if len(versions) > 1:
        raise ValueError(f"group {group.id}: members and intervention were sampled by weights versions {versions}")
    return put_in(group, rollout.trajectory, seed)


def put_in(group: Group, trajectory: Trajectory, seed: int) -> Group:
    """The group with a trajectory in the place of one valid failed member, drawn uniformly.

    Raises:
      ValueError: no member failed.
    """
    failed = [i for i, t in enumerate(group.trajectories) if t.valid and not t.success]
    if not failed:
        raise ValueError(f"group {group.id}: no valid failed member to replace")
    place = int(np.random.default_rng(derive_seed(seed, group.id, "replace")).choice(failed))
    members = list(group.trajectories)
    replaced, members[place] = members[place], trajectory
    return dataclasses.replace(group, trajectories=tuple(members), replaced=replaced)
