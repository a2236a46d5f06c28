"""Shapes of published models, as their config.json has them, for planning without a download.

Only what `models.hf` reads of a config.json; tensors and parameter counts follow from the model's own name table.
"""

import pathlib
from typing import Any

from rti_jax.config import ConfigError

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": False,
    },
}


def describe(path: str, name: str | None, **execution: Any) -> tuple[Any, str]:
    """(models.hf.LanguageModel without parameters, where its shapes come from).

    Args:
      path: model.path; of a folder, config.json alone is read. name: a key of `PUBLISHED` that is taken instead.
      execution: fields of models.layers.Execution.

    Raises:
      ConfigError: neither a folder nor a known name, or a model that is not supported.
    """
    from models import hf

    if name and name.lower() not in PUBLISHED:
        raise ConfigError(f"--model {name}: choose one of {', '.join(PUBLISHED)}, or set model.path to a folder")
    if not name and (pathlib.Path(path) / "config.json").is_file():
        try:
            return hf.describe(path, **execution), f"{path}/config.json"
        except ValueError as error:
            raise ConfigError(f"model.path={path}: {error}") from error
    key = (name or pathlib.PurePath(path).name).lower()
    if key not in PUBLISHED:
        raise ConfigError(
            f"model.path={path}: no config.json there (seen from {pathlib.Path.cwd()}); copy the model's config.json "
            f"there (weights are not needed), or name its shapes: --model {' or '.join(PUBLISHED)}"
        )
    raw = PUBLISHED[key]
    config = hf.family(raw["model_type"]).Config.from_hf(raw)
    source = f"the published {key}" + ("" if name else f" ({path} is not here)")
    return hf.LanguageModel(config, config.model_type, None, hf.Execution(**execution)), source
