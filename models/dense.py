"""Dense decoders: Qwen3, Qwen2 / Qwen2.5, and Llama with all that carry its `model_type` (SmolLM2, ...).

Grouped-query attention, gated mlp, RMSNorm before each; `FAMILIES` says what differs. Qwen3 norms queries and keys per
head (Yang et al., arXiv 2505.09388), Qwen2 has biases on queries, keys and values (arXiv 2412.15115), Llama has neither
(Grattafiori et al., arXiv 2407.21783).

Sizes of Qwen3-8B: D 4096, L 36, N 32, K 8, H 128, F 12288, V 151936, untied, rope theta 1e6.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from models import config_keys, layers, names
from models.attention import attention
from models.names import Tensor
from models.rope import Rope, rotate


@dataclasses.dataclass(frozen=True)
class Family:
    """What one `model_type` has that another has not, and transformers' defaults of keys that its config.json lacks.

    Attributes:
      qk_norm: queries and keys are normed per head.
      qkv_bias: biases on queries, keys and values, whatever config.json says.
      bias_keys: switches for biases that its config.json may have.
      kv_heads, head_dim: defaults; None is the number of heads, and hidden_size over the number of heads.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    bias_keys: tuple[str, ...] = ()
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 32768


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, bias_keys=("attention_bias",), kv_heads=32, head_dim=128),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, kv_heads=32),
    "llama": Family("LlamaForCausalLM", bias_keys=("attention_bias", "mlp_bias"), positions=2048),
}


def stem(raw: Mapping[str, Any], stored: Sequence[str]) -> str:
    """Beginning of the Hugging Face names."""
    return "model"


def untrained(stem: str, name: str) -> bool:
    """True for tensors of a folder that the model does not use: buffers that old Llama folders hold."""
    return name.endswith(".rotary_emb.inv_freq")


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields by their Hugging Face names; see `from_hf` for those that are refused."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
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
        for key in ("attention_bias", "mlp_bias"):
            if getattr(self, key) and key not in self.family.bias_keys:
                raise ValueError(f"{key}=true is no setting of {self.model_type}")
        if self.rope.partial != 1.0:
            raise ValueError(f"partial_rotary_factor={self.rope.partial} is no setting of {self.model_type}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias or self.attention_bias

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Config":
        """Reads config.json. Defaults of absent keys are those of transformers.

        `attention_dropout` is not read: without dropout the learner's log-probabilities are the sampler's.

        Raises ValueError that names sliding windows, an unsupported rope type, or a missing size.
        """
        family = FAMILIES[raw["model_type"]]
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config_keys.require(raw, sizes)
        config_keys.refuse_sliding_windows(raw)
        heads = raw["num_attention_heads"]
        optional = ("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range", *family.bias_keys)
        return cls(
            model_type=raw["model_type"],
            **{k: raw[k] for k in sizes},
            num_key_value_heads=raw.get("num_key_value_heads", family.kv_heads) or heads,
            head_dim=raw.get("head_dim") or family.head_dim or raw["hidden_size"] // heads,
            rope=Rope.from_hf({"max_position_embeddings": family.positions, **raw}),
            max_position_embeddings=raw.get("max_position_embeddings") or family.positions,
            **{k: raw[k] for k in optional if raw.get(k) is not None},
        )

    def to_hf(self) -> dict[str, Any]:
        """Keys of config.json that `from_hf` reads back to an equal config."""
        unused = {"rope", "attention_bias", "mlp_bias"} - set(self.family.bias_keys)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in unused}
        return {**fields, "architectures": [self.family.architecture], "rope_parameters": self.rope.to_hf()}


class Attention(nnx.Module):
    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.execution = execution

        def linear(inputs: int, outputs: int, bias: bool) -> layers.Linear:
            return layers.Linear(inputs, outputs, bias=bias, std=c.initializer_range, rngs=rngs)

        self.q_proj = linear(c.hidden_size, self.heads * self.head_dim, c.qkv_bias)
        self.k_proj = linear(c.hidden_size, self.kv_heads * self.head_dim, c.qkv_bias)
        self.v_proj = linear(c.hidden_size, self.kv_heads * self.head_dim, c.qkv_bias)
        self.o_proj = linear(self.heads * self.head_dim, c.hidden_size, c.attention_bias)
        self.q_norm = layers.RMSNorm(self.head_dim, c.rms_norm_eps) if c.family.qk_norm else None
        self.k_norm = layers.RMSNorm(self.head_dim, c.rms_norm_eps) if c.family.qk_norm else None

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).reshape(batch, tokens, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, segment_ids, self.execution)
        return self.o_proj(y.reshape(batch, tokens, self.heads * self.head_dim))


class DecoderLayer(nnx.Module):
    def __init__(self, config: Config, execution: layers.Execution, rngs: nnx.Rngs):
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, execution, rngs)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            std=config.initializer_range,
            rngs=rngs,
        )

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
        cos, sin = self.config.rope.tables(positions, self.config.head_dim, segment_ids)
        cos, sin = self.execution.constrain(cos), self.execution.constrain(sin)
        x = layers.run_layers(self.layers, x, self.execution, cos, sin, segment_ids)
        return self.norm(x)


def tensors(config: Config, stem: str = "model") -> tuple[Tensor, ...]:
    """The name table; Hugging Face names of everything but the head begin with `stem`."""
    c = config
    d, f, heads, kv = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads
    numbers = tuple(range(c.num_hidden_layers))
    projections = {
        "self_attn.q_proj": (d, heads * c.head_dim, ("embed", "heads"), c.qkv_bias),
        "self_attn.k_proj": (d, kv * c.head_dim, ("embed", "heads"), c.qkv_bias),
        "self_attn.v_proj": (d, kv * c.head_dim, ("embed", "heads"), c.qkv_bias),
        "self_attn.o_proj": (heads * c.head_dim, d, ("heads", "embed"), c.attention_bias),
        "mlp.gate_proj": (d, f, ("embed", "mlp"), c.mlp_bias),
        "mlp.up_proj": (d, f, ("embed", "mlp"), c.mlp_bias),
        "mlp.down_proj": (f, d, ("mlp", "embed"), c.mlp_bias),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    head_norms = {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim} if c.family.qk_norm else {}
    layer = names.LayerTable(f"{stem}.layers.{{}}", ("layers",), numbers)
    return (
        names.embedding(f"{stem}.embed_tokens", c.vocab_size, d),
        *(layer.kernel(m, *sizes, axes) for m, (*sizes, axes, _) in projections.items()),
        *(layer.bias(m, outputs, axes[1]) for m, (_, outputs, axes, biased) in projections.items() if biased),
        *(layer.scale(m, size) for m, size in (norms | head_norms).items()),
        names.final_norm(f"{stem}.norm", d),
        *([] if c.tie_word_embeddings else [names.head(c.vocab_size, d)]),
    )
