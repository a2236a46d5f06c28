"""The `rti` command: its commands in the order of `--help`, and what becomes of their errors.

Each command is one function with its options and help, in cli_training.py, cli_measuring.py or cli_checking.py: a thin
call into a module of the same name. Heavy modules are imported inside the commands, so that `rti --help` answers at
once. `_Boundary` is the one place where a user's mistake becomes a line on stderr and an exit code: 2 for a mistake in
a config or on the command line, 1 for work that could not be done, 130 for an interruption. RTI_DEBUG=1 shows the
traceback as well.
"""

import os
import sys
import traceback
from typing import Annotated

import typer

from rti_jax import launcher, redaction
from rti_jax.cli_checking import doctor, plan, validate
from rti_jax.cli_measuring import compare, evaluate, report, score, select, view
from rti_jax.cli_training import export, reproduce, serve, sft, train


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
COMMANDS = {
    "train": train,
    "eval": evaluate,
    "select": select,
    "sft": sft,
    "score": score,
    "export": export,
    "plan": plan,
    "validate": validate,
    "doctor": doctor,
    "serve": serve,
    "report": report,
    "view": view,
    "compare": compare,
    "reproduce": reproduce,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


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
