"""Commands that train a policy and give it away: `rti train`, `sft`, `export`, `serve`, `reproduce`."""

import pathlib
import shlex
import sys
from typing import Annotated

import typer

from rti_jax.cli_options import ConfigPath, DryRun, Overrides, check_model, exit_with, launch, load, print_resolved


def train(ctx: typer.Context, config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train a policy: the main job.

    Everything goes to runs/NAME. A run that was interrupted goes on when the same command is typed again; it refuses,
    and says why, when a key that changes the algorithm differs.

    [bold]Examples[/bold]

    rti train configs/quickstart.yaml

    rti train configs/quickstart.yaml name=quickstart_grpo rti.enabled=false    the same without intervention

    rti train configs/navigation_qwen3_8b.yaml model.path=/models/Qwen3-8B mesh.fsdp=8
    """
    resolved = load(config, overrides)
    if dry_run:
        return print_resolved(resolved)
    check_model(resolved)
    launch(ctx, resolved)
    from rti_jax import train as command

    exit_with(command.main(resolved))


def sft(ctx: typer.Context, config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Warm-start a policy by supervised training on expert transcripts.

    [bold]Examples[/bold]

    rti sft configs/warmstart.yaml

    rti sft configs/warmstart.yaml steps=50 output=/tmp/policy
    """
    if not dry_run:
        launch(ctx)
    from rti_jax import sft as command

    resolved = load(config, overrides, command.SFTConfig)
    if dry_run:
        return print_resolved(resolved)
    command.main(resolved)


def export(
    run: Annotated[pathlib.Path, typer.Argument(help="run folder, e.g. runs/quickstart", metavar="RUN")],
    step: Annotated[int | None, typer.Option(help="Checkpoint; default the newest.")] = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="Folder to write; default RUN/export.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default the source model's.")] = None,
) -> None:
    """Write a checkpoint as a complete Hugging Face folder; no vLLM needed.

    [bold]Example[/bold]

    rti export runs/quickstart --step 20 --output exported
    """
    from rti_jax import export as command

    folder, written = command.main(run, step=step, output=output, dtype=dtype)
    print(f"wrote {folder}: the policy after step {written}")


def serve(
    config: ConfigPath,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other hosts.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.", min=1, max=65535)] = 8000,
    owned: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Serve the policy of a config by vLLM, for rti train with engine.kind=server.

    vLLM's own server with the arguments that follow from the config, and the routes for token ids and weight updates:
    whoever reaches the port can change the weights, so keep it on a trusted network. docs/engines.md says more.

    [bold]Examples[/bold]

    rti serve configs/quickstart.yaml --port 8001

    rti serve configs/navigation_qwen3_8b.yaml --host 0.0.0.0 engine.args={tensor_parallel_size: 4}
    """
    from rti_jax import config as config_lib
    from rti_jax import serve as command

    resolved = config_lib.load_config(config, overrides or [])
    command.main(resolved, host=host, port=port, owned=owned)


def reproduce(
    ctx: typer.Context,
    folder: Annotated[pathlib.Path, typer.Argument(help="folder of configs, each an arm", metavar="FOLDER")],
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small runs: does everything work?")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at once, each with a vLLM and a core of its own; default one a core.", min=1),
    ] = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm; may be given several times.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Only this seed; may be given several times.")
    ] = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="Folder; default runs/reproduce_FOLDER.")] = None,
    write: Annotated[
        pathlib.Path | None, typer.Option(help="Also write this page, curves in a folder beside it.")
    ] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Run nothing: tables and claims of what is finished.")
    ] = False,
) -> None:
    """The paper's orderings in miniature: all arms and seeds, tables, curves, and for each claim whether it holds.

    Typed again, it goes on where it was interrupted. Overrides are set in all arms, but for keys that are an arm's own.
    Tables are written whenever a run has ended. Exit code 1 if an arm failed.

    [bold]Examples[/bold]

    rti reproduce configs/miniature

    rti reproduce configs/miniature --quick

    rti reproduce configs/miniature --write docs/reproduction.md

    rti reproduce configs/miniature --arm rti --arm grpo --seed 0 --output runs/two_arms
    """
    launch(ctx)
    from rti_jax import reproduce as command

    exit_with(
        command.main(
            folder,
            quick=quick,
            jobs=jobs,
            arms=arm or [],
            seeds=seed or [],
            overrides=overrides or [],
            output=output,
            table_only=table_only,
            write=write,
            command=shlex.join(["rti", *sys.argv[1:]]),
        )
    )
