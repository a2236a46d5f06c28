"""Commands that measure policies and show runs: `rti eval`, `select`, `score`, `compare`, `report`, `view`."""

import pathlib
from typing import Annotated

import typer

from rti_jax.cli_options import (
    EndpointModel,
    EndpointUrl,
    Overrides,
    Restart,
    Step,
    exit_with,
    launch,
    load_policy,
    mesh_of,
    splits,
)


def evaluate(
    ctx: typer.Context,
    config: Annotated[
        pathlib.Path, typer.Argument(help="YAML file, or a run folder: its newest checkpoint", metavar="CONFIG")
    ],
    overrides: Overrides = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="JSON file; default runs/NAME/evals/.")] = None,
    step: Step = None,
    split: Annotated[
        str | None, typer.Option(help="Split, or several: test,ood. Default eval.splits, else eval.split.")
    ] = None,
    endpoint: EndpointUrl = None,
    endpoint_model: EndpointModel = None,
    restart: Restart = False,
    per_task: Annotated[bool, typer.Option("--per-task", help="Print every task, not only the worst.")] = False,
    table: Annotated[pathlib.Path | None, typer.Option(help="Also write the tasks to this .csv or .md file.")] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Measure it as validator, corrector and verifier instead.")
    ] = False,
    turns: Annotated[
        pathlib.Path | None,
        typer.Option(help="With --roles: judge the turns of an earlier measurement (its .jsonl), to see drift alone."),
    ] = None,
) -> None:
    """Measure Pass@k and Pass^k, k = 1..eval.trials, with intervals.

    Estimates are unbiased and per task; intervals resample tasks. Episodes that the infrastructure broke are excluded
    and counted. Interrupted, or with episodes excluded, the same command plays those that are missing
    (docs/evaluation.md).

    [bold]Examples[/bold]

    rti eval configs/quickstart.yaml

    rti eval configs/quickstart.yaml model.path=runs/quickstart/export --output after.json

    rti eval runs/quickstart --step 20 --split test,ood    a checkpoint; each split and both together

    rti eval configs/quickstart.yaml --endpoint http://host:8000/v1 --endpoint-model Qwen/Qwen3-32B

    rti eval configs/quickstart.yaml --roles --output roles.json    the three roles, on the policy's own turns, against
    a scripted expert
    """
    names = splits(split)
    one = [f"eval.split={names[0]}"] if len(names) == 1 else []
    several = [f"eval.splits=[{', '.join(names if len(names) > 1 else [])}]"] if names else []
    resolved, step = load_policy(config, [*(overrides or []), *one, *several], endpoint, endpoint_model, step)
    launch(ctx, None if resolved.eval.endpoint.url else resolved)
    from rti_jax import evaluate as command

    exit_with(
        command.main(
            resolved,
            output=output,
            step=step,
            roles=roles,
            turns=turns,
            restart=restart,
            per_task=per_task,
            table=table,
        )
    )


def select(
    ctx: typer.Context,
    config: Annotated[
        pathlib.Path, typer.Argument(help="YAML file, or a run folder: its newest checkpoint", metavar="CONFIG")
    ],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="The list, an id a line: NAME.txt.")],
    overrides: Overrides = None,
    attempts: Annotated[int, typer.Option(help="At each task.", min=1)] = 4,
    max_solved: Annotated[int, typer.Option(help="Of them, at most.", min=0)] = 0,
    split: Annotated[
        str | None, typer.Option(help="Split, or several: train,test. Default eval.splits, else env.split.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Tasks of each kind that are tried; default all.", min=1)] = None,
    step: Step = None,
    endpoint: EndpointUrl = None,
    endpoint_model: EndpointModel = None,
    stable: Annotated[
        bool,
        typer.Option("--regrade/--no-regrade", help="Play each attempt's turns again: the same grade is due."),
    ] = True,
    restart: Restart = False,
) -> None:
    """Choose a hard subset: the tasks that a policy almost never solves.

    They can be run, have stable graders, and are one of each family; docs/evaluation.md says how that is found out.
    Interrupted, the same command goes on.

    [bold]Examples[/bold]

    rti select configs/navigation_qwen3_8b.yaml --attempts 8 --output hard.txt

    rti select configs/quickstart.yaml --max-solved 1 --split test --output hard.txt

    rti train configs/quickstart.yaml rollout.tasks=hard.txt    what it is for
    """
    names = splits(split)
    given = [*(overrides or []), *([f"eval.splits=[{', '.join(names)}]"] if names else [])]
    resolved, step = load_policy(config, given, endpoint, endpoint_model, step)
    launch(ctx, None if resolved.eval.endpoint.url else resolved)
    from rti_jax import select as command

    exit_with(
        command.main(
            resolved,
            output,
            attempts=attempts,
            max_solved=max_solved,
            limit=limit,
            step=step,
            stable=stable,
            restart=restart,
        )
    )


def score(
    ctx: typer.Context,
    model: Annotated[pathlib.Path, typer.Argument(help="Hugging Face folder", metavar="MODEL")],
    input: Annotated[pathlib.Path, typer.Option("--input", "-i", help="JSONL rows.")],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="JSONL, a line for each row, in order.")],
    temperature: Annotated[
        float, typer.Option(help="Log-probabilities of the distribution at this temperature.")
    ] = 1.0,
    mesh: Annotated[str, typer.Option(help="Devices, e.g. fsdp=4,tensor=2; default all as fsdp.")] = "",
) -> None:
    """Log-probabilities and perplexity of responses, with the learner's own code; no vLLM needed.

    Rows are {"prompt_ids": [...], "response_ids": [...]} or {"prompt": "...", "response": "..."}. A malformed row gets
    an error line in its place, the others are scored, and the exit code is 1.

    [bold]Example[/bold]

    rti score runs/quickstart/export --input rows.jsonl --output scores.jsonl --temperature 0.8
    """
    devices = mesh_of(mesh)
    launch(ctx)
    from rti_jax import score as command

    exit_with(command.score(model, input, output, temperature=temperature, mesh=devices))


def compare(
    first: Annotated[str, typer.Argument(help="run folder, evaluation file, or a quoted pattern", metavar="A")],
    second: Annotated[str, typer.Argument(help="the same, on the same tasks", metavar="B")],
    step: Annotated[int | None, typer.Option(help="Evaluation after this step of a run; default the newest.")] = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="Also written to this JSON file.")] = None,
) -> None:
    """Two evaluations, paired over tasks, with intervals.

    A pattern stands for several seeds of one method: their trials are pooled task by task.

    [bold]Examples[/bold]

    rti compare runs/quickstart_grpo runs/quickstart

    rti compare 'runs/grpo_seed*' 'runs/rti_seed*' --step 24

    rti compare 'runs/grpo_seed*/evals/step_000032.json' 'runs/rti_seed*/evals/step_000024.json'
    """
    from rti_jax import compare as command

    exit_with(command.main(first, second, step=step, output=output))


def report(
    runs: Annotated[list[pathlib.Path], typer.Argument(help="run folders; several are compared", metavar="RUN...")],
    output: Annotated[pathlib.Path | None, typer.Option(help="HTML file; default RUN/report.html.")] = None,
) -> None:
    """Curves, tables and the intervention ledger of runs, as one HTML file that needs no network.

    [bold]Examples[/bold]

    rti report runs/quickstart

    rti report runs/quickstart runs/quickstart_grpo --output both.html
    """
    from rti_jax import report as command

    print(f"wrote {command.main(runs, output=output)}")


def view(
    run: Annotated[pathlib.Path, typer.Argument(help="run folder, or the JSON of an evaluation", metavar="RUN")],
    other: Annotated[
        pathlib.Path | None,
        typer.Argument(help="another one: their episodes of one task side by side", metavar="[RUN2]"),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Default the newest that has what is asked for.")] = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="HTML file; default RUN/view.html.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Only episodes that ended so: success, failure, truncated, ...")
    ] = None,
    intervened: Annotated[bool, typer.Option("--intervened", help="Only groups with an intervention.")] = False,
    task: Annotated[str | None, typer.Option(help="Only this task, by its id.")] = None,
    limit: Annotated[int, typer.Option(help="Groups at most, those with interventions first.", min=1)] = 32,
    evaluation: Annotated[bool, typer.Option("--eval", help="Held-out episodes of an evaluation instead.")] = False,
) -> None:
    """What the policy and the roles wrote in a step, as one HTML file that needs no network; no vLLM needed.

    Groups with their advantages; each intervention before and after, with the reason, the verdict, rejected proposals
    and perplexity; corrected tokens coloured by their weight. Intervened episodes show the evidence.

    [bold]Examples[/bold]

    rti view runs/quickstart

    rti view runs/quickstart --step 12 --intervened --output step12.html

    rti view runs/quickstart runs/quickstart_grpo --task train/0138    two runs on one task

    rti view runs/quickstart/evals/test_model.json    the episodes of an evaluation
    """
    from rti_jax import view as command

    written = command.main(
        run,
        other,
        step=step,
        output=output,
        outcome=outcome,
        intervened=intervened,
        task=task,
        limit=limit,
        evaluation=evaluation,
    )
    print(f"wrote {written.path}: {written.what}")
