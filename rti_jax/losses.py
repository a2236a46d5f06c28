"""Policy-gradient losses as pure functions of per-token log-probabilities; equations and conventions in docs/loss.md.

Every array is [B, T] and a value at [b, t] belongs to the token at [b, t]: nothing here shifts. Masked positions are
replaced by selection *before* any `exp`, so NaN or +-1e4 there changes neither value nor gradient. Losses return
unreduced sums; the one division, by the denominator of the whole batch, is the learner's. Nothing but `logprobs`
receives a gradient.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

Array = jax.Array


class LossOutput(NamedTuple):
    """Sums over one micro-batch; adding those of all micro-batches gives those of the batch.

    Attributes:
      loss_sum: [], sum of loss_scale * token loss.
      sums: metric name -> [] or [2] (a `pair_sum`), to be added over micro-batches (numerators, and `<source>/tokens`
        to divide by).
      maxima: metric name -> [], to be combined by maximum.
    """

    loss_sum: Array
    sums: dict[str, Array]
    maxima: dict[str, Array]


def log_ratio(logprobs: Array, behavior_logprobs: Array, mask: Array) -> Array:
    """log rho_t = log pi_theta(y_t | h_t) - log pi_old(y_t | h_t), [B, T]; exactly 0 where the mask is False."""
    chex.assert_rank(logprobs, 2)
    chex.assert_equal_shape([logprobs, behavior_logprobs, mask])
    behavior = jax.lax.stop_gradient(jnp.where(mask, behavior_logprobs, 0.0))
    return jnp.where(mask, logprobs, 0.0) - behavior


def sequence_log_ratio(log_ratio: Array, mask: Array, segment_ids: Array) -> Array:
    """GSPO's length-normalised sequence ratio (arXiv 2507.18071, eq. 7), in log space, on every token of its segment.

    log s_i = 1/|y_i| sum_t log rho_it over the trained tokens of one segment of a row. Under `sequence_mean` its
    gradient is GSPO's: s_i A_i 1/|y_i| sum_t grad log pi(y_it). A trajectory that spans rows has one ratio per row.

    Args:
      log_ratio: [B, T], 0 where the mask is False.
      mask: [B, T] bool. segment_ids: [B, T] int, 0 is padding.
    """
    chex.assert_equal_shape([log_ratio, mask, segment_ids])

    def one_row(values, counted, segments):
        size = values.shape[0] + 1
        total = jax.ops.segment_sum(values, segments, size)
        count = jax.ops.segment_sum(counted.astype(jnp.float32), segments, size)
        return (total / jnp.maximum(count, 1.0))[segments]

    return jnp.where(mask, jax.vmap(one_row)(log_ratio, mask, segment_ids), 0.0)


def clipped_surrogate(log_ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> tuple[Array, Array]:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv 1707.06347 eq. 7; asymmetric: DAPO, 2503.14476).

    Args:
      log_ratio: [B, T]. advantages: [B, T], no gradient flows to them.

    Returns:
      The surrogate [B, T], to be maximised, and [B, T] bool: True where the clip is active, so the gradient is 0.
    """
    chex.assert_equal_shape([log_ratio, advantages])
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio)
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return surrogate, above | below


def shaped_surrogate(logprobs: Array, advantages: Array, mask: Array, gamma: float) -> Array:
    """f(p) A with f(p) = p / (p + gamma), p = pi_theta(y_t | h_t): LUFFY's off-policy term (arXiv 2504.14945).

    The teacher's own probability counts as one, so the ratio is p itself. f raises the gradient of what the policy
    finds unlikely: d(f A) / d log p = A gamma p / (p + gamma)^2, largest at p = gamma. Nothing is clipped.

    Args:
      logprobs: [B, T]. advantages: [B, T], no gradient flows to them. mask: [B, T] bool, the teacher's tokens.

    Returns:
      [B, T], to be maximised; 0 where the mask is False.
    """
    chex.assert_equal_shape([logprobs, advantages, mask])
    probability = jnp.exp(jnp.where(mask, logprobs, 0.0))
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
    return probability / (probability + gamma) * advantages


def k3_kl(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """KL(pi_theta || pi_ref) per token by the k3 estimator (GRPO, arXiv 2402.03300 eq. 4), [B, T]; >= 0.

    exp(log pi_ref - log pi_theta) - (log pi_ref - log pi_theta) - 1; 0 where the mask is False.
    """
    difference = -log_ratio(logprobs, ref_logprobs, mask)
    return jnp.expm1(difference) - difference


def truncated_importance(behavior_logprobs: Array, sampler_logprobs: Array, mask: Array, cap: float) -> Array:
    """min(pi_old / pi_sampler, cap): corrects for an engine that samples from slightly other numbers, [B, T].

    The learner's value over the engine's, for the same weights version (truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl). 1 where the mask is False; constant for the gradient.
    """
    gap = log_ratio(behavior_logprobs, sampler_logprobs, mask)
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(gap, jnp.log(cap))))


def policy_loss(
    logprobs: Array,
    batch: Any,
    corrected: Array,
    *,
    clip_low: float,
    clip_high: float,
    kl_beta: float = 0.0,
    sequence_ratio: bool = False,
    mismatch_clip: float | None = None,
    entropy: Array | None = None,
    entropy_coef: float = 0.0,
    teacher: Array | None = None,
    shaping: float = 0.1,
) -> LossOutput:
    """The objective, negated: sum of loss_scale (-w min(rho A, clip(rho) A) + beta KL - entropy_coef H).

    Args:
      logprobs: [B, T] log pi_theta of `tokens`; the only input with a gradient.
      batch: a record with the arrays loss_mask, behavior_logprobs, ref_logprobs, sampler_logprobs, advantages,
        weights, loss_scale and segment_ids, all [B, T].
      corrected: [B, T] bool, tokens that the corrector wrote: they have no sampler value under the rollout prompt, so
        they take no part in the mismatch and its correction.
      sequence_ratio: GSPO's ratio instead of one per token.
      mismatch_clip: cap of the truncated importance weight of policy tokens; None is off.
      entropy: [B, T], for the metrics, and for the bonus if entropy_coef is above 0 (then with a gradient).
      teacher: [B, T] bool, tokens of a teacher (LUFFY): their term is `shaped_surrogate` with gamma = `shaping`, and
        they have no ratio. None where there is no teacher.
    """
    chex.assert_equal_shape([logprobs, corrected, batch.loss_mask, batch.weights, batch.loss_scale])
    mask = batch.loss_mask
    own = mask if teacher is None else mask & ~teacher
    token_log_ratio = log_ratio(logprobs, batch.behavior_logprobs, own)
    used = sequence_log_ratio(token_log_ratio, mask, batch.segment_ids) if sequence_ratio else token_log_ratio
    advantages = jnp.where(mask, batch.advantages, 0.0)
    surrogate, clipped = clipped_surrogate(used, advantages, clip_low, clip_high)
    if teacher is not None:
        surrogate = jnp.where(teacher, shaped_surrogate(logprobs, advantages, mask & teacher, shaping), surrogate)
    emphasis = jax.lax.stop_gradient(jnp.where(mask, batch.weights, 0.0))
    truncated = {}
    if mismatch_clip is not None:
        sampled = own & ~corrected
        emphasis *= truncated_importance(batch.behavior_logprobs, batch.sampler_logprobs, sampled, mismatch_clip)
        beyond = log_ratio(batch.behavior_logprobs, batch.sampler_logprobs, sampled) > jnp.log(mismatch_clip)
        truncated = {"policy/truncated": jnp.sum(beyond, dtype=jnp.float32)}
    kl = k3_kl(logprobs, batch.ref_logprobs, mask) if kl_beta else jnp.zeros_like(logprobs)
    scale = jax.lax.stop_gradient(jnp.where(mask, batch.loss_scale, 0.0))
    policy_terms, kl_terms = -scale * emphasis * surrogate, scale * kl
    terms = policy_terms + kl_beta * kl_terms
    per_token = {
        "clip_fraction": clipped,
        "ratio": jnp.exp(used),
        "approx_kl": jnp.expm1(token_log_ratio) - token_log_ratio,
        "weight": emphasis,
    }
    losses = {"loss/total": terms, "loss/policy": policy_terms, "loss/kl": kl_terms}
    if entropy is not None:
        per_token["entropy"] = entropy
    if entropy_coef:
        losses["loss/entropy"] = scale * jnp.where(mask, entropy, 0.0)
        terms = losses["loss/total"] = terms - entropy_coef * losses["loss/entropy"]
    sums = {name: pair_sum(value) for name, value in losses.items()}
    sums |= sums_by_source({"policy": own & ~corrected, "corrector": mask & corrected}, per_token)
    if teacher is not None:
        probability = jnp.exp(jnp.where(mask, logprobs, 0.0))
        sums |= sums_by_source({"teacher": mask & teacher}, {"probability": probability})
    mismatch_sums, maxima = mismatch(batch, own & ~corrected)
    return LossOutput(jnp.sum(terms), jax.lax.stop_gradient(sums | mismatch_sums | truncated), maxima)


def pair_sum(values: Array) -> Array:
    """Sum of [B, T] as an unevaluated pair [2], high and low part, to about 48 bits (TwoSum in a tree: Knuth, TAOCP 2).

    Advantages of a group sum to zero, so a loss is what is left after terms of size one cancel: in float32 alone, its
    leading digits would be those of the order of summation, and so of the mesh.
    """
    high, low = jax.lax.stop_gradient(values), jnp.zeros_like(values)
    for axis in (1, 0):  # rows first: they are whole on their device
        while (size := high.shape[axis]) > 1:
            widths = [(0, size % 2 if i == axis else 0) for i in range(2)]
            (a, b), (c, d) = (jnp.split(jnp.pad(x, widths), 2, axis) for x in (high, low))
            high = a + b
            part = high - a
            low = c + d + ((a - (high - part)) + (b - part))
    return jnp.stack([high.sum(), low.sum()])


def sums_by_source(sources: dict[str, Array], per_token: dict[str, Array]) -> dict[str, Array]:
    """Sums of each [B, T] value over the tokens [B, T] bool of each source, and how many tokens those are."""
    sums = {}
    for source, chosen in sources.items():
        sums[f"{source}/tokens"] = jnp.sum(chosen, dtype=jnp.float32)
        for name, value in per_token.items():
            sums[f"{source}/{name}"] = jnp.sum(jnp.where(chosen, value, 0.0), dtype=jnp.float32)
    return sums


def mismatch(batch: Any, sampled: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Engine versus learner on the tokens that the policy sampled: sums and maxima of |log pi_old - log pi_sampler|."""
    gap = jnp.abs(log_ratio(batch.behavior_logprobs, batch.sampler_logprobs, sampled))
    gap = jax.lax.stop_gradient(gap)
    return {"mismatch/abs": jnp.sum(gap)}, {"mismatch/max": jnp.max(gap)}
