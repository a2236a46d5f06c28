"""Checks of a config.json that every family makes."""

from collections.abc import Mapping, Sequence
from typing import Any


def require(raw: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raises ValueError that names the keys which a config.json lacks."""
    if missing := [k for k in keys if raw.get(k) is None]:
        raise ValueError(f"config.json has no {', '.join(missing)}")


def refuse_sliding_windows(raw: Mapping[str, Any]) -> None:
    """Raises ValueError if any layer of a config.json would see only a window; transformers' rule decides which."""
    kinds = raw.get("layer_types")
    if kinds is None and raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None:
        full = raw.get("max_window_layers", 28)
        kinds = ["sliding_attention"] * (raw["num_hidden_layers"] - full)
    if other := sorted({k for k in kinds or () if k != "full_attention"}):
        raise ValueError(
            f"sliding-window attention is not supported: use_sliding_window or layer_types asks for {', '.join(other)}"
        )
