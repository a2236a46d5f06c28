"""The text model of Qwen3.5: layers of gated delta nets (models/gated_delta.py) with full attention in between.

What differs from the dense families: three linear-attention layers to one of full attention (`layer_types`), an output
gate on attention, rotary positions on a part of each head, norms around 1 + scale. Layers are stacked by their place
in the repeating unit of `layer_types`, usually four, so that one compiled unit serves them all.

Of multimodal folders (`Qwen3_5ForConditionalGeneration`) the text model is used; other tensors pass through. Position
ids of text are equal on all three axes of its rotary sections, which is the usual rotation.

Sizes of Qwen3.5-9B: D 4096, L 32, N 16, K 4, H 256, F 12288, V 248320, 16 key and 32 value heads of 128, untied.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models import config_keys, layers, names
from models.attention import attention
from models.gated_delta import causal_conv, gated_delta_rule
from models.names import Tensor
from models.rope import Rope, rotate

FULL, LINEAR = "full_attention", "linear_attention"
MULTIMODAL_STEM = "model.language_model"


def stem(raw: Mapping[str, Any], stored: Sequence[str]) -> str:
    """Beginning of the Hugging Face names; folders of the text model alone may have the multimodal one too."""
    multimodal = any(n.startswith(f"{MULTIMODAL_STEM}.") for n in stored) if stored else "text_config" in raw
    return MULTIMODAL_STEM if multimodal else "model"


def untrained(stem: str, name: str) -> bool:
    """True for the vision tower, the multi-token head and whatever else is not the text model."""
    if stem == MULTIMODAL_STEM:
        return not name.startswith((f"{stem}.", "lm_head."))
    return name.startswith(("mtp.", "model.visual."))


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields by their Hugging Face names; see `from_hf` for those that are refused."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    layer_types: tuple[str, ...]
    rope: Rope
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02

    model_type: ClassVar[str] = "qwen3_5_text"

    def __post_init__(self):
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many}={getattr(self, many)} is not a multiple of {few}={getattr(self, few)}")
        if self.hidden_act not in layers.ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not one of {', '.join(layers.ACTIVATIONS)}")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - {FULL, LINEAR}:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries of {', '.join(sorted(set(self.layer_types)))}; "
                f"expected {self.num_hidden_layers} of {FULL} and {LINEAR}"
            )

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def unit(self) -> tuple[str, ...]:
        """The shortest run of layer types that, repeated, gives them all."""
        kinds, count = self.layer_types, self.num_hidden_layers
        size = next(n for n in range(1, count + 1) if count % n == 0 and kinds[:n] * (count // n) == kinds)
        return kinds[:size]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Config":
        """Reads config.json, of a multimodal model its text_config. Defaults of absent keys are those of transformers.

        `attention_dropout` is not read: without dropout the learner's log-probabilities are the sampler's.

        Raises ValueError that names an unsupported layer type, rope type or setting, or a missing size.
        """
        text = raw.get("text_config") or raw
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config_keys.require(text, sizes)
        if text.get("attn_output_gate") is False:
            raise ValueError("attn_output_gate=false is not supported for qwen3_5")
        others = {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "max_position_embeddings": 32768,
        }
        optional = ("hidden_act", "rms_norm_eps", "attention_bias", "initializer_range")
        interval = text.get("full_attention_interval") or 4
        kinds = text.get("layer_types") or [
            LINEAR if (i + 1) % interval else FULL for i in range(text["num_hidden_layers"])
        ]
        return cls(
            **{k: text[k] for k in sizes},
            **{k: text.get(k) or default for k, default in others.items()},
            layer_types=tuple(kinds),
            rope=Rope.from_hf({"partial_rotary_factor": 0.25, "max_position_embeddings": 32768, **text}),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            **{k: text[k] for k in optional if text.get(k) is not None},
        )

    def to_hf(self) -> dict[str, Any]:
        """Keys of the text model's config.json that `from_hf` reads back to an equal config."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rope"}
        return {
            **fields,
            "layer_types": list(self.layer_types),
            "model_type": self.model_type,
            "architectures": ["Qwen3_5ForCausalLM"],
            "rope_parameters": self.rope.to_hf(),
        }


class RMSNorm(nnx.Module):
    """(1 + scale) * x / sqrt(mean(x^2) + eps), all of it in float32."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.zeros((width,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(layers.wide(x))
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (normed * (1.0 + self.scale[...])).astype(x.dtype)


class Conv(nnx.Module):
    """Depthwise causal convolution without bias; kernel [taps, 1, channels]."""

    def __init__(self, channels: int, taps: int, *, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (taps, 1, channels)))

    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return causal_conv(x, self.kernel[...], segment_ids)


class GatedDeltaNet(nnx.Module):
    """Linear attention: convolved queries, keys and values, the gated delta rule, a gated norm."""

    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        c = config
        self.config, self.execution, self.activation = c, execution, layers.ACTIVATIONS[c.hidden_act]

        def linear(inputs: int, outputs: int) -> layers.Linear:
            return layers.Linear(inputs, outputs, std=c.initializer_range, rngs=rngs)

        channels = 2 * c.key_dim + c.value_dim
        self.in_proj_qkv = linear(c.hidden_size, channels)
        self.in_proj_z = linear(c.hidden_size, c.value_dim)
        self.in_proj_b = linear(c.hidden_size, c.linear_num_value_heads)
        self.in_proj_a = linear(c.hidden_size, c.linear_num_value_heads)
        self.conv1d = Conv(channels, c.linear_conv_kernel_dim, std=c.initializer_range, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.ones((c.linear_num_value_heads,)))
        # Kept away from 0, so that no logarithm is -inf.
        rates = jax.random.uniform(rngs.params(), (c.linear_num_value_heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rates))
        self.norm = layers.RMSNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = linear(c.value_dim, c.hidden_size)

    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        c, wide = self.config, layers.wide(x)
        mixed = self.activation(self.conv1d(self.in_proj_qkv(x), segment_ids))
        q, k, v = jnp.split(mixed, (c.key_dim, 2 * c.key_dim), axis=-1)
        q, k = (y.reshape(*x.shape[:2], c.linear_num_key_heads, c.linear_key_head_dim) for y in (q, k))
        values = (*x.shape[:2], c.linear_num_value_heads, c.linear_value_head_dim)
        steps = jax.nn.softplus(self.in_proj_a(x).astype(wide) + self.dt_bias[...])
        decays = -jnp.exp(self.A_log[...]) * steps
        rates = jax.nn.sigmoid(self.in_proj_b(x).astype(wide))
        read = (q, k, v.reshape(values), decays, rates)
        read = (self.execution.constrain_recurrence(y, c.linear_num_key_heads) for y in read)
        y = self.execution.constrain(gated_delta_rule(*read, segment_ids))
        gate = jax.nn.silu(self.in_proj_z(x).reshape(values).astype(wide))
        y = (self.norm(y).astype(wide) * gate).astype(x.dtype)
        return self.out_proj(y.reshape(*x.shape[:2], c.value_dim))


class Attention(nnx.Module):
    """Full attention with normed queries and keys and a sigmoid gate on each head's output."""

    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        c = config
        self.config, self.execution = c, execution

        def linear(inputs: int, outputs: int) -> layers.Linear:
            return layers.Linear(inputs, outputs, bias=c.attention_bias, std=c.initializer_range, rngs=rngs)

        self.q_proj = linear(c.hidden_size, c.num_attention_heads * 2 * c.head_dim)  # of each head: query, gate
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        c = self.config
        batch, tokens, _ = x.shape
        q, gate = jnp.split(self.q_proj(x).reshape(batch, tokens, c.num_attention_heads, 2 * c.head_dim), 2, axis=-1)
        k = self.k_proj(x).reshape(batch, tokens, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(batch, tokens, c.num_key_value_heads, c.head_dim)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = attention(q, k, v, segment_ids, self.execution) * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(batch, tokens, c.num_attention_heads * c.head_dim))


class DecoderLayer(nnx.Module):
    def __init__(self, config: Config, kind: str, execution: layers.Execution, rngs: nnx.Rngs):
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if kind == FULL:
            self.self_attn = Attention(c, execution, rngs)
        else:
            self.linear_attn = GatedDeltaNet(c, execution, rngs)
        self.kind = kind
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = layers.MLP(c.hidden_size, c.intermediate_size, c.hidden_act, std=c.initializer_range, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array) -> jax.Array:
        y = self.input_layernorm(x)
        if self.kind == FULL:
            x = x + self.self_attn(y, cos, sin, segment_ids)
        else:
            x = x + self.linear_attn(y, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Unit(nnx.Module):
    """The layers of one repeating unit: `layer_0`, `layer_1`, ..."""

    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        self.size = len(config.unit)
        for i, kind in enumerate(config.unit):
            setattr(self, f"layer_{i}", DecoderLayer(config, kind, execution, rngs))


def run_unit(unit: Unit, x: jax.Array, execution: layers.Execution, *args: jax.Array) -> jax.Array:
    """Applies a unit's layers one after another, each recomputed on its own in the backward pass."""
    for i in range(unit.size):
        x = layers.run_layer(getattr(unit, f"layer_{i}"), x, execution, *args)
    return x


class Model(nnx.Module):
    """Tokens to hidden states after the final norm; `lm_head` is absent where the embedding is tied."""

    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        std = config.initializer_range
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size, std=std, rngs=rngs)
        units = config.num_hidden_layers // len(config.unit)
        self.layers = layers.stack(lambda r: Unit(config, execution, r), units, rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else layers.Linear(config.hidden_size, config.vocab_size, std=std, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """tokens, positions, segment_ids [B, T] -> [B, T, D]."""
        x = self.embed_tokens(tokens, self.execution)
        cos, sin = self.config.rope.tables(positions, self.config.head_dim, segment_ids)
        cos, sin = self.execution.constrain(cos), self.execution.constrain(sin)
        x = layers.run_layers(self.layers, x, self.execution, cos, sin, segment_ids, one=run_unit)
        return self.norm(x)


def tensors(config: Config, stem: str = "model") -> tuple[Tensor, ...]:
    """The name table; Hugging Face names of everything but the head begin with `stem`."""
    c = config
    return (
        names.embedding(f"{stem}.embed_tokens", c.vocab_size, c.hidden_size),
        *(t for i in range(len(c.unit)) for t in _layer_tensors(c, stem, i)),
        names.final_norm(f"{stem}.norm", c.hidden_size),
        *([] if c.tie_word_embeddings else [names.head(c.vocab_size, c.hidden_size)]),
    )


def _layer_tensors(c: Config, stem: str, place: int) -> list[Tensor]:
    """Entries of the layers at one place of the unit."""
    d, f, size = c.hidden_size, c.intermediate_size, len(c.unit)
    numbers = tuple(range(place, c.num_hidden_layers, size))
    layer = names.LayerTable(f"{stem}.layers.{{}}", ("layers", f"layer_{place}"), numbers)
    shared = [
        *(layer.scale(m, d) for m in ("input_layernorm", "post_attention_layernorm")),
        layer.kernel("mlp.gate_proj", d, f, ("embed", "mlp")),
        layer.kernel("mlp.up_proj", d, f, ("embed", "mlp")),
        layer.kernel("mlp.down_proj", f, d, ("mlp", "embed")),
    ]
    if c.unit[place] == FULL:
        heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        projections = {
            "self_attn.q_proj": (d, 2 * heads, ("embed", "heads")),
            "self_attn.k_proj": (d, kv, ("embed", "heads")),
            "self_attn.v_proj": (d, kv, ("embed", "heads")),
            "self_attn.o_proj": (heads, d, ("heads", "embed")),
        }
        biased = projections if c.attention_bias else {}
        return [
            *(layer.kernel(m, *spec) for m, spec in projections.items()),
            *(layer.bias(m, outputs, axes[1]) for m, (_, outputs, axes) in biased.items()),
            *(layer.scale(m, c.head_dim) for m in ("self_attn.q_norm", "self_attn.k_norm")),
            *shared,
        ]
    channels, value_heads = 2 * c.key_dim + c.value_dim, c.linear_num_value_heads
    return [
        layer.kernel("linear_attn.in_proj_qkv", d, channels, ("embed", "heads")),
        layer.kernel("linear_attn.in_proj_z", d, c.value_dim, ("embed", "heads")),
        layer.kernel("linear_attn.in_proj_b", d, value_heads, ("embed", None)),
        layer.kernel("linear_attn.in_proj_a", d, value_heads, ("embed", None)),
        layer.conv("linear_attn.conv1d", c.linear_conv_kernel_dim, channels),
        layer.vector("linear_attn.dt_bias", value_heads),
        layer.vector("linear_attn.A_log", value_heads),
        layer.scale("linear_attn.norm", c.linear_value_head_dim),
        layer.kernel("linear_attn.out_proj", c.value_dim, d, ("heads", "embed")),
        *shared,
    ]
