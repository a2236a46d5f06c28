"""A checkout of the Claw-Eval repository: its package, its tasks, and which of them can be played here.

The repository is the user's clone; nothing of it is copied. Its package is imported from the checkout's `src` (its
graders find each other by that place, so an installed copy would not do), its tasks are read from `tasks/`.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import yaml

HINT = (
    "git clone https://github.com/claw-eval/claw-eval, then set env.root or CLAW_EVAL_ROOT to that folder "
    "(docs/claw_eval.md)"
)
PACKAGES = ("claw_eval", "mock_services")  # what the checkout's own code imports
WEB = "web_real"  # start of the name of a server that fetches from the internet
_LOCK = threading.RLock()


class MissingError(ValueError):
    """There is no checkout, or it lacks something; the message says what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One task of the benchmark's format.

    Attributes:
      folder: with task.yaml, grader.py and fixtures/. definition: the benchmark's TaskDefinition.
      obstacle: why it cannot be played here, "" if it can.
      origin: id of the task that it is a variant of (`variant_of` in its task.yaml), "" for none.
    """

    id: str
    folder: pathlib.Path
    definition: Any
    obstacle: str
    origin: str = ""

    @property
    def family(self) -> str:
        """What a task shares with its variants and with its twin in the other language."""
        return family(self.origin or self.id)

    @property
    def talks(self) -> bool:
        """Whether a simulated user answers."""
        return bool(self.definition.user_agent.enabled)


class Checkout:
    """A checkout, loaded once a process. `load` gives it.

    Attributes:
      root: its folder. commit: what git says is checked out, "unknown" where git says nothing.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        for needed in ("src/claw_eval", "tasks"):
            if not (root / needed).is_dir():
                raise MissingError(f"{root} is no checkout of Claw-Eval: it has no {needed}; {HINT}")
        self.commit = commit(root)
        self._modules: dict[str, ModuleType] = {}
        self._entries: dict[tuple[pathlib.Path, bool], Mapping[str, Entry]] = {}

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Within, `claw_eval` and `mock_services` are this checkout's, and sys.path is what its code may change."""
        with _LOCK:
            if any(sys.modules.get(name) is not module for name, module in self._modules.items()) or not self._modules:
                for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
                    del sys.modules[name]
                sys.modules.update(self._modules)
            before = sys.path[:]
            sys.path[:0] = [str(self.root / "src"), str(self.root)]
            try:
                yield
            finally:
                sys.path[:] = before
                self._modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES}

    def module(self, name: str) -> ModuleType:
        """`claw_eval.<name>`. Raises MissingError where it, or what it needs, cannot be imported."""
        if (module := self._modules.get(f"claw_eval.{name}")) is not None:
            return module
        with self.importing():
            try:
                return importlib.import_module(f"claw_eval.{name}")
            except ImportError as error:
                raise MissingError(
                    f"claw_eval.{name} of {self.root} cannot be imported: {error} (pip install 'rti-jax[claw-eval]')"
                ) from error

    def tasks(self, folder: pathlib.Path | None = None, web: bool = False) -> Mapping[str, Entry]:
        """The tasks of text by id, those that cannot be played too.

        Args:
          folder: of tasks; None is the benchmark's own. web: whether services may fetch from the internet.
        """
        place = (folder or self.root / "tasks", web)
        if place not in self._entries:
            self._entries[place] = self.read(*place)
        return self._entries[place]

    def read(self, folder: pathlib.Path, web: bool = False) -> Mapping[str, Entry]:
        """The tasks of a folder, as they are now."""
        definition, found = self.module("models.task").TaskDefinition, {}
        for path in sorted(folder.glob("*/task.yaml")):
            try:
                data = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
                if "general" not in (data.get("tags") or ()) and folder == self.root / "tasks":
                    continue  # images, video and sound: not for a policy that reads text
                task = definition.model_validate(data | {"task_file": str(path)})
            except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
                raise MissingError(f"{path}: {' '.join(str(error).split())[:300]}") from error
            origin = str(data.get("variant_of") or "")
            entry = Entry(task.task_id, path.parent, task, "", origin)
            found[entry.id] = dataclasses.replace(entry, obstacle=self.obstacle(entry, web))
        return found

    def obstacle(self, entry: Entry, web: bool) -> str:
        """Why a task cannot be played without Docker (and without the web, unless it is allowed); "" if it can."""
        task = entry.definition
        if outside := sorted({t.name for t in task.tools} - {e.tool_name for e in task.tool_endpoints}):
            return f"needs a sandbox for {', '.join(outside)}"
        if getattr(task, "env_snapshot_files", None) or getattr(task, "env_snapshot_commands", None):
            return "is graded by what it leaves in a sandbox"
        if task.prompt.attachments:
            return "has attachments"
        if not task.tools and not entry.talks:
            return "has no tools but a sandbox's"
        for service in task.services:
            script = self.script(service)
            if script.parent.name.startswith(WEB) and not web:
                return f"its service {service.name} fetches from the internet (env.web)"
            if not script.is_file():
                return f"its service {service.name} has no {script}"
            if absent := [v for k, v in self.environment(entry, service).items() if _is_data(k) and not _exists(v)]:
                return f"its service {service.name} has no {absent[0]}"
            if "DOCUMENTS_BASE_DIR" in service.env and (
                lost := [f for f in task.sandbox_files if not (entry.folder / f).exists()]
            ):
                return f"its document {lost[0]} is not in the checkout"
        return ""

    def script(self, service: Any) -> pathlib.Path:
        """The server of a service: the file that its command starts."""
        words = [w for w in shlex.split(service.command) if w.endswith(".py")]
        return self.root / (words[0] if words else service.command)

    def environment(self, entry: Entry, service: Any) -> dict[str, str]:
        """Environment variables of a service; paths of files that exist are absolute, and documents are the task's."""
        bases = (entry.folder, entry.folder.parent.parent, self.root)
        given = {"DOCUMENTS_BASE_DIR": str(entry.folder)} | dict(service.env or {})
        return {k: next((str(b / v) for b in bases if v and (b / v).exists()), v) for k, v in given.items()}


def family(task_id: str) -> str:
    """ticket_triage of T017zh_ticket_triage, T018_ticket_triage and T018_ticket_triage__3."""
    return re.sub(r"^[A-Z]+\d+(zh|en)?_", "", task_id).partition("__")[0]


def language(entry: Entry) -> str:
    return str(entry.definition.prompt.language)


def commit(root: pathlib.Path) -> str:
    """What is checked out, read from .git without git, which refuses folders of other users."""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree or a submodule
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        name = head.removeprefix("ref: ")
        if (shared / name).is_file():
            return (shared / name).read_text().strip()
        packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
        return next(words[0] for words in packed if words[-1] == name)
    except (OSError, StopIteration, UnicodeDecodeError):
        return "unknown"


def load(root: str) -> Checkout:
    """The checkout at `root`, else at $CLAW_EVAL_ROOT.

    Raises:
      MissingError: (a ValueError) neither is set, or it is no checkout.
    """
    place = root or os.environ.get("CLAW_EVAL_ROOT", "")
    if not place:
        raise MissingError(f"the Claw-Eval repository is needed, and env.root and CLAW_EVAL_ROOT are not set: {HINT}")
    return _load(pathlib.Path(place).expanduser().resolve())


_load = functools.cache(Checkout)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


def _is_data(variable: str) -> bool:
    return variable.endswith(("_FIXTURES", "_BASE_DIR"))


def _exists(path: str) -> bool:
    return bool(path) and pathlib.Path(path).exists()
