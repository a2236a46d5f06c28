"""Building blocks that every family shares: linear maps, norms, rotary positions, and how a model is executed.

Parameters are float32 masters; a block casts them to the dtype of its input. Names follow Hugging Face. Shape letters:
B rows, T tokens, N heads, K key/value heads, H head dimension, D model width, F mlp width, V vocabulary, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ATTENTION = ("auto", "blockwise", "cudnn", "splash")
REMAT = ("none", "full")
BATCH_AXES = ("data", "fsdp")  # mesh axes that split the rows

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is computed, beside its mathematics.

    Attributes:
      dtype: of activations and of the parameters where they are used; "float32" or "bfloat16".
      attention: "auto" is cudnn on GPU, splash on TPU, blockwise elsewhere.
      remat: "full" recomputes each layer in the backward pass.
      scan_layers: one compiled layer for all of them; False unrolls, which is faster for tiny models on CPU.
      mesh: devices (axes data, fsdp, tensor) that activations are constrained to; None for one device.
    """

    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    scan_layers: bool = True
    mesh: Mesh | None = None

    def __post_init__(self):
        choices = (("dtype", ("float32", "bfloat16")), ("attention", ATTENTION), ("remat", REMAT))
        for field, allowed in choices:
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; choose one of {', '.join(allowed)}")

    @property
    def precision(self) -> str:
        """Matrix product precision: float32 must not become TF32 or bfloat16 passes on an accelerator."""
        return "highest" if self.dtype == "float32" else "default"

    def constrain(self, x: jax.Array) -> jax.Array:
        """Keeps activations [B, ...] split over rows (and nothing else) where the mesh divides them."""
        if self.mesh is None:
            return x
        axes = tuple(a for a in BATCH_AXES if a in self.mesh.axis_names)
        shards = int(np.prod([self.mesh.shape[a] for a in axes]))
        if x.shape[0] % shards:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(axes)))

    def constrain_table(self, table: jax.Array) -> jax.Array:
        """An embedding table [V, D] as a lookup needs it: all rows, so that no look-up crosses devices."""
        if self.mesh is None:
            return table
        divides = table.shape[1] % self.mesh.shape.get("tensor", 1) == 0
        axis = "tensor" if "tensor" in self.mesh.axis_names and divides else None
        return jax.lax.with_sharding_constraint(table, NamedSharding(self.mesh, PartitionSpec(None, axis)))


@jax.custom_vjp
def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, T, in] times kernel [in, out], in x's dtype; the kernel's gradient is accumulated in float32.

    The gradient is written as x^T dy because the order that automatic differentiation chooses, (dy^T x)^T, takes twice
    as long on CPU.
    """
    return x @ kernel.astype(x.dtype)


def _project_forward(x, kernel):
    return project(x, kernel), (x, kernel)


def _project_backward(saved, d_y):
    x, kernel = saved
    d_kernel = jnp.einsum("BTI,BTO->IO", x, d_y, preferred_element_type=jnp.float32)
    return d_y @ kernel.astype(x.dtype).T, d_kernel.astype(kernel.dtype)


project.defvjp(_project_forward, _project_backward)


class Linear(nnx.Module):
    """y = x kernel (+ bias), with kernel [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Embedding(nnx.Module):
    """Rows of a table [V, D]."""

    def __init__(self, vocabulary: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (vocabulary, width)))

    def __call__(self, tokens: jax.Array, execution: Execution) -> jax.Array:
        """tokens [B, T] -> [B, T, D] in the compute dtype."""
        table = execution.constrain_table(self.embedding[...])
        return execution.constrain(table[tokens].astype(execution.dtype))


class RMSNorm(nnx.Module):
    """scale * x / sqrt(mean(x^2) + eps), statistics in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones((width,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al., arXiv 2104.09864) and how they are stretched beyond the trained length.

    `options` holds the keys that `kind` needs, as Hugging Face names them: linear `factor`; yarn `factor`,
    `original_max_position_embeddings` and optionally `beta_fast`, `beta_slow`, `mscale`, `mscale_all_dim`,
    `attention_factor`, `truncate`; llama3 `factor`, `low_freq_factor`, `high_freq_factor`,
    `original_max_position_embeddings`.
    """

    theta: float
    kind: str = "default"
    partial: float = 1.0  # share of the head dimension that is rotated
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Rope":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises ValueError that names a rope type outside default, linear, yarn and llama3, or a missing key.
        """
        keys = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = keys.pop("rope_type", None) or keys.pop("type", None) or "default"
        keys.pop("type", None)
        theta = keys.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        partial = keys.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if kind not in ROPE_KINDS:
            raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
        if kind in ("yarn", "llama3"):
            keys.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        if missing := [k for k in _ROPE_REQUIRED[kind] if keys.get(k) is None]:
            raise ValueError(f"rope type {kind!r} needs {', '.join(missing)} in rope_parameters")
        return cls(float(theta), kind, float(partial), tuple(sorted((k, _freeze(v)) for k, v in keys.items())))

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` that `from_hf` reads back."""
        partial = {} if self.partial == 1.0 else {"partial_rotary_factor": self.partial}
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options}
        return {"rope_type": self.kind, "rope_theta": self.theta, **partial, **options}

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies [rotated / 2] and the factor that scales cosine and sine."""
        rotated = int(head_dim * self.partial)
        inverse = self.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        return ROPE_KINDS[self.kind](self, inverse, rotated)

    def tables(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine [B, T, rotated / 2] of float32 angles at `positions` [B, T]."""
        inverse, factor = self.frequencies(head_dim)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _default(rope: Rope, inverse: np.ndarray, rotated: int) -> tuple[np.ndarray, float]:
    return inverse, 1.0


def _linear(rope: Rope, inverse: np.ndarray, rotated: int) -> tuple[np.ndarray, float]:
    return inverse / dict(rope.options)["factor"], 1.0


def _yarn(rope: Rope, inverse: np.ndarray, rotated: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., arXiv 2309.00071): slow dimensions are interpolated, fast ones kept, a ramp in between."""
    o = dict(rope.options)
    factor, trained = o["factor"], o["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return rotated * np.log(trained / (rotations * 2 * np.pi)) / (2 * np.log(rope.theta))

    low, high = dimension(o.get("beta_fast") or 32.0), dimension(o.get("beta_slow") or 1.0)
    if o.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high = high if low != high else high + 0.001
    kept = 1 - np.clip((np.arange(rotated // 2) - low) / (high - low), 0, 1)
    return inverse / factor * (1 - kept) + inverse * kept, _yarn_attention_factor(o)


def _yarn_attention_factor(options: Mapping[str, Any]) -> float:
    def mscale(m: float = 1.0) -> float:
        return 1.0 if options["factor"] <= 1 else 0.1 * m * float(np.log(options["factor"])) + 1.0

    if options.get("attention_factor") is not None:
        return options["attention_factor"]
    if options.get("mscale") and options.get("mscale_all_dim"):
        return mscale(options["mscale"]) / mscale(options["mscale_all_dim"])
    return mscale()


def _llama3(rope: Rope, inverse: np.ndarray, rotated: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, smooth in between."""
    o = dict(rope.options)
    turns = o["original_max_position_embeddings"] * inverse / (2 * np.pi)
    kept = np.clip((turns - o["low_freq_factor"]) / (o["high_freq_factor"] - o["low_freq_factor"]), 0, 1)
    return inverse / o["factor"] * (1 - kept) + inverse * kept, 1.0


ROPE_KINDS = {"default": _default, "linear": _linear, "yarn": _yarn, "llama3": _llama3}
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the first 2 * cos.shape[-1] dimensions of each head of x [B, T, N, H]."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def stack(build: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, every parameter with a leading layer axis."""
    return nnx.vmap(lambda key: build(nnx.Rngs(key)))(jax.random.split(rngs.params(), count))


def run_layers(layers: nnx.Module, x: jax.Array, execution: Execution, *args: jax.Array) -> jax.Array:
    """Applies the stacked `layers` (every parameter [L, ...]) to x [B, T, D], one after another.

    Args:
      layers: module whose parameters carry a leading layer axis; called as layer(x, *args).
    """
    graph, stacked = nnx.split(layers)

    def apply(x, parameters):
        return execution.constrain(nnx.merge(graph, parameters)(x, *args))

    if execution.remat == "full":
        apply = jax.checkpoint(apply, prevent_cse=not execution.scan_layers)
    if execution.scan_layers:
        return jax.lax.scan(lambda x, p: (apply(x, p), None), x, stacked)[0]
    for i in range(len(jax.tree.leaves(stacked)[0])):
        x = apply(x, jax.tree.map(lambda p, i=i: p[i], stacked))
    return x
