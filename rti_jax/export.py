"""`rti export RUN`: a checkpoint as a complete Hugging Face folder that transformers and vLLM load.

    rti export runs/quickstart                           the newest checkpoint, to runs/quickstart/export
    rti export runs/quickstart --step 20 --output out    another one

Parameters alone are read, onto whatever devices are here; tokenizer, chat template, generation_config and licence
come from the folder that the run started from. Neither vLLM nor PyTorch is needed.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from rti_jax.config import Config, ConfigError, MeshConfig, load_config


def main(
    run: pathlib.Path, step: int | None = None, output: pathlib.Path | None = None, dtype: str | None = None
) -> tuple[pathlib.Path, int]:
    """Writes the folder and returns its path and the step of the checkpoint.

    Args:
      step: of the checkpoint; None is the newest one.
      output: default RUN/export.
      dtype: of the written tensors; None is the source's.

    Raises:
      ConfigError: no run, no such checkpoint (those that exist are named), an unreadable one, or no source folder.
    """
    run = pathlib.Path(run)
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}: expected float32 or bfloat16")
    config = run_config(run)
    model, target = abstract_policy(config)
    from models import hf
    from rti_jax.checkpoint import restore_params

    output = pathlib.Path(output or run / "export")
    if output.resolve() == pathlib.Path(config.model.path).resolve():
        raise ConfigError(f"--output {output} is the model that this run started from; give another folder")
    step, params = restore_params(run / "checkpoints", target, step)
    try:
        return hf.save(model, params, output, dtype=dtype), step
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_config(run: pathlib.Path, overrides: Sequence[str] = (), check_env: Any = None) -> Config:
    """The config that a run folder was started with, and overrides of it. Raises ConfigError where there is none."""
    if not (run / "config.yaml").is_file():
        what = "is no run folder (it has no config.yaml)" if run.is_dir() else "does not exist"
        known = sorted(p.parent.name for p in run.parent.glob("*/config.yaml"))
        raise ConfigError(f"{run} {what}" + (f"; runs in {run.parent}: {', '.join(known)}" if known else ""))
    return load_config(run / "config.yaml", overrides, check_env=check_env)


def abstract_policy(config: Config) -> tuple[Any, Any]:
    """(model, shapes of its parameters on the devices that are here); no weights are read."""
    import jax

    from models import hf, names
    from rti_jax.runtime import check_folder, make_mesh

    folder = check_folder(config.model.path)
    try:
        model = hf.describe(folder, mesh=make_mesh(MeshConfig()))
    except ValueError as error:
        raise ConfigError(f"model.path={folder}: {error}") from error

    def shape(tensor: names.Tensor) -> jax.ShapeDtypeStruct:
        sharding = names.get(model.shardings(), tensor.path)
        return jax.ShapeDtypeStruct(tensor.full_shape, "float32", sharding=sharding)

    return model, names.nest({t.path: shape(t) for t in model.tensors})
