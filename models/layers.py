"""Building blocks that every family shares: linear maps, norms, gated mlp, and how a model is executed.

Parameters are float32 masters; a block casts them to the dtype of its input. Names follow Hugging Face. Shape letters:
B rows, T tokens, N heads, K key/value heads, H head dimension, D model width, F mlp width, V vocabulary, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from models import names

ATTENTION = ("auto", "blockwise", "cudnn", "splash")
REMAT = ("none", "dots", "attention", "full", "offload")
DTYPES = ("float32", "bfloat16")

LAYER_INPUT, PRODUCT, ATTENDED = "layer_input", "product", "attended"
POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENDED),  # one by primitive does not see them
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENDED),
    "full": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}

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
      dtype: of activations and of the parameters where they are used, one of `DTYPES`; in JAX's x64 mode also
        "float64", to tell rounding from mistakes.
      attention: "auto" is cudnn on GPU, splash on TPU, blockwise elsewhere.
      remat: what the backward pass finds, the rest is recomputed: "none" all it needs; "dots" the layers' products
        with weights and attention's output (not cudnn's); "attention" each layer's input and that output; "full" each
        layer's input; "offload" the same, kept in the host's memory meanwhile.
      scan_layers: one compiled layer for all of them; False unrolls, which is faster for tiny models on CPU.
      mesh: devices (axes data, fsdp, tensor, context) that activations are constrained to; None for one device.
    """

    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    scan_layers: bool = True
    mesh: Mesh | None = None

    def __post_init__(self):
        wide = ("float64",) if jax.dtypes.canonicalize_dtype(float) == jnp.float64 else ()
        choices = (("dtype", DTYPES + wide), ("attention", ATTENTION), ("remat", REMAT))
        for field, allowed in choices:
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; choose one of {', '.join(allowed)}")

    @property
    def precision(self) -> str:
        """Of matrix products in the compute dtype."""
        return precision(self.dtype)

    def constrain(self, x: jax.Array) -> jax.Array:
        """Keeps activations [B, T, ...] split over rows and tokens (and nothing else) where the mesh divides them."""
        if self.mesh is None or not names.mesh_axes(self.mesh, "rows", x.shape[0]):
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, names.spec(self.mesh, ("rows", "tokens"), x.shape[:2]))
        )

    def context_shards(self, tokens: int) -> int:
        """Devices that share the tokens of a row of that length."""
        return math.prod(self.mesh.shape[a] for a in names.mesh_axes(self.mesh, "tokens", tokens)) if self.mesh else 1

    def constrain_recurrence(self, x: jax.Array, heads: int) -> jax.Array:
        """What a recurrence reads, [B, T, N, ...]: all tokens of some heads where `constrain` has some tokens of all.

        Args:
          heads: that have to be split alike, a divisor of N.
        """
        if self.context_shards(x.shape[1]) == 1 or not names.mesh_axes(self.mesh, "rows", x.shape[0]):
            return x
        axes, sizes = ("rows", None, "recurrent_heads"), (*x.shape[:2], heads)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, names.spec(self.mesh, axes, sizes)))

    def constrain_table(self, table: jax.Array) -> jax.Array:
        """An embedding table [V, D] as a lookup needs it: all rows, so that no look-up crosses devices."""
        if self.mesh is None:
            return table
        # Its width takes the axis that splits the vocabulary.
        split = names.spec(self.mesh, (None, "vocab"), table.shape)
        return jax.lax.with_sharding_constraint(table, NamedSharding(self.mesh, split))


def wide(x: jax.Array) -> jnp.dtype:
    """What sums over x's elements are made in: float32, or float64 where x is."""
    return jnp.promote_types(x.dtype, jnp.float32)


def precision(dtype: Any) -> str:
    """Of matrix products: float32 must not become TF32 or bfloat16 passes on an accelerator.

    A custom gradient has to name it: JAX traces it after `jax.default_matmul_precision` of the forward pass ended.
    """
    return "default" if jnp.dtype(dtype) == jnp.bfloat16 else "highest"


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
    exact = precision(x.dtype)
    d_kernel = jnp.einsum("BTI,BTO->IO", x, d_y, preferred_element_type=wide(x), precision=exact)
    return jnp.matmul(d_y, kernel.astype(x.dtype).T, precision=exact), d_kernel.astype(kernel.dtype)


project.defvjp(_project_forward, _project_backward)


class Linear(nnx.Module):
    """y = x kernel (+ bias), with kernel [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = checkpoint_name(project(x, self.kernel[...]), PRODUCT)
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
        x32 = x.astype(wide(x))
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


class MLP(nnx.Module):
    """Gated mlp: down(act(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int, activation: str, *, bias: bool = False, std: float, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = Linear(width, inner, bias=bias, std=std, rngs=rngs)
        self.up_proj = Linear(width, inner, bias=bias, std=std, rngs=rngs)
        self.down_proj = Linear(inner, width, bias=bias, std=std, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def stack(build: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, every parameter with a leading layer axis."""
    return nnx.vmap(lambda key: build(nnx.Rngs(key)))(jax.random.split(rngs.params(), count))


def run_layer(layer: nnx.Module, x: jax.Array, execution: Execution, *args: jax.Array) -> jax.Array:
    """layer(x, *args), computed again in the backward pass where `execution` says so."""
    graph, parameters = nnx.split(layer)

    def apply(x, parameters):
        return execution.constrain(nnx.merge(graph, parameters)(x, *args))

    if execution.remat == "none":
        return apply(x, parameters)

    def named(x, parameters):
        return apply(checkpoint_name(x, LAYER_INPUT), parameters)

    policy = POLICIES[execution.remat]
    return jax.checkpoint(named, policy=policy, prevent_cse=not execution.scan_layers)(x, parameters)


def run_layers(layers: nnx.Module, x: jax.Array, execution: Execution, *args: jax.Array, one=run_layer) -> jax.Array:
    """Applies the stacked `layers` (every parameter [L, ...]) to x [B, T, D], one after another.

    Args:
      layers: module whose parameters carry a leading layer axis.
      one: how one of them is applied, `run_layer` or another function with its arguments.
    """
    graph, stacked = nnx.split(layers)

    def apply(x, parameters):
        return one(nnx.merge(graph, parameters), x, execution, *args)

    if execution.scan_layers:
        return jax.lax.scan(lambda x, p: (apply(x, p), None), x, stacked)[0]
    for i in range(len(jax.tree.leaves(stacked)[0])):
        x = apply(x, jax.tree.map(lambda p, i=i: p[i], stacked))
    return x
