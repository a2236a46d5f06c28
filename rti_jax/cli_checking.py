"""Commands that look over a run before it is made: `rti plan`, `validate`, `doctor`."""

from typing import Annotated

import typer

from rti_jax.cli_options import ConfigPath, Overrides, exit_with, launch, load


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    chip: Annotated[str, typer.Option(help="h20, h100, h200, v5p or v6e.")] = "h20",
    devices: Annotated[
        int | None, typer.Option(help="Devices; mesh.fsdp takes what the other axes leave. Default: the mesh's.", min=1)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Shapes of a published model, qwen3-8b or qwen3.5-9b, not of model.path.")
    ] = None,
    utilization: Annotated[float, typer.Option(help="Share of the chip's peak that an update reaches.")] = 0.4,
    episode_tokens: Annotated[
        int | None, typer.Option(help="Mean tokens of an episode; default the most there can be.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Also ask TPU's compiler (needs libtpu, no TPU).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Memory, operations, communication and time of a step before it runs; needs no accelerator, weights or vLLM.

    Exit code 1 if it does not fit, with the changes that would make it fit. docs/plan.md explains the numbers.

    [bold]Examples[/bold]

    rti plan configs/navigation_qwen3_8b.yaml

    rti plan configs/tau2_retail_qwen3_5_9b.yaml --chip h20 --devices 8 --json

    rti plan configs/navigation_qwen3_8b.yaml --devices 1 rollout.groups_per_step=8

    rti plan configs/navigation_qwen3_8b.yaml --chip v5p --compile engine.memory_fraction=0.3
    """
    resolved = load(config, overrides)
    from rti_jax import plan as command

    exit_with(
        command.main(
            resolved,
            chip=chip,
            devices=devices,
            model=model,
            utilization=utilization,
            episode_tokens=episode_tokens,
            compile=compile,
            as_json=as_json,
        )
    )


def validate(
    config: ConfigPath,
    overrides: Overrides = None,
    limit: Annotated[int | None, typer.Option(help="Tasks of each kind of a split; default all.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="Limit of one set-up, turn or score.", min=0.001)] = 60.0,
) -> None:
    """Check an environment: gold play scores 1, doing nothing 0, the evidence is true, no state is shared.

    Needs neither a model nor an endpoint. Plays the tasks of env.split and eval.split, one by one and then many at
    once; exit code 1 if anything is violated.

    [bold]Examples[/bold]

    rti validate configs/quickstart.yaml --limit 20

    rti validate configs/tau2_telecom_qwen3_8b.yaml env.split=base
    """
    resolved = load(config, overrides)
    from rti_jax import validate as command

    exit_with(command.main(resolved, limit=limit, seconds=seconds))


def doctor(
    ctx: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out what needs vLLM.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of lines.")] = False,
) -> None:
    """Look over everything that a run needs, before it.

    Template, stop ids, padding and tool calls on the model's own tokenizer; endpoints and their keys; tasks; context
    against turns; evidence that must not reach a training row; disk; then with vLLM: engine against learner, a weight
    update, one episode, one judged sample. Each line is ok, a warning, a failure or not applicable, and says what to
    do; exit code 1 if anything fails.

    [bold]Examples[/bold]

    rti doctor configs/quickstart.yaml

    rti doctor configs/navigation_qwen3_8b.yaml model.path=/models/Qwen3-8B --fast
    """
    resolved = load(config, overrides)
    launch(ctx, resolved)
    from rti_jax import doctor as command

    exit_with(command.main(resolved, fast=fast, as_json=as_json))
