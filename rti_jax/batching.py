"""Trajectories → rows → packed micro-batches of static shapes. Numpy only, no randomness.

A row is what the engine saw: the first turn's prompt, the response, what was inserted after it, the next response, …
for as long as each prompt repeats the ids before it exactly. Where a template drops earlier thinking a prompt is no
extension, and a new row starts with that prompt as its context; nothing is merged or re-encoded.

Denominators count the whole batch, so that micro-batches, packing and row order never change the loss. On several hosts
each packs the rows of its own groups, and `agree` gives all of them the same shapes and the same denominator.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rti_jax.advantages import GroupAdvantages, assign_advantages, distillation_advantages, ungrouped
from rti_jax.config import BatchConfig, Config, ConfigError, LossConfig
from rti_jax.packing import plan_microbatches
from rti_jax.reweight import reasoning_shift_weights, weight_statistics
from rti_jax.types import Author, Group, TrainBatch, Trajectory, Turn

TRAINED = (Author.POLICY, Author.CORRECTOR, Author.TEACHER)


@dataclasses.dataclass(frozen=True)
class Row:
    """One unpacked row; arrays are [T], as in `TrainBatch`, and `trajectory` is an index into the batch's."""

    trajectory: int
    tokens: np.ndarray
    author: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    loss_scale: np.ndarray

    def __post_init__(self):
        for field in dataclasses.fields(self)[1:]:
            if (shape := getattr(self, field.name).shape) != (len(self.tokens),):
                raise ValueError(f"row of {len(self.tokens)} tokens: {field.name} has shape {shape}")
        if self.loss_mask[:1].any():
            raise ValueError("the first token of a row has no log-probability and cannot be trained")

    def __len__(self) -> int:
        return len(self.tokens)


Ratio = tuple[float, float]  # numerator and denominator, each added over hosts


class Outline(NamedTuple):
    """What hosts tell each other of their parts of a batch; see `PackedBatch` for the fields."""

    shapes: tuple[tuple[int, int], ...]
    corrected: tuple[bool, ...]
    trained: tuple[int, ...]
    has_gradient: bool
    counts: dict[str, float]
    ratios: dict[str, Ratio]
    extremes: dict[str, float]


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """What one optimizer step consumes.

    Attributes:
      microbatches: arrays of few shapes, one per bucket; together they hold every row once.
      corrected: of each micro-batch, whether it holds corrected tokens, or LUFFY's teacher's (on any host).
      trajectory_ids: what `TrainBatch.trajectory` indexes.
      trained: trained tokens of each of these trajectories.
      has_gradient: False if every advantage is 0.
      counts, ratios, extremes: what `metrics` is made of; an extreme is named .../min_... or .../max_...
    """

    microbatches: tuple[TrainBatch, ...]
    corrected: tuple[bool, ...]
    trajectory_ids: tuple[str, ...]
    trained: tuple[int, ...]
    has_gradient: bool
    counts: Mapping[str, float]
    ratios: Mapping[str, Ratio]
    extremes: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """Counts, shares and extremes by name."""
        shares = {name: part / whole if whole else 0.0 for name, (part, whole) in self.ratios.items()}
        return {**self.counts, **shares, **self.extremes}

    @property
    def outline(self) -> Outline:
        shapes = tuple(b.tokens.shape for b in self.microbatches)
        values = dict(self.counts), dict(self.ratios), dict(self.extremes)
        return Outline(shapes, self.corrected, self.trained, self.has_gradient, *values)


def build(
    groups: Sequence[Group], config: Config, *, row_multiple: int = 1, leave_out_flat: bool = False, hosts: int = 1
) -> PackedBatch:
    """Packs complete groups (after replacement) for one update.

    Args:
      row_multiple: the rows of every micro-batch are a multiple of this (devices here that share them).
      hosts: the rows of a micro-batch are divided among so many.
      leave_out_flat: rows without a gradient are not computed. They stay in the denominators, so the loss is the
        same; only metrics that average over tokens see fewer. Not possible with a term that every token has.

    Raises:
      ConfigError: a row is longer than the largest bucket.
      ValueError: a corrected turn was not scored, or ids are not unique.
    """
    if leave_out_flat and config.loss.on_every_token:
        raise ValueError(
            "rows without an advantage have a gradient with loss.kl_beta or loss.entropy_coef: they cannot be left out"
        )
    distilled = config.loss.baseline == "opd"
    assigned = ungrouped(groups) if distilled else assign_advantages(groups, config.loss.variant)
    trajectories = [t for g in assigned.groups for t in g.valid]
    trained = [sum(len(turn.response_ids) for turn in t.turns) for t in trajectories]
    scales, denominator = aggregation(trained, config.loss, config.sampling.max_tokens)
    rows = [
        row
        for i, t in enumerate(trajectories)
        if assigned.advantages[t.id] or not leave_out_flat
        for row in trajectory_rows(t, i, assigned.advantages[t.id], scales[i], config)
    ]
    here = config.batch.model_copy(update={"rows_per_microbatch": -(-config.batch.rows_per_microbatch // hosts)})
    batches = microbatches(rows, denominator, here, row_multiple)
    for batch in batches:
        check_authors(batch)
    counts, ratios = _counts(trajectories, trained, assigned, batches)
    extremes: dict[str, float] = {}
    if config.reweight.enabled:
        turns = [turn for t in trajectories for turn in t.corrected_turns]
        for kind, weights in weight_statistics(turns, config.reweight.epsilon_cal).items():
            extremes |= {f"reweight/min_{kind}": weights.least, f"reweight/max_{kind}": weights.largest}
            ratios[f"reweight/mean_{kind}"] = weights.total, weights.count
    corrected = tuple(bool((b.author == other_author(config.loss)).any()) for b in batches)
    ids = tuple(t.id for t in trajectories)
    return PackedBatch(tuple(batches), corrected, ids, tuple(trained), assigned.has_gradient, counts, ratios, extremes)


def agree(own: PackedBatch, outlines: Sequence[Outline], config: Config) -> PackedBatch:
    """This host's part of a batch that all hosts compute together.

    Every host gets as many micro-batches of each shape as any of them has, those it lacks empty, and the denominator
    over all trajectories: the loss is that of one host with all rows.

    Args:
      own: of this host. outlines: of every host, in the order of hosts.
    """
    if len(outlines) == 1:
        return own
    trained = [count for o in outlines for count in o.trained]
    denominator = aggregation(trained, config.loss, config.sampling.max_tokens)[1]
    waiting: dict[tuple[int, int], list[TrainBatch]] = collections.defaultdict(list)
    for batch in own.microbatches:
        waiting[batch.tokens.shape].append(batch._replace(denominator=np.float32(denominator)))
    batches, corrected = [], []
    for shape in sorted({s for o in outlines for s in o.shapes}, key=lambda s: s[::-1]):
        flags = [[c for s, c in zip(o.shapes, o.corrected, strict=True) if s == shape] for o in outlines]
        for i in range(max(map(len, flags))):
            batches.append(waiting[shape].pop(0) if waiting[shape] else empty(shape, denominator))
            corrected.append(any(f[i] for f in flags if i < len(f)))
    counts = collections.Counter[str]()
    ratios: dict[str, Ratio] = {}
    extremes: dict[str, float] = {}
    for outline in outlines:
        counts.update(outline.counts)
        for name, value in outline.extremes.items():
            extremes[name] = (min if "/min_" in name else max)(value, extremes.get(name, value))
        for name, (part, whole) in outline.ratios.items():
            ratios[name] = tuple(np.add(ratios.get(name, (0.0, 0.0)), (part, whole)))
    counts["batch/microbatches"] = len(batches)  # of all hosts together
    counts["batch/buckets"] = len({b.tokens.shape[1] for b in batches})
    cells = float(sum(b.tokens.size for b in batches) * len(outlines))
    ratios["batch/padding_fraction"] = cells - counts["batch/tokens"], cells
    has_gradient = any(o.has_gradient for o in outlines)
    return dataclasses.replace(
        own,
        microbatches=tuple(batches),
        corrected=tuple(corrected),
        has_gradient=has_gradient,
        counts={name: float(n) for name, n in counts.items()},
        ratios=ratios,
        extremes=extremes,
    )


def split_groups(
    groups: Sequence[Group], minibatches: int, numbers: Sequence[int] | None = None, total: int | None = None
) -> list[list[Group]]:
    """Whole groups dealt in turn to at most `minibatches` optimizer steps; each gets some, if perhaps on other hosts.

    Args:
      numbers: of the groups among all hosts'; None counts from 0. total: how many all hosts have; None: these.
    """
    steps = min(minibatches, len(groups) if total is None else total)
    numbered = list(zip(numbers or range(len(groups)), groups, strict=True))
    return [[g for number, g in numbered if number % minibatches == i] for i in range(steps)]


def aggregation(trained: Sequence[int], loss: LossConfig, max_tokens: int) -> tuple[np.ndarray, float]:
    """What one token of each trajectory counts, [N], and the denominator over the whole batch (docs/loss.md).

    Args:
      trained: trained tokens of each trajectory, over all of its rows.
    """
    defaults = {"grpo": "sequence_mean", "gspo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "constant"}
    kind = loss.aggregation or defaults[loss.variant]
    counts = np.asarray(trained, np.float64)
    if kind == "sequence_mean":
        return 1.0 / counts, float(len(counts))
    if kind == "token_mean":
        return np.ones_like(counts), float(counts.sum())
    return np.ones_like(counts), float(loss.constant or max_tokens * len(counts))


def chains(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Runs of turns in which each prompt starts with exactly the ids of the turn before it (prompt and response)."""
    chain: list[Turn] = []
    for turn in turns:
        before = chain[-1].prompt_ids + chain[-1].response_ids if chain else ()
        if chain and turn.prompt_ids[: len(before)] != before:
            yield chain
            chain = []
        chain.append(turn)
    if chain:
        yield chain


def trajectory_rows(trajectory: Trajectory, index: int, advantage: float, scale: float, config: Config) -> list[Row]:
    """Rows of one trajectory, built from its turns' ids alone, so that no evidence can reach them."""
    return [_chain_row(chain, index, advantage, scale, config) for chain in chains(trajectory.turns)]


def _chain_row(chain: Sequence[Turn], index: int, advantage: float, scale: float, config: Config) -> Row:
    tokens: list[int] = []
    pieces: list[tuple[np.ndarray, ...]] = []
    for i, turn in enumerate(chain):
        inserted = turn.prompt_ids[len(tokens) :]
        pieces.append(_context(len(inserted), Author.ENVIRONMENT if i else Author.TEMPLATE))
        pieces.append(_response(turn, config))
        tokens += [*inserted, *turn.response_ids]
    author, behavior, sampler, weights = (np.concatenate(column) for column in zip(*pieces, strict=True))
    mask = np.isin(author, TRAINED)
    return Row(
        trajectory=index,
        tokens=np.asarray(tokens, np.int32),
        author=author,
        loss_mask=mask,
        behavior_logprobs=behavior,
        sampler_logprobs=sampler,
        weights=weights,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        loss_scale=np.where(mask, scale, 0.0).astype(np.float32),
    )


def _context(length: int, author: Author) -> tuple[np.ndarray, ...]:
    nan = np.full(length, np.nan, np.float32)
    return np.full(length, author, np.int8), nan, nan, np.ones(length, np.float32)


def _response(turn: Turn, config: Config) -> tuple[np.ndarray, ...]:
    """Author, behaviour and sampler log-probabilities and weights of a response, each [T].

    A corrected turn's behaviour is its score under the rollout prompt; its sampler's values are under the corrector's
    prompt, so they are left out. A teacher's turn has neither. A policy turn's behaviour is NaN until `with_behavior`,
    unless the engine's is used.
    """
    length = len(turn.response_ids)
    author = np.full(length, turn.author, np.int8)
    sampler = np.asarray(turn.sampler_logprobs, np.float32)
    nan, ones = np.full(length, np.nan, np.float32), np.ones(length, np.float32)
    if turn.teacher:
        return author, nan, nan, ones
    if not turn.correction:
        return author, sampler if config.loss.behavior == "engine" else nan, sampler, ones
    scored = turn.correction.rollout_logprobs, turn.correction.corrector_logprobs
    if scored[0] is None or (config.reweight.enabled and scored[1] is None):
        raise ValueError(f"turn {turn.id}: corrected, but its log-probabilities were not scored")
    weights = ones
    if config.reweight.enabled:
        weights = reasoning_shift_weights(scored[1], scored[0], config.reweight.epsilon_cal)
    return author, np.asarray(scored[0], np.float32), nan, weights


def microbatches(
    rows: Sequence[Row], denominator: float, config: BatchConfig, row_multiple: int = 1
) -> list[TrainBatch]:
    """Packs rows into micro-batches whose shapes depend on the buckets alone; unused rows and ends are padding."""
    longest = max(map(len, rows), default=0)
    if longest > max(config.buckets):
        raise ConfigError(
            f"a row of {longest} tokens is longer than the largest of batch.buckets={config.buckets}; "
            f"add a bucket of at least {longest} or lower sampling.max_context"
        )
    plan = plan_microbatches(
        list(map(len, rows)), config.buckets, config.rows_per_microbatch, row_multiple, config.packing
    )
    return [_fill(rows, lines, shape, denominator) for shape, lines in plan]


def _fill(rows: Sequence[Row], lines: list[list[int]], shape: tuple[int, int], denominator: float) -> TrainBatch:
    batch = empty(shape, denominator)
    for b, line in enumerate(lines):
        start = 0
        for segment, row in enumerate((rows[i] for i in line), start=1):
            at = b, slice(start, start + len(row))
            batch.positions[at] = np.arange(len(row))
            batch.segment_ids[at] = segment
            for field in dataclasses.fields(row):
                getattr(batch, field.name)[at] = getattr(row, field.name)
            start += len(row)
    return batch


def empty(shape: tuple[int, int], denominator: float) -> TrainBatch:
    """A micro-batch of padding alone: it adds nothing to the loss, e.g. for a host that has fewer rows."""
    nan = {
        name: np.full(shape, np.nan, np.float32) for name in ("behavior_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    zeros = {name: np.full(shape, 0, np.int32) for name in ("tokens", "positions", "segment_ids")}
    return TrainBatch(
        **zeros,
        **nan,
        loss_mask=np.full(shape, False),
        author=np.full(shape, Author.PADDING, np.int8),
        trajectory=np.full(shape, -1, np.int32),
        advantages=np.full(shape, 0, np.float32),
        weights=np.full(shape, 1, np.float32),
        loss_scale=np.full(shape, 0, np.float32),
        denominator=np.float32(denominator),
    )


def with_behavior(batch: TrainBatch, logprobs: np.ndarray) -> TrainBatch:
    """The batch with the learner's recomputed log-probabilities [B, T] as behaviour of the policy's tokens.

    Corrected tokens keep their score under the rollout prompt, which was cached before the update.
    """
    if logprobs.shape != batch.tokens.shape:
        raise ValueError(f"log-probabilities of shape {logprobs.shape} for a batch of {batch.tokens.shape}")
    policy = batch.author == Author.POLICY
    return batch._replace(behavior_logprobs=np.where(policy, logprobs, batch.behavior_logprobs).astype(np.float32))


def with_distillation(batch: TrainBatch, logprobs: np.ndarray, teacher_logprobs: np.ndarray) -> TrainBatch:
    """The batch with the advantages of on-policy distillation, from log pi_student and log pi_teacher [B, T]."""
    return batch._replace(advantages=distillation_advantages(logprobs, teacher_logprobs, batch.loss_mask))


def with_reference(batch: TrainBatch, logprobs: np.ndarray) -> TrainBatch:
    """The batch with the reference model's log-probabilities [B, T] of the trained tokens, for the KL term."""
    if logprobs.shape != batch.tokens.shape:
        raise ValueError(f"log-probabilities of shape {logprobs.shape} for a batch of {batch.tokens.shape}")
    return batch._replace(ref_logprobs=np.where(batch.loss_mask, logprobs, np.nan).astype(np.float32))


def check_authors(batch: TrainBatch) -> None:
    """Raises ValueError unless the trained tokens are the policy's, corrector's and teacher's, with what they need."""
    trained = np.isin(batch.author, TRAINED)
    corrected = batch.author == Author.CORRECTOR
    taught = batch.author == Author.TEACHER
    behavior, sampler = np.isfinite(batch.behavior_logprobs), np.isfinite(batch.sampler_logprobs)
    faults = {
        "the loss mask is not the tokens of policy, corrector and teacher": (batch.loss_mask != trained).any(),
        "a token that nobody sampled has a behaviour log-probability": behavior[~trained].any(),
        "a corrected token has no behaviour log-probability": not behavior[corrected].all(),
        "a corrected token has a sampler's log-probability": sampler[corrected].any(),
        "a teacher's token has a behaviour or sampler's log-probability": (behavior | sampler)[taught].any(),
        "a token that the corrector did not write has a weight": (batch.weights[~corrected] != 1).any(),
        "a trained token counts nothing": (batch.loss_scale[trained] <= 0).any(),
    }
    if found := [text for text, fault in faults.items() if fault]:
        raise ValueError("packed batch: " + "; ".join(found))


def _counts(
    trajectories: Sequence[Trajectory], trained: Sequence[int], assigned: GroupAdvantages, batches: Sequence[TrainBatch]
) -> tuple[dict[str, float], dict[str, Ratio]]:
    """Counts, and shares as numerator and denominator."""
    cells = sum(b.tokens.size for b in batches)
    used = sum(int((b.segment_ids > 0).sum()) for b in batches)
    counts = {
        "batch/trajectories": len(trajectories),
        "batch/microbatches": len(batches),
        "batch/buckets": len({b.tokens.shape[1] for b in batches}),
        "batch/tokens": used,
        "batch/trained_tokens": sum(trained),
        "groups/dropped": assigned.dropped,
        "groups/filtered": assigned.filtered,
        "groups/flat": assigned.flat,
    }
    taught = any(turn.teacher for t in trajectories for turn in t.turns)
    others = (Author.CORRECTOR, Author.TEACHER) if taught else (Author.CORRECTOR,)
    shares = {"batch/padding_fraction": (cells - used, cells)}
    for author in others:
        shares |= _shares(trajectories, sum(trained), author)
    return {name: float(value) for name, value in counts.items()}, shares


def _shares(trajectories: Sequence[Trajectory], trained: int, author: Author) -> dict[str, Ratio]:
    """Lambda: which part of the trained tokens, and of the trajectories, an author other than the policy wrote."""
    tokens = sum(len(turn.response_ids) for t in trajectories for turn in t.turns if turn.author is author)
    touched = sum(any(turn.author is author for turn in t.turns) for t in trajectories)
    name = author.name.lower()
    return {f"{name}/token_share": (tokens, trained), f"{name}/trajectory_share": (touched, len(trajectories))}


def other_author(loss: LossConfig) -> Author:
    """Who writes trained tokens beside the policy: LUFFY's teacher, else the corrector."""
    return Author.TEACHER if loss.baseline == "luffy" else Author.CORRECTOR
