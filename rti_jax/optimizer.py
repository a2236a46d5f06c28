"""Optimizers by config: AdamW, or Muon for matrices with Adam (Nesterov, no decay) for the rest; schedules; decay."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from rti_jax.config import Config, OptimizerConfig

# By path, never by the number of dimensions: the scales of stacked layers are [L, D] and look like matrices.
UNDECAYED = re.compile(r"norm|bias|A_log")
# Lookups, not maps between spaces; the head shares the embedding's scale where it is tied.
NO_MATRIX = re.compile(r"embed|lm_head|conv")


def make_optimizer(config: OptimizerConfig, params: Any, total_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW or Muon with decoupled weight decay.

    Args:
      params: nested dict of arrays or shapes; only paths and ranks are read.
      total_steps: optimizer steps over which the schedule runs.
    """
    lr = learning_rate(config, total_steps)
    if config.name == "adamw":
        decayed = jax.tree.map_with_path(lambda path, _: not UNDECAYED.search(_name(path)), params)
        inner = optax.adamw(lr, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decayed)
    else:
        inner = optax.contrib.muon(
            learning_rate(config, total_steps, peak=config.muon_lr),
            weight_decay=config.weight_decay,
            adam_learning_rate=lr,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=jax.tree.map_with_path(_matrix_axes, params),
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), inner)


def total_updates(config: Config) -> int:
    """Optimizer steps of a run if none is skipped: what a schedule runs over."""
    return config.steps * (config.optimizer.minibatches + bool(config.rti.replay.rows))


def learning_rate(config: OptimizerConfig, total_steps: int, peak: float | None = None) -> optax.Schedule:
    """Step (from 0) -> rate: linear warm-up that starts above 0, then constant, or to 0 at `total_steps`.

    Args:
      peak: rate after the warm-up, by default `optimizer.lr`.
    """
    peak = config.lr if peak is None else peak
    warmup, decay_steps = max(1, config.warmup_steps), max(1, total_steps - config.warmup_steps)

    def schedule(step):
        warm = jnp.minimum(1.0, (step + 1) / warmup)
        progress = jnp.clip((step - config.warmup_steps) / decay_steps, 0.0, 1.0)
        shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress))}
        return peak * warm * shape[config.schedule]

    return schedule


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _matrix_axes(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output axis of a kernel [in, out], or of a stack of them [L, in, out]; None for Adam's parameters.

    A stack is orthogonalised layer by layer.
    """
    name = _name(path)
    stacked = int("layers" in name.split("/"))
    if leaf.ndim != 2 + stacked or UNDECAYED.search(name) or NO_MATRIX.search(name):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=stacked, output_axis=stacked + 1)
