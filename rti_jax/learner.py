"""The learner: state and micro-batches in, new state and metrics out, compiled once per shape.

    accumulate(params, gradients, micro-batch)   sums of gradients and metrics; one program per bucket
    apply(state, gradients, denominator)         the one division, clip, optimizer; one program

Every array lives on a mesh: rows are split over its axes data and fsdp, and inside the model their tokens over context
(placement.py); parameters and optimizer state as the model was born. A model is a pair of functions, `hidden` and
`head`. Weights are 1 wherever no correction was admitted, so such an update runs the program of plain GRPO.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rti_jax.batching import other_author
from rti_jax.config import Config
from rti_jax.logprobs import token_logprobs
from rti_jax.losses import LossOutput, log_ratio, policy_loss
from rti_jax.optimizer import learning_rate, make_optimizer, total_updates
from rti_jax.placement import ROW_AXES, row_spec, shards
from rti_jax.types import Author, TrainBatch

__all__ = ["TrainState", "init_state", "make_logprobs_step", "make_optimizer", "make_update_step", "row_multiple"]


class TrainState(NamedTuple):
    """Everything that an update changes.

    Attributes:
      params: nested dict of float32 master weights. opt_state: optax's, float32 moments.
      step: int32 [], optimizer steps that were applied (a skipped one does not count).
    """

    params: Any
    opt_state: Any
    step: jax.Array


class Model(Protocol):
    """What the learner knows of a model."""

    def hidden(self, params: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, D], after the final norm."""

    def head(self, params: Any) -> jax.Array:
        """[D, V]."""


def row_multiple(mesh: Mesh, hosts: int = 1) -> int:
    """Rows of a micro-batch must be a multiple of this: the devices that share them, of one of `hosts`."""
    return shards(mesh, ROW_AXES) // hosts


def init_state(
    params: Any, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """State before the first update; moments are sharded as their parameters, everything else is replicated.

    Args:
      offload: moments are in the host's memory (JAX's memory kind pinned_host), on the device during an update alone.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimizer, mesh, offload=offload))
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), shardings.step))


def abstract_state(
    params: Any, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh, *, offload: bool = False
) -> TrainState:
    """Shapes, dtypes and shardings of the state before the first update, from those of the parameters."""
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(optimizer.init, params)
    shardings = _moment_shardings(shapes, params, replicated, "pinned_host" if offload else None)
    opt_state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))


def _moment_shardings(shapes: Any, params: Any, other: NamedSharding, memory: str | None) -> Any:
    """Sharding of each leaf of an optimizer state: its parameter's where its path ends in a parameter's path.

    Args:
      memory: kind of memory of these leaves; None: their parameter's.
    """
    of_path = {path: leaf for path, leaf in jax.tree.leaves_with_path(params)}

    def sharding(path, leaf):
        owner = next((of_path[path[i:]] for i in range(len(path)) if path[i:] in of_path), None)
        if owner is None or owner.shape != leaf.shape:
            return other
        return owner.sharding.with_memory_kind(memory) if memory else owner.sharding

    return jax.tree.map_with_path(sharding, shapes)


def make_logprobs_step(model: Model, config: Config, mesh: Mesh) -> Callable[[Any, TrainBatch], np.ndarray]:
    """(params, micro-batch) -> log pi of its tokens [B, T], by the forward pass that the update differentiates."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, row_spec(mesh)))
    def logprobs(params, batch):
        return _forward(model, config, mesh, params, batch, entropy=False, entropy_gradient=False)[0]

    def step(params, batch):
        values = logprobs(params, put(batch, mesh))
        return np.asarray(multihost_utils.global_array_to_host_local_array(values, mesh, row_spec(mesh)))

    return step


def make_update_step(
    model: Model,
    config: Config,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    *,
    on_policy: bool = False,
    norms_by_source: bool = False,
) -> "Update":
    """update(state, micro-batches) -> (state, metrics); the state that goes in is donated.

    Args:
      optimizer: as made by `make_optimizer`.
      on_policy: the first update after the rollouts: this very forward pass is the behaviour of every trained token
        (ratio exactly 1), so it need not be recomputed beforehand. `corrector/scorer_gap` says how far the cached
        scores of corrected tokens are from it.
      norms_by_source: also the gradient norms of the policy's tokens and of the corrector's (or a teacher's), by a
        second backward pass over the micro-batches that hold such; without them there is nothing to split, and no cost.
    """
    return Update(model, config, mesh, optimizer, on_policy, norms_by_source)


class Update:
    """A compiled update. `traces` counts compilations by function, so that a test can see that shapes are stable."""

    def __init__(self, model, config, mesh, optimizer, on_policy, norms_by_source):
        self.traces: collections.Counter[str] = collections.Counter()
        self._model, self._config, self._mesh, self._optimizer = model, config, mesh, optimizer
        self._on_policy, self._norms_by_source = on_policy, norms_by_source
        self._other = other_author(config.loss)
        self._rate = learning_rate(config.optimizer, total_updates(config))
        self._compiled: dict[str, Callable] = {}
        self._moments: Any = None  # shardings of an offloaded optimizer state while it is on the device

    def __call__(
        self, state: TrainState, microbatches: Sequence[TrainBatch], corrected: Sequence[bool] | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on micro-batches that share a denominator.

        Args:
          microbatches: this host's rows of each; every host gives as many, of the same shapes.
          corrected: of each micro-batch, whether it holds tokens of another author than the policy (the corrector's,
            or LUFFY's teacher's) on any host; None: as it is here.

        A gradient that is not finite leaves the state as it was; `optimizer/skipped` says so.

        Raises:
          ValueError: no micro-batches, or different denominators.
        """
        denominators = {float(b.denominator) for b in microbatches}
        if len(denominators) != 1:
            raise ValueError(f"an update needs micro-batches of one denominator, got {sorted(denominators)}")
        denominator = denominators.pop()
        if not self._compiled:
            self._compile(state)
        if corrected is None:
            corrected = [bool((b.author == self._other).any()) for b in microbatches]
        gradients = self._compiled["zeros"](state.params)
        outputs, part = [], None
        for batch, split in zip(microbatches, corrected, strict=True):
            arrays = put(batch, self._mesh)
            if self._norms_by_source and split:
                part = self._compiled["zeros"](state.params) if part is None else part
                part = self._compiled["corrected"](state.params, part, arrays)
            gradients, output = self._compiled["accumulate"](state.params, gradients, arrays)
            outputs.append(output)
        norms = self._compiled["norms"](gradients, part) if part is not None else {}
        rate = float(self._rate(int(state.step)))
        state, applied = self._compiled["apply"](state, gradients, np.float32(denominator))
        return state, self._metrics(*jax.device_get((outputs, norms, applied)), denominator, rate)

    @property
    def programs(self) -> int:
        """Programs that this process has compiled for updates so far: one more with each new shape of a micro-batch."""
        return sum(function._cache_size() for function in self._compiled.values())

    def compiled_programs(self, name: str) -> int:
        """How many programs a function ("accumulate", "apply") was compiled to: one for each shape of a micro-batch."""
        return self._compiled[name]._cache_size()

    def lower(self, state: TrainState, batch: TrainBatch) -> dict[str, jax.stages.Lowered]:
        """The two programs of an update, "accumulate" and "apply", from shapes and shardings alone.

        Args:
          state: as `abstract_state` gives it. batch: arrays or their shapes on the mesh, `denominator` None.
        """
        if not self._compiled:
            self._compile(state)
        return {
            "accumulate": self._compiled["accumulate"].lower(state.params, state.params, batch),
            "apply": self._compiled["apply"].lower(state, state.params, jax.ShapeDtypeStruct((), jnp.float32)),
        }

    def _compile(self, state: TrainState) -> None:
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if any(s.memory_kind == "pinned_host" for s in jax.tree.leaves(shardings.opt_state)):
            self._moments = jax.tree.map(lambda s: s.with_memory_kind("device"), shardings.opt_state)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        norms = lambda total, part: {  # noqa: E731
            self._other.name.lower(): optax.global_norm(part),
            "policy": optax.global_norm(jax.tree.map(jnp.subtract, total, part)),
        }
        self._compiled = {
            "zeros": jax.jit(zeros, out_shardings=shardings.params),
            "accumulate": jax.jit(self._accumulate, donate_argnums=1, out_shardings=(shardings.params, replicated)),
            "corrected": jax.jit(self._accumulate_corrected, donate_argnums=1, out_shardings=shardings.params),
            "norms": jax.jit(norms, out_shardings=replicated),
            "apply": jax.jit(self._apply, donate_argnums=0, out_shardings=(shardings, replicated)),
        }

    def _accumulate(self, params: Any, gradients: Any, batch: TrainBatch) -> tuple[Any, LossOutput]:
        self.traces["accumulate"] += 1
        (_, output), new = jax.value_and_grad(self._objective, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, gradients, new), output

    def _accumulate_corrected(self, params: Any, gradients: Any, batch: TrainBatch) -> Any:
        self.traces["corrected"] += 1
        only = jnp.where(batch.author == self._other, batch.loss_scale, 0.0)
        new = jax.grad(self._objective, has_aux=True)(params, batch._replace(loss_scale=only))[0]
        return jax.tree.map(jnp.add, gradients, new)

    def _objective(self, params: Any, batch: TrainBatch) -> tuple[jax.Array, LossOutput]:
        loss = self._config.loss
        bonus = loss.entropy_coef > 0
        logprobs, entropy = _forward(self._model, self._config, self._mesh, params, batch, True, bonus)
        cached = batch.behavior_logprobs
        if self._on_policy:
            batch = batch._replace(behavior_logprobs=jax.lax.stop_gradient(logprobs))
        output = policy_loss(
            logprobs,
            batch,
            batch.author == Author.CORRECTOR,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            kl_beta=loss.kl_beta,
            sequence_ratio=loss.variant == "gspo",
            mismatch_clip=loss.mismatch_clip,
            entropy=entropy,
            entropy_coef=loss.entropy_coef,
            teacher=batch.author == Author.TEACHER if loss.baseline == "luffy" else None,
            shaping=loss.shaping,
        )
        if self._on_policy:
            corrected = batch.loss_mask & (batch.author == Author.CORRECTOR)
            gap = jnp.max(jnp.abs(log_ratio(batch.behavior_logprobs, cached, corrected)))
            output = output._replace(maxima=output.maxima | {"corrector/scorer_gap": gap})
        return output.loss_sum, output

    def _apply(self, state: TrainState, gradients: Any, denominator: jax.Array) -> tuple[TrainState, dict]:
        self.traces["apply"] += 1
        if self._moments is not None:
            state = state._replace(opt_state=jax.device_put(state.opt_state, self._moments))
        gradients = jax.tree.map(lambda g: g / denominator, gradients)
        norm = optax.global_norm(gradients)
        finite = jnp.isfinite(norm)
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return kept, {"grad_norm": norm, "skipped": ~finite, "update_norm": optax.global_norm(updates)}

    def _metrics(self, outputs, norms, applied, denominator: float, rate: float) -> dict[str, float]:
        metrics = {f"optimizer/{name}": float(value) for name, value in applied.items()}
        metrics |= {f"{source}/grad_norm": float(norm) / denominator for source, norm in norms.items()}
        return metrics | {"optimizer/lr": rate} | reduce_metrics(outputs, denominator)


def reduce_metrics(outputs: Sequence[LossOutput], denominator: float) -> dict[str, float]:
    """Metrics of an update from the sums of its micro-batches; a mean over no tokens is absent.

    Args:
      outputs: values on the host.
    """
    sums: dict[str, float] = collections.defaultdict(float)
    for output in outputs:
        for name, value in output.sums.items():
            sums[name] += float(np.asarray(value, np.float64).sum())
    metrics = {}
    for name, value in sums.items():
        source = "policy" if name.startswith("mismatch/") else name.split("/")[0]
        if source == "loss":
            metrics[name] = value / denominator
        elif name.endswith("/tokens"):
            metrics[name] = value
        elif count := sums[f"{source}/tokens"]:
            metrics[name] = value / count
    for name in outputs[0].maxima:
        metrics[name] = max(float(o.maxima[name]) for o in outputs)
    return metrics


def abstract_batch(rows: int, length: int, mesh: Mesh | AbstractMesh) -> TrainBatch:
    """Shapes, dtypes and shardings of a micro-batch as `put` places it."""
    sharding = NamedSharding(mesh, row_spec(mesh))
    dtypes = dict.fromkeys(("tokens", "positions", "segment_ids", "trajectory"), jnp.int32)
    dtypes |= {"loss_mask": jnp.bool_, "author": jnp.int8, "denominator": None}
    return TrainBatch(
        **{
            name: dtype and jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)
            for name in TrainBatch._fields
            for dtype in (dtypes.get(name, jnp.float32),)
        }
    )


def put(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """The arrays of a micro-batch on the mesh, rows split over data and fsdp; each process gives its own rows."""
    sharding = NamedSharding(mesh, row_spec(mesh))
    arrays = {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch._asdict().items() if np.ndim(v)}
    return TrainBatch(**arrays, denominator=None)


def _forward(
    model: Model, config: Config, mesh: Mesh, params: Any, batch: TrainBatch, entropy: bool, entropy_gradient: bool
):
    hidden = model.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
    return token_logprobs(
        hidden,
        model.head(params),
        batch.tokens,
        batch.segment_ids,
        config.sampling.temperature,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        mesh=mesh,
    )
