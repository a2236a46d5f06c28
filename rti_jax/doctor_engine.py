"""Checks of `rti doctor` that sample: engine against learner, weight sync, one episode, one judged sample."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rti_jax import frozen, intervention, weight_sync
from rti_jax import roles as roles_lib
from rti_jax.doctor_records import Finding, Status, Subject, failure, not_applicable, ok, scorer, warning
from rti_jax.engine import GenerateRequest, GenerateResult, make_engine
from rti_jax.rollout import Player, Seat
from rti_jax.types import Trajectory

PROMPTS = 8
RESPONSE = 64  # tokens of a sample, at most
# dtype -> (statistic of |engine - learner|, ok below, failure from here on, clear move of a weight update). In bfloat16
# two correct programs differ by tenths at single unlikely tokens, so the mean is looked at.
LIMITS = {"float32": ("max", 1e-3, 1e-2, 1.0), "bfloat16": ("mean", 2e-2, 1e-1, 0.5)}
CHANGES = (0.002, 0.02, 0.1, 0.3, 1.0)  # relative, of every weight: the first that moves log-probabilities clearly
STALE = "the engine must be given every weight under the name it has: a fault of rti-jax or of this vLLM version"

Sample = tuple[GenerateRequest, GenerateResult]


@dataclasses.dataclass(frozen=True)
class Gap:
    """|log p of the engine - log p of the learner| over sampled tokens."""

    max: float
    mean: float
    tokens: int

    @classmethod
    def between(cls, first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> "Gap":
        values = np.abs(np.concatenate([np.asarray(a) - np.asarray(b) for a, b in zip(first, second, strict=True)]))
        return cls(float(values.max()), float(values.mean()), len(values))

    def value(self, dtype: str) -> float:
        """The statistic that the limits of `dtype` are for."""
        return {"max": self.max, "mean": self.mean}[LIMITS[dtype][0]]

    def status(self, dtype: str) -> Status:
        _, good, bad, _ = LIMITS[dtype]
        value = self.value(dtype)
        return Status.OK if value < good else Status.WARNING if value < bad else Status.FAILURE  # NaN fails

    def __str__(self) -> str:
        return f"{self.mean:.1e} in the mean, {self.max:.1e} at most, over {self.tokens} tokens"


async def engine(subject: Subject) -> Finding:
    """vLLM starts with the config's arguments, or the servers take the trainer."""
    started = time.monotonic()
    subject.engine = await asyncio.to_thread(make_engine, subject.folder, subject.config)
    seconds = time.monotonic() - started
    if subject.config.engine.kind == "server":
        servers = len(subject.config.engine.urls) + subject.config.engine.start
        return ok(f"{servers} servers serve weights version {subject.engine.version}")
    return ok(f"started in {seconds:.0f} s")


async def learner(subject: Subject) -> Finding:
    """The learner gives sampled tokens the log-probabilities that the engine gave them."""
    await asyncio.to_thread(lambda: subject.policy)
    subject.drawn = await _draw(subject, await _prompts(subject))
    gap = await _gap(subject, subject.drawn, subject.policy.params)
    return _judged(
        gap,
        subject.config.model.dtype,
        "log-probabilities differ by",
        "engine.args and model.* must describe the same model (dtype, attention, rope scaling); a server must serve "
        "model.path and have been started anew",
    )


async def weight_update(subject: Subject) -> Finding:
    """Changed weights reach the engine whole, head included, and the first ones come back."""
    model, params, version = subject.policy.model, subject.policy.params, subject.engine.version
    dtype, prompts = subject.config.model.dtype, [request.prompt_ids for request, _ in subject.drawn]
    changed, moved = await asyncio.to_thread(_changed, subject)
    await weight_sync.sync(subject.engine, model, changed, version + 1)
    drawn = await _draw(subject, prompts)
    gap = await _gap(subject, drawn, changed)
    cause = await _cause(subject, drawn, params, changed) if gap.status(dtype) is Status.FAILURE else ""
    await weight_sync.sync(subject.engine, model, params, version + 2)
    if cause:
        return failure(f"{cause}: after an update log-probabilities differ by {gap}", STALE)
    first = await _gap(subject, await _draw(subject, prompts), params)
    if first.status(dtype) is not Status.OK:
        return _judged(first, dtype, "after the first weights came back log-probabilities differ by", STALE)
    if not moved > LIMITS[dtype][3]:
        return warning(
            f"changing every weight moves log-probabilities by {moved:.1e} only, too little to see an update by",
            "look at mismatch/after_max in the first steps of the run",
        )
    return _judged(gap, dtype, f"weights changed so that log-probabilities move by {moved:.2g}, then differ by", STALE)


async def episode(subject: Subject) -> Finding:
    """One episode is played and scored to its end."""
    subject.source.check()
    player = Player(subject.source, subject.chat, subject.engine, subject.config)
    trajectory = await player.play(subject.tasks[0], Seat(subject.config.seed, 0, "doctor/0", 0))
    return _ended(trajectory, trajectory.valid and trajectory.info.get("error", ""))


async def judged_sample(subject: Subject) -> Finding:
    """One episode with the three roles at every turn: their verdicts can be read."""
    config = subject.config
    if not (config.rti.enabled and config.rti.attempts):
        return not_applicable("without rti.enabled no role is asked")
    player = Player(subject.source, subject.chat, subject.engine, config)
    seat = Seat(config.seed, 0, "doctor/0", -1)

    async def score(rows):
        return await asyncio.to_thread(subject.scorer.score, subject.policy.params, rows)

    endpoints = roles_lib.connect(config.rti)
    async with frozen.serving(config.rti.role_folders, config) as engines:
        roles = roles_lib.Roles(subject.chat, subject.engine, config.sampling, config.rti, endpoints, engines)
        rollout = await intervention.intervened_rollout(subject.tasks[0], seat, player, roles, score, config)
    finding = _ended(rollout.trajectory, "")
    if finding.status is Status.FAILURE or not rollout.interventions:
        return finding
    asked = len(rollout.interventions)
    readable = sum(i.readable for i in rollout.interventions)
    said = (
        f"{readable} of {asked} verdicts of the validator can be read, {sum(i.flagged for i in rollout.interventions)} "
        f"turns flagged, {len(rollout.trajectory.corrected_turns)} corrected; {finding.message}"
    )
    if not readable and config.rti.control not in ("always_invalid", "never_invalid"):
        return warning(
            f"no verdict can be read, so no turn would ever be corrected: {said}",
            "raise rti.roles.validator.max_tokens, choose the rti.prompts that the policy knows, or name another model "
            "in rti.roles.validator.endpoint",
        )
    return ok(said)


def _ended(trajectory: Trajectory, cut: str) -> Finding:
    """How an episode of the policy ended; failing at the task is no fault."""
    turns = f"{len(trajectory.turns)} turns"
    if not trajectory.status.valid:
        return failure(
            f"{trajectory.task_id} ended in {trajectory.status} after {turns}: {trajectory.info.get('error', '')}",
            "`rti validate` examines the environment alone; slow ones need a larger rollout.episode_timeout",
        )
    if cut or not trajectory.valid:
        return warning(
            f"{trajectory.task_id} was truncated after {turns}: {trajectory.info.get('error', '')}",
            "raise sampling.max_context or sampling.max_tokens if that is usual",
        )
    return ok(f"{trajectory.task_id}: {trajectory.status} after {turns}, reward {trajectory.reward:g}")


async def _prompts(subject: Subject) -> list[tuple[int, ...]]:
    """First prompts of different tasks that leave room for an answer."""
    prompts = []
    for task in subject.tasks[:PROMPTS]:
        played, start = await subject.rehearse(task)
        prompts.append(subject.chat.start(start.messages, start.tools))
        await played.close()
    limit = subject.config.sampling.max_context
    if not (fitting := [p for p in prompts if len(p) < limit]):
        raise ValueError(f"no prompt leaves room in a context of {limit}; raise sampling.max_context")
    return fitting


async def _draw(subject: Subject, prompts: Sequence[tuple[int, ...]]) -> list[Sample]:
    sampling = subject.config.sampling
    requests = [
        GenerateRequest(p, min(sampling.max_tokens, RESPONSE), sampling.temperature, i, subject.chat.stop_ids)
        for i, p in enumerate(prompts)
    ]
    return list(zip(requests, await asyncio.gather(*map(subject.engine.generate, requests)), strict=True))


async def _gap(subject: Subject, drawn: Sequence[Sample], params, model=None) -> Gap:
    """Engine against learner with `params`."""
    scored = await asyncio.to_thread(_scores, subject, drawn, params, model)
    return Gap.between(scored, [result.logprobs for _, result in drawn])


def _scores(subject: Subject, drawn: Sequence[Sample], params, model=None) -> list[np.ndarray]:
    rows = [(request.prompt_ids, result.ids) for request, result in drawn]
    return (scorer(subject.config, subject.policy.mesh, model) if model else subject.scorer).score(params, rows)


def _changed(subject: Subject):
    """(parameters changed by the smallest size that moves log-probabilities clearly, how far they move)."""
    params, dtype = subject.policy.params, subject.config.model.dtype
    shift = jax.jit(_shifted, out_shardings=jax.tree.map(lambda x: x.sharding, params))
    before = _scores(subject, subject.drawn, params)
    for size in CHANGES:
        changed = shift(params, size)
        moved = Gap.between(_scores(subject, subject.drawn, changed), before).value(dtype)
        if moved > LIMITS[dtype][3]:
            break
    return changed, moved


def _shifted(params, size: float):
    """Every weight moved by up to `size` times its tensor's root mean square, by a scrambled function of its value."""

    def shifted(x):
        spread = jnp.sqrt(jnp.mean(jnp.square(x))) + jnp.finfo(x.dtype).tiny
        return x + size * spread * jnp.sin(1e4 * x / spread)

    return jax.tree.map(shifted, params)


async def _cause(subject: Subject, drawn: Sequence[Sample], old, new) -> str:
    """Which wrong weights explain what the engine sampled after an update."""
    dtype, mixed = subject.config.model.dtype, {"body": new, "head": old}
    if (await _gap(subject, drawn, old)).status(dtype) is not Status.FAILURE:
        return "weights stale: the engine still samples with the old ones"
    if (await _gap(subject, drawn, mixed, _OtherHead(subject.policy.model))).status(dtype) is not Status.FAILURE:
        tied = "tied " if subject.tied else ""
        return f"{tied}head stale: the engine has the new layers and the old lm_head"
    return "weight update incomplete: the engine samples with neither the old weights nor the new"


class _OtherHead:
    """The model with a head of other parameters than its body's."""

    def __init__(self, model):
        self._model = model

    def hidden(self, params, *arrays):
        return self._model.hidden(params["body"], *arrays)

    def head(self, params):
        return self._model.head(params["head"])


def _judged(gap: Gap, dtype: str, said: str, remedy: str) -> Finding:
    status = gap.status(dtype)
    return Finding(status, f"{said} {gap} ({dtype})", "" if status is Status.OK else remedy)
