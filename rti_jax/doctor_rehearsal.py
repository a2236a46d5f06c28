"""Checks of `rti doctor` that play episodes without vLLM: is the context long enough, can evidence reach a row?

The environment's own expert writes the turns, where it has one; no endpoint is asked (`Environment.rehearsal`).
"""

import collections
import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from envs.base import AssistantTurn, Environment, Evidence, Task
from rti_jax import batching, intervention
from rti_jax import config as config_lib
from rti_jax.chat import Chat
from rti_jax.config_sections import RolesConfig
from rti_jax.doctor_records import Finding, Subject, failure, not_applicable, ok, warning
from rti_jax.engine import GenerateRequest, GenerateResult
from rti_jax.environments import EnvironmentSource
from rti_jax.roles import ROLES, RolePrompts, Roles
from rti_jax.rollout import Player, Seat
from rti_jax.types import Trajectory
from rti_jax.vllm_settings import text_config

CANARY = "CANARY-7f3a9e"
FALLBACK = AssistantTurn("Let me look at this once more.")  # a correction where the environment has no expert
ROOMY = 10**9  # a limit that nothing reaches


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of one task's episode, played by the environment's expert if there is one.

    Attributes:
      prompt: first prompt. whole: prompt and response of the last turn. answer: longest answer of the environment.
      first_role, role: longest prompt of a role at the first turn, and at any. turns: limit on turns.
    """

    task: str
    prompt: int
    whole: int
    response: int
    answer: int
    first_role: int
    role: int
    turns: int
    played: bool


async def context(subject: Subject) -> Finding:
    """Prompts, gold play and role prompts have room in the context, and the context in the buckets and the model."""
    limit, sampling = subject.config.sampling.max_context, subject.config.sampling
    if limit > max(subject.config.batch.buckets):
        return failure(
            f"sampling.max_context={limit} lets rows grow beyond the largest of batch.buckets="
            f"{subject.config.batch.buckets}",
            "add a bucket of that length, or lower sampling.max_context",
        )
    limit = min(limit, text_config(subject.folder).get("max_position_embeddings", limit))  # as vLLM does
    measured = [await _measure(subject, task) for task in subject.tasks]
    longest = max(measured, key=lambda m: m.whole)
    need = f"at least {longest.whole}, with batch.buckets and a model that have as many"
    if (first := max(measured, key=lambda m: m.prompt)).prompt >= limit:
        return failure(
            f"context too small: the first prompt of {first.task} has {first.prompt} tokens, context {limit}",
            f"raise sampling.max_context to {need}",
        )
    if longest.whole > limit:
        return failure(
            f"context too small: gold play of {longest.task} takes {longest.whole} tokens, context {limit}",
            f"raise sampling.max_context to {need}",
        )
    if (wordy := max(measured, key=lambda m: m.response)).response > sampling.max_tokens:
        return failure(
            f"a gold turn of {wordy.task} has {wordy.response} tokens, sampling.max_tokens={sampling.max_tokens}",
            "raise sampling.max_tokens",
        )
    if subject.config.rti.enabled and (first := max(measured, key=lambda m: m.first_role)).first_role >= limit:
        return failure(
            f"context too small: a role's prompt at the first turn of {first.task} has {first.first_role} tokens, "
            f"context {limit}",
            "raise sampling.max_context, or choose shorter rti.prompts",
        )
    return _tight(subject, measured)


def _tight(subject: Subject, measured: Sequence[Lengths]) -> Finding:
    """What fits only if turns are short."""
    limit, sampling = subject.config.sampling.max_context, subject.config.sampling
    positions = text_config(subject.folder).get("max_position_embeddings", limit)
    if limit > positions:
        return warning(
            f"sampling.max_context={limit} is more than the model's {positions} positions: episodes end there",
            f"set sampling.max_context={positions}",
        )
    role = max(measured, key=lambda m: m.role)
    if subject.config.rti.enabled and role.role >= limit:
        return warning(
            f"a role's prompt late in {role.task} has {role.role} tokens, sampling.max_context={limit}: there "
            "the roles are not asked",
            "raise sampling.max_context",
        )
    worst = max(m.prompt + m.turns * (sampling.max_tokens + m.answer) for m in measured)
    turns, longest = max(m.turns for m in measured), max(measured, key=lambda m: m.whole)
    play = f"gold play takes up to {longest.whole}" if longest.played else "there is no gold play to measure"
    said = f"prompts have up to {max(m.prompt for m in measured)} tokens, {play}"
    if worst > limit:
        return warning(
            f"{said}; {turns} turns of sampling.max_tokens={sampling.max_tokens} would take {worst}, "
            f"sampling.max_context={limit}: such episodes are truncated",
            "raise sampling.max_context, or lower sampling.max_tokens, if turns are that long",
        )
    return ok(f"{said}, {turns} turns at their limit {worst} of sampling.max_context={limit}")


async def _measure(subject: Subject, task: Task) -> Lengths:
    """Plays one task by its expert, as far as it goes, and counts."""
    chat = subject.chat
    played, start = await subject.rehearse(task)
    environment = played.environment
    try:
        written, tools = list(start.messages), start.tools
        ids = chat.start(written, tools)
        prompt = whole = len(ids)
        response = answer = 0
        asked = []
        for _ in range(environment.max_turns):
            turn = environment.expert()
            sampled = chat.encode_turn(turn or environment.idle(), _reasoning(chat))
            parsed = chat.parse(ids, sampled, tools)
            asked.append(_longest_role_prompt(subject, environment, ids, parsed.text))
            if turn is None:
                break
            whole, response = max(whole, len(ids) + len(sampled)), max(response, len(sampled))
            result = await played.step(parsed.turn)
            if result.done or not result.messages:
                break
            end, history = len(ids) + len(sampled), [*written, parsed.as_written()]
            ids, written = chat.extend(ids, sampled, result.messages, tools, history), [*history, *result.messages]
            answer = max(answer, len(ids) - end)
        return Lengths(
            task.id, prompt, whole, response, answer, asked[0], max(asked), environment.turn_limit, bool(response)
        )
    finally:
        await played.close()


def _longest_role_prompt(subject: Subject, environment: Environment, ids: Sequence[int], text: str) -> int:
    rti, evidence, rules = subject.config.rti, environment.evidence().text, environment.role_rules()
    prompts = RolePrompts(rti.prompts, conceal=rti.conceal, verify_leaks=rti.verify_leaks)
    asked = (
        prompts.validator(evidence, text, rules),
        prompts.corrector(evidence, text, "", rules),
        prompts.verifier(evidence, text, text, rules),
    )
    return max(len(subject.chat.ask(ids, message)) for message in asked)


def _reasoning(chat: Chat) -> str:
    return "Let me think." if chat.thinking else ""


async def canary(subject: Subject) -> Finding:
    """One intervened episode with a canary in its evidence: the roles see it, no row and no later prompt does."""
    config = subject.config
    if not config.rti.enabled:
        return not_applicable("without rti.enabled nobody reads the evidence")
    bait = Bait(subject.source)
    engine = Scripted(subject.chat, bait)
    config = _unlimited(config)
    player = Player(bait, subject.chat, engine, config)
    seat = Seat(config.seed, 0, "doctor/0", -1)
    roles = Roles(subject.chat, engine, config.sampling, config.rti)
    rollout = await intervention.intervened_rollout(subject.tasks[0], seat, player, roles, _no_score, config)
    trajectory = rollout.trajectory
    if not trajectory.turns or not trajectory.valid:
        return failure(
            f"the episode of {trajectory.task_id} ended in {trajectory.status}: {trajectory.info.get('error', '')}",
            "`rti validate` examines the environment",
        )
    unseen = [role for role in ROLES if not all(_holds(subject.chat, p) for p in engine.prompts[role])]
    corrected = len(trajectory.corrected_turns)
    if unseen or not corrected:
        return failure(
            f"{corrected} corrections; prompts without the evidence: {', '.join(unseen) or 'none'}",
            "role prompts (rti.prompts) must show {{ evidence }}",
        )
    if leak := _leak(subject.chat, engine.prompts["policy"], trajectory, config):
        return failure(
            f"evidence of {trajectory.task_id} reached {leak}",
            "the environment's reset, step and tools must not show what evidence() says",
        )
    rows = len(batching.trajectory_rows(_scored(trajectory), 0, 1.0, 1.0, config))
    return ok(
        f"in the prompts of all roles, in none of {len(trajectory.turns)} turns ({corrected} corrected), {rows} rows"
    )


def _leak(chat: Chat, prompts: Sequence[tuple[int, ...]], trajectory: Trajectory, config: config_lib.Config) -> str:
    """Where the canary is, or nothing."""
    for i, prompt in enumerate(prompts):
        if _holds(chat, prompt):
            return f"the policy's prompt of turn {i + 1}"
    for row in batching.trajectory_rows(_scored(trajectory), 0, 1.0, 1.0, config):
        if _holds(chat, row.tokens.tolist()):
            return "a training row"
    shown = json.dumps([*trajectory.messages, trajectory.info], ensure_ascii=False, default=str)
    return "the messages or the score of the episode" if CANARY in shown else ""


def _holds(chat: Chat, ids: Sequence[int]) -> bool:
    return CANARY in chat.decode(ids)


def _scored(trajectory: Trajectory) -> Trajectory:
    """With stand-ins for the log-probabilities that rows of corrected turns need."""

    def scored(turn):
        if not turn.correction:
            return turn
        values = (-0.1,) * len(turn.response_ids)
        correction = dataclasses.replace(turn.correction, rollout_logprobs=values, corrector_logprobs=values)
        return dataclasses.replace(turn, correction=correction)

    return dataclasses.replace(trajectory, turns=tuple(map(scored, trajectory.turns)))


def _unlimited(config: config_lib.Config) -> config_lib.Config:
    """The context's length and the guards are other checks' business: here every correction is to be played."""
    return config.model_copy(
        update={
            "sampling": config.sampling.model_copy(update={"max_context": ROOMY, "max_tokens": ROOMY}),
            "gate": config.gate.model_copy(update={"scope": "trajectory"}),
            "rti": config.rti.model_copy(
                update={
                    "leak_guard": False,
                    "post_check": True,
                    "control": "none",
                    "roles": RolesConfig(),
                }
            ),
        }
    )


async def _no_score(rows) -> Sequence[np.ndarray]:
    raise AssertionError("gate.scope=trajectory scores after the episode")


class Bait:
    """An environment's source whose evidence holds a canary; remembers the instance that it made last."""

    def __init__(self, source: EnvironmentSource):
        self._source = source
        self._cls = type(source.cls.__name__, (source.cls,), {"evidence": _baited(source.cls)})
        self.environment: Environment

    def make(self) -> Environment:
        self.environment = self._cls.rehearsal(self._source.config, self._source.max_turns)
        return self.environment


def _baited(cls: type[Environment]):
    def evidence(self: Environment) -> Evidence:
        real = cls.evidence(self)
        return Evidence(f"{CANARY}\n{real.text}\n{CANARY}", (*real.values, CANARY))

    return evidence


class Scripted:
    """An engine whose policy does nothing and whose corrector writes the expert's turns.

    Attributes:
      prompts: by role, in order.
    """

    version = 0

    def __init__(self, chat: Chat, bait: Bait):
        self.prompts: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
        self._chat, self._bait = chat, bait

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.prompts[request.role].append(request.prompt_ids)
        ids = self._chat.encode_turn(self._turn(request.role), _reasoning(self._chat))
        return GenerateResult(ids, (-0.1,) * len(ids), "stop", self.version)

    def _turn(self, role: str) -> AssistantTurn:
        environment = self._bait.environment
        if role == "validator":
            return AssistantTurn(json.dumps({"expected": CANARY, "verdict": "invalid", "reason": CANARY}))
        if role == "verifier":
            return AssistantTurn(json.dumps({"verdict": "accept", "note": CANARY}))
        return environment.idle() if role == "policy" else environment.expert() or FALLBACK
