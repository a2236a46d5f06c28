"""Rotary positions (Su et al., arXiv 2104.09864): the rope types of Hugging Face configs, tables and the rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """How positions turn into angles, and how they are stretched beyond the trained length.

    `options` holds the keys that `kind` needs, as Hugging Face names them: linear `factor`; dynamic `factor` and
    config.json's `max_position_embeddings`; yarn `factor`,
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

        Raises ValueError that names a rope type outside `ROPE_KINDS`, or a missing key.
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
        if kind == "dynamic":
            keys["max_position_embeddings"] = config.get("max_position_embeddings")
        if missing := [k for k in _ROPE_REQUIRED[kind] if keys.get(k) is None]:
            raise ValueError(f"rope type {kind!r} needs {', '.join(missing)} in rope_parameters")
        return cls(float(theta), kind, float(partial), tuple(sorted((k, _freeze(v)) for k, v in keys.items())))

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` that `from_hf` reads back, beside config.json's own `max_position_embeddings`."""
        partial = {} if self.partial == 1.0 else {"partial_rotary_factor": self.partial}
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options}
        options.pop("max_position_embeddings", None)
        return {"rope_type": self.kind, "rope_theta": self.theta, **partial, **options}

    def frequencies(self, head_dim: int, theta: float | jax.Array | None = None) -> tuple[Any, float]:
        """Inverse frequencies [..., rotated / 2] and the factor that scales cosine and sine.

        Args:
          theta: instead of the config's; an array [...] gives frequencies for each of its elements.
        """
        rotated = int(head_dim * self.partial)
        theta = self.theta if theta is None else theta[..., None]
        inverse = theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        return ROPE_KINDS[self.kind](self, inverse, rotated)

    def tables(
        self, positions: jax.Array, head_dim: int, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine [B, T, rotated / 2] of float32 angles at `positions` [B, T].

        Args:
          segment_ids: [B, T]; only the dynamic type asks, whose frequencies depend on the length of the sequence.
        """
        theta = self._dynamic_theta(positions, segment_ids, head_dim) if self.kind == "dynamic" else None
        inverse, factor = self.frequencies(head_dim, theta)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def _dynamic_theta(self, positions: jax.Array, segment_ids: jax.Array, head_dim: int) -> jax.Array:
        """Base [B, T] of each token: theta up to the trained length, above it grown with its segment's length."""
        o, rotated = dict(self.options), int(head_dim * self.partial)

        def last(positions, segment_ids):  # [T]
            count = positions.shape[0] + 1
            return jax.ops.segment_max(positions, segment_ids, num_segments=count)[segment_ids]

        length = jnp.maximum(jax.vmap(last)(positions, segment_ids) + 1, o["max_position_embeddings"])
        grown = o["factor"] * length.astype(jnp.float32) / o["max_position_embeddings"] - (o["factor"] - 1)
        return self.theta * grown ** (rotated / (rotated - 2))


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


ROPE_KINDS = {"default": _default, "linear": _linear, "dynamic": _default, "yarn": _yarn, "llama3": _llama3}
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the first 2 * cos.shape[-1] dimensions of each head of x [B, T, N, H]."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
