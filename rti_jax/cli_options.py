"""What the commands of `rti` have in common: their options, the reading of a config, and what comes before the work."""

import json
import pathlib
import sys
from typing import Annotated, Any

import typer

from rti_jax import redaction

ConfigPath = Annotated[pathlib.Path, typer.Argument(help="YAML file, e.g. configs/quickstart.yaml", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="keys set on the command line, e.g. optimizer.lr=3e-6 gate.delta=inf")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")]
EndpointUrl = Annotated[
    str | None, typer.Option("--endpoint", help="Another model plays: base URL, with /v1, of an OpenAI-compatible API.")
]
EndpointModel = Annotated[str | None, typer.Option(help="Its name there; default the endpoint's first.")]
Step = Annotated[int | None, typer.Option(help="Play this step's checkpoint of the run instead of model.path.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the episodes that were played before.")]


def load(path: pathlib.Path, overrides: list[str] | None, schema: Any = None) -> Any:
    """The checked config."""
    from rti_jax import config, environments

    return config.load_config(path, overrides or [], schema or config.Config, environments.env_config)


def load_policy(
    path: pathlib.Path,
    overrides: list[str] | None,
    endpoint: str | None,
    model: str | None,
    step: int | None,
) -> tuple[Any, int | str | None]:
    """(config, step of the checkpoint that plays, "newest", or None for another policy); CONFIG may be a run folder."""
    overrides = list(overrides or [])
    overrides += [f"eval.endpoint.url={json.dumps(endpoint)}"] if endpoint is not None else []
    overrides += [f"eval.endpoint.model={json.dumps(model)}"] if model is not None else []
    if not path.is_dir():
        config = load(path, overrides)
    else:
        from rti_jax import environments, export

        place = [f"runs_dir={json.dumps(str(path.parent))}", f"name={json.dumps(path.resolve().name)}"]
        place.append('hosts.coordinator=""')  # of the training
        config = export.run_config(path, [*place, *overrides], environments.env_config)
        if hidden := redaction.hidden_keys(config.model_dump()):
            from rti_jax.config import ConfigError

            raise ConfigError(f"{path}/config.yaml has no secrets; give {hidden[0]}=... again, e.g. from $VARIABLE")
        if step is None and not config.eval.endpoint.url:
            step = "newest"
    if model and not config.eval.endpoint.url:
        from rti_jax.config import ConfigError

        raise ConfigError("--endpoint-model goes with --endpoint")
    if not config.eval.endpoint.url:
        check_model(config)
    return config, step


def check_model(config: Any) -> None:
    """A missing model folder is said before anything heavy is imported."""
    from rti_jax.runtime import check_folder

    check_folder(config.model.path)


def print_resolved(config: Any) -> None:
    from rti_jax.config import resolved_yaml, without_secrets

    sys.stdout.write(resolved_yaml(without_secrets(config)))


def splits(text: str | None) -> list[str]:
    """`test,ood` as names, quoted for YAML; none where the option was not given."""
    from rti_jax.config import ConfigError

    names = [json.dumps(name.strip()) for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise ConfigError(f"--split {text!r} names no split")
    return names


def mesh_of(text: str) -> Any:
    """`fsdp=4,tensor=2` as a MeshConfig."""
    from rti_jax import config

    data: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        config.apply_override(data, part.strip())
    return config.validate(data, config.MeshConfig, origin=lambda key: "--mesh: ")


def launch(ctx: typer.Context, config: Any = None) -> None:
    """What a computing command does first, once its input was checked; nothing where the app is called in a test.

    `config` is given where JAX and vLLM may share GPUs.
    """
    if ctx.obj:
        ctx.obj(config)


def exit_with(code: int | None) -> None:
    """A command's return value as the exit code; None and 0 are success."""
    if code:
        raise typer.Exit(code)
