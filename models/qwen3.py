"""Qwen3 (Yang et al., arXiv 2505.09388): grouped-query attention with normed queries and keys, gated mlp, RMSNorm.

Sizes of Qwen3-8B: D 4096, L 36, N 32, K 8, H 128, F 12288, V 151936, untied, rope theta 1e6.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from models import layers
from models.attention import attention
from models.names import Tensor

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
UNTRAINED: tuple[str, ...] = ()  # patterns of checkpoint tensors that the model does not use


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
    rope: layers.Rope
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.hidden_act not in layers.ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not one of {', '.join(layers.ACTIVATIONS)}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Config":
        """Reads config.json. Defaults of absent keys are those of transformers' Qwen3Config.

        `attention_dropout` is not read: without dropout the learner's log-probabilities are the sampler's.

        Raises ValueError that names sliding windows, an unsupported rope type, or a missing size.
        """
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [k for k in sizes if raw.get(k) is None]:
            raise ValueError(f"config.json has no {', '.join(missing)}")
        sliding = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
        if sliding or any(t != "full_attention" for t in raw.get("layer_types") or ()):
            raise ValueError("sliding-window attention (use_sliding_window, layer_types) is not supported for qwen3")
        optional = ("hidden_act", "rms_norm_eps", "attention_bias", "tie_word_embeddings", "initializer_range")
        return cls(
            **{k: raw[k] for k in sizes},
            num_key_value_heads=raw.get("num_key_value_heads", 32) or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or 128,
            rope=layers.Rope.from_hf(raw),
            max_position_embeddings=raw.get("max_position_embeddings") or 32768,
            **{k: raw[k] for k in optional if raw.get(k) is not None},
        )

    def to_hf(self) -> dict[str, Any]:
        """Keys of config.json that `from_hf` reads back to an equal config."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rope"}
        return {
            **fields,
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURE],
            "rope_parameters": self.rope.to_hf(),
            "layer_types": ["full_attention"] * self.num_hidden_layers,
        }


class Attention(nnx.Module):
    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.execution = execution

        def linear(inputs: int, outputs: int) -> layers.Linear:
            return layers.Linear(inputs, outputs, bias=c.attention_bias, std=c.initializer_range, rngs=rngs)

        self.q_proj = linear(c.hidden_size, self.heads * self.head_dim)
        self.k_proj = linear(c.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = linear(c.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, c.hidden_size)
        self.q_norm = layers.RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = layers.RMSNorm(self.head_dim, c.rms_norm_eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).reshape(batch, tokens, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        q, k = layers.rotate(self.q_norm(q), cos, sin), layers.rotate(self.k_norm(k), cos, sin)
        y = attention(q, k, v, segment_ids, self.execution)
        return self.o_proj(y.reshape(batch, tokens, self.heads * self.head_dim))


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        self.activation = layers.ACTIVATIONS[c.hidden_act]
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size, std=c.initializer_range, rngs=rngs)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size, std=c.initializer_range, rngs=rngs)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size, std=c.initializer_range, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, execution, rngs)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nnx.Module):
    """Tokens to hidden states after the final norm; `lm_head` is absent where the embedding is tied."""

    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        std = config.initializer_range
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size, std=std, rngs=rngs)
        self.layers = layers.stack(lambda r: DecoderLayer(config, execution, r), config.num_hidden_layers, rngs)
        self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else layers.Linear(config.hidden_size, config.vocab_size, std=std, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """tokens, positions, segment_ids [B, T] -> [B, T, D]."""
        x = self.embed_tokens(tokens, self.execution)
        cos, sin = self.config.rope.tables(positions, self.config.head_dim)
        x = layers.run_layers(self.layers, x, self.execution, cos, sin, segment_ids)
        return self.norm(x)


def tensors(config: Config) -> tuple[Tensor, ...]:
    """The name table."""
    c = config
    d, heads, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    numbers = tuple(range(c.num_hidden_layers))

    def kernel(module: str, inputs: int, outputs: int, axes: tuple[str, str]) -> Tensor:
        name = f"model.layers.{{}}.{module}.weight"
        return Tensor(("layers", *module.split("."), "kernel"), name, (inputs, outputs), axes, True, numbers)

    def vector(module: str, leaf: str, size: int, axis: str | None = None) -> Tensor:
        name = f"model.layers.{{}}.{module}.{'bias' if leaf == 'bias' else 'weight'}"
        return Tensor(("layers", *module.split("."), leaf), name, (size,), (axis,), False, numbers)

    projections = {
        "self_attn.q_proj": (d, heads, ("embed", "heads")),
        "self_attn.k_proj": (d, kv, ("embed", "heads")),
        "self_attn.v_proj": (d, kv, ("embed", "heads")),
        "self_attn.o_proj": (heads, d, ("heads", "embed")),
        "mlp.gate_proj": (d, c.intermediate_size, ("embed", "mlp")),
        "mlp.up_proj": (d, c.intermediate_size, ("embed", "mlp")),
        "mlp.down_proj": (c.intermediate_size, d, ("mlp", "embed")),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    head_norms = {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    biased = [m for m in projections if m.startswith("self_attn")] if c.attention_bias else []
    return (
        Tensor(("embed_tokens", "embedding"), "model.embed_tokens.weight", (c.vocab_size, d), ("vocab", "embed")),
        *(kernel(m, *spec) for m, spec in projections.items()),
        *(vector(m, "bias", projections[m][1], projections[m][2][1]) for m in biased),
        *(vector(m, "scale", size) for m, size in (norms | head_norms).items()),
        Tensor(("norm", "scale"), "model.norm.weight", (d,), (None,)),
        *([] if c.tie_word_embeddings else [_head(c)]),
    )


def _head(c: Config) -> Tensor:
    return Tensor(("lm_head", "kernel"), "lm_head.weight", (c.hidden_size, c.vocab_size), ("embed", "vocab"), True)
