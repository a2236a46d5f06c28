"""The `rti` command: one function a command, each a thin call into a module of the same name.

Heavy modules are imported inside the commands, so that `rti --help` answers at once. `_Boundary` is the one place where
a user's mistake becomes a line on stderr and an exit code: 2 for a mistake in a config or on the command line, 1 for
work that could not be done, 130 for an interruption. RTI_DEBUG=1 shows the traceback as well.
"""

import os
import pathlib
import shlex
import sys
import traceback
from typing import Annotated, Any

import typer

from rti_jax import launcher, redaction


class _Boundary(typer.core.TyperGroup):
    """Turns the errors that a user can act on into lines; everything else is a bug and keeps its traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of a pipe (head, less) has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            code, message = _user_error(error)
            if code is None:
                raise
            if os.environ.get("RTI_DEBUG", "0") not in ("", "0"):
                sys.stderr.write(redaction.redact(traceback.format_exc()))
            for line in redaction.redact(message).splitlines():
                print(line if line.startswith("  ") else f"error: {line}", file=sys.stderr)
            raise typer.Exit(code) from None


def _user_error(error: Exception) -> tuple[int | None, str]:
    """(exit code, message) of an error that a user can act on; (None, "") of any other."""
    from rti_jax import disk
    from rti_jax.config import ConfigError
    from rti_jax.engine_errors import EngineError
    from rti_jax.guards import RunStopped

    if isinstance(error, ConfigError):
        return 2, str(error)
    if isinstance(error, EngineError | RunStopped | disk.DiskFullError):
        return 1, str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "vllm":
        return 1, (
            "vLLM is not installed, and this command samples with it: run `make install`, or set engine.kind=server "
            "and engine.urls (score, export, plan, report, view, compare, validate and eval --endpoint work without it)"
        )
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return 1, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and disk.full(error):
        return 1, disk.describe(error.filename) if error.filename else "no space left on the disk (while writing)"
    return None, ""


app = typer.Typer(
    cls=_Boundary,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Reinforcement learning of LLM agents with Rollout-Time Intervention, in JAX.

    [bold]First steps[/bold]

    rti train configs/quickstart.yaml            train the shipped small policy, a few minutes on a laptop's CPU

    rti train configs/quickstart.yaml --dry-run  print every key with its value and stop

    rti doctor configs/quickstart.yaml           what a run needs, looked over before it

    rti eval configs/quickstart.yaml model.path=runs/quickstart/export

    rti report runs/quickstart                   curves and tables as one HTML file

    A config is a sparse YAML file; any key can be set after it as [bold]section.key=value[/bold]. docs/config.md lists
    all keys, docs/metrics.md all metrics.""",
)

ConfigPath = Annotated[pathlib.Path, typer.Argument(help="YAML file, e.g. configs/quickstart.yaml", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="keys set on the command line, e.g. optimizer.lr=3e-6 gate.delta=inf")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")]


def _load(path: pathlib.Path, overrides: list[str] | None, schema: Any = None) -> Any:
    """The checked config."""
    from rti_jax import config, environments

    return config.load_config(path, overrides or [], schema or config.Config, environments.env_config)


def _check_model(config: Any) -> None:
    """A missing model folder is said before anything heavy is imported."""
    from rti_jax.runtime import check_folder

    check_folder(config.model.path)


def _print_resolved(config: Any) -> None:
    from rti_jax.config import resolved_yaml, without_secrets

    sys.stdout.write(resolved_yaml(without_secrets(config)))


@app.command()
def train(ctx: typer.Context, config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train a policy: the main job.

    Everything goes to runs/NAME. A run that was interrupted goes on when the same command is typed again; it refuses,
    and says why, when a key that changes the algorithm differs.

    [bold]Examples[/bold]

    rti train configs/quickstart.yaml

    rti train configs/quickstart.yaml name=quickstart_grpo rti.enabled=false    the same without intervention

    rti train configs/navigation_qwen3_8b.yaml model.path=/models/Qwen3-8B mesh.fsdp=8
    """
    resolved = _load(config, overrides)
    if dry_run:
        return _print_resolved(resolved)
    _check_model(resolved)
    _launch(ctx, resolved)
    from rti_jax import train as command

    _exit(command.main(resolved))


EndpointUrl = Annotated[
    str | None, typer.Option("--endpoint", help="Another model plays: base URL, with /v1, of an OpenAI-compatible API.")
]
EndpointModel = Annotated[str | None, typer.Option(help="Its name there; default the endpoint's first.")]
Step = Annotated[int | None, typer.Option(help="Play this step's checkpoint of the run instead of model.path.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the episodes that were played before.")]


def _load_policy(
    path: pathlib.Path,
    overrides: list[str] | None,
    endpoint: str | None,
    model: str | None,
    step: int | None,
) -> tuple[Any, int | str | None]:
    """(config, step of the checkpoint that plays, "newest", or None for another policy); CONFIG may be a run folder."""
    import json

    overrides = list(overrides or [])
    overrides += [f"eval.endpoint.url={json.dumps(endpoint)}"] if endpoint is not None else []
    overrides += [f"eval.endpoint.model={json.dumps(model)}"] if model is not None else []
    if not path.is_dir():
        config = _load(path, overrides)
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
        _check_model(config)
    return config, step


@app.command("eval")
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
    names = _splits(split)
    one = [f"eval.split={names[0]}"] if len(names) == 1 else []
    several = [f"eval.splits=[{', '.join(names if len(names) > 1 else [])}]"] if names else []
    resolved, step = _load_policy(config, [*(overrides or []), *one, *several], endpoint, endpoint_model, step)
    _launch(ctx, None if resolved.eval.endpoint.url else resolved)
    from rti_jax import evaluate as command

    _exit(
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


@app.command()
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
    names = _splits(split)
    given = [*(overrides or []), *([f"eval.splits=[{', '.join(names)}]"] if names else [])]
    resolved, step = _load_policy(config, given, endpoint, endpoint_model, step)
    _launch(ctx, None if resolved.eval.endpoint.url else resolved)
    from rti_jax import select as command

    _exit(
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


@app.command()
def sft(ctx: typer.Context, config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Warm-start a policy by supervised training on expert transcripts.

    [bold]Examples[/bold]

    rti sft configs/warmstart.yaml

    rti sft configs/warmstart.yaml steps=50 output=/tmp/policy
    """
    if not dry_run:
        _launch(ctx)
    from rti_jax import sft as command

    resolved = _load(config, overrides, command.SFTConfig)
    if dry_run:
        return _print_resolved(resolved)
    command.main(resolved)


@app.command()
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
    devices = _mesh(mesh)
    _launch(ctx)
    from rti_jax import score as command

    _exit(command.score(model, input, output, temperature=temperature, mesh=devices))


@app.command()
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


@app.command()
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
    resolved = _load(config, overrides)
    from rti_jax import plan as command

    _exit(
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


@app.command()
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
    resolved = _load(config, overrides)
    from rti_jax import validate as command

    _exit(command.main(resolved, limit=limit, seconds=seconds))


@app.command()
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
    resolved = _load(config, overrides)
    _launch(ctx, resolved)
    from rti_jax import doctor as command

    _exit(command.main(resolved, fast=fast, as_json=as_json))


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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

    _exit(command.main(first, second, step=step, output=output))


@app.command()
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
    _launch(ctx)
    from rti_jax import reproduce as command

    _exit(
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


def _splits(text: str | None) -> list[str]:
    """`test,ood` as names, quoted for YAML; none where the option was not given."""
    import json

    from rti_jax.config import ConfigError

    names = [json.dumps(name.strip()) for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise ConfigError(f"--split {text!r} names no split")
    return names


def _mesh(text: str) -> Any:
    """`fsdp=4,tensor=2` as a MeshConfig."""
    from rti_jax import config

    data: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        config.apply_override(data, part.strip())
    return config.validate(data, config.MeshConfig, origin=lambda key: "--mesh: ")


def _launch(ctx: typer.Context, config: Any = None) -> None:
    """What a computing command does first, once its input was checked; nothing where the app is called in a test.

    `config` is given where JAX and vLLM may share GPUs.
    """
    if ctx.obj:
        ctx.obj(config)


def _exit(code: int | None) -> None:
    """A command's return value as the exit code; None and 0 are success."""
    if code:
        raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"rti-jax {importlib.metadata.version('rti-jax')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `rti` command; nothing that it logs or raises shows a secret."""
    redaction.learn_environment()
    redaction.guard_logs()
    try:
        app(prog_name="rti", obj=launcher.launch)
    except Exception:  # a bug: its traceback, and the exit code that Python gives it
        sys.stderr.write(redaction.redact(traceback.format_exc()))
        sys.exit(1)


if __name__ == "__main__":
    main()
