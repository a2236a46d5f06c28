"""Mock services in this process: one private application per episode, from a pool, without ports and processes.

The benchmark starts a process per service, which takes a second and 47 MB. Here a server's file is executed as a module
of its own (about 20 ms) and its FastAPI application is called directly. An instance that an episode has used is reset
and pointed at the next one's data: the module's settings (what it computed from environment variables) are replaced,
and its /reset reads the data anew. That takes a millisecond and leaves what a fresh start would.
"""

import ast
import asyncio
import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from envs.base import EnvironmentError
from envs.claw_eval.checkout import Checkout, Entry

REFUSED = "[Errno 111] Connection refused"  # what the benchmark answers to a call of a port that nobody serves
_numbers = itertools.count()


class Server:
    """A server's file: how its instances are made, and which of its names depend on environment variables.

    Attributes:
      pointable: whether an instance can be pointed at other data; else each environment has instances of its own.
    """

    def __init__(self, checkout: Checkout, path: pathlib.Path):
        self.checkout, self.path = checkout, path
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self._code = compile(tree, str(path), "exec")
        self._settings: dict[str, types.CodeType] = {}
        self._variables: dict[str, str] = {}  # setting -> the first variable that it reads
        self.variables = {v for node in ast.walk(tree) if (v := _variable(node))}
        self.pointable = all([self._take(statement) for statement in tree.body])

    def _take(self, statement: ast.stmt) -> bool:
        """Notes a setting; False for a statement that uses settings in a way that only a fresh start repeats."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_main(statement):
            return True
        names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        variables = [v for n in ast.walk(statement) if (v := _variable(n))]
        if not variables and not names & self._settings.keys():
            return True
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if not isinstance(target, ast.Name) or statement.value is None:
            return False
        self._settings[target.id] = compile(ast.Expression(statement.value), str(self.path), "eval")
        self._variables[target.id] = (variables or [""])[0]
        return True

    def reads(self, setting: str) -> str:
        """The environment variable that gives a setting, "" for none."""
        return self._variables.get(setting, "")

    def settings(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Values of the settings under these environment variables, without a start."""
        system = types.SimpleNamespace(environ=dict(variables), getenv=dict(variables).get, path=os.path)
        known = {"os": system, "Path": pathlib.Path, "pathlib": pathlib, "__file__": str(self.path)}
        found: dict[str, Any] = {}
        for name, code in self._settings.items():
            found[name] = eval(code, {**known, **found})  # the checkout's code, which is executed anyway
        return found

    def stray(self, entry: Entry, variables: Mapping[str, str]) -> dict[str, pathlib.Path]:
        """Settings by which a service would serve another task's data though this one has its own: name -> its own.

        Eight English tasks name no data, and the servers' default is the Chinese twin's.
        """
        found = {}
        for name, value in self.settings(variables).items() if self.pointable else ():
            if isinstance(value, pathlib.Path) and self._variables[name] not in variables:
                with contextlib.suppress(ValueError):
                    other, *rest = value.relative_to(self.checkout.root / "tasks").parts
                    own = entry.folder.joinpath(*rest)
                    if other != entry.folder.name and own.is_file():
                        found[name] = own
        return found

    def start(self, variables: Mapping[str, str]) -> "Instance":
        """A fresh instance. Raises EnvironmentError where the file cannot be executed, or has no application."""
        module = types.ModuleType(f"_claw_eval_service_{next(_numbers)}")
        module.__file__ = str(self.path)
        with self.checkout.importing(), _environment(self.variables, variables), _registered(module):
            try:
                exec(self._code, vars(module))
                return Instance(self, module)
            except Exception as error:  # the checkout's code may raise anything
                raise EnvironmentError(
                    f"{self.path.parent.name}/{self.path.name}: {type(error).__name__}: {error}"
                ) from error


class Instance:
    """An application with a state of its own.

    Attributes:
      clean: whether it is as after its /reset, so that another episode may have it.
    """

    def __init__(self, server: Server, module: types.ModuleType):
        self.server, self._module = server, module
        self.clean = False
        transport = httpx.ASGITransport(module.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=None)
        self._open = 0  # requests that were begun and have not ended, those that nobody waits for too

    async def request(self, method: str, url: str, body: Any, seconds: float) -> httpx.Response:
        """The application's answer. Raises TimeoutError after `seconds`, whatever the application does."""
        request = asyncio.ensure_future(self._client.request(method, url, json=body))
        self._open += 1
        try:
            await asyncio.wait({request}, timeout=seconds)
            if not request.done():
                raise TimeoutError("timed out")
            self._open -= 1
            return request.result()
        finally:
            if not request.done():
                request.cancel()
                request.add_done_callback(lambda r: r.cancelled() or r.exception())  # a late error is nobody's

    async def reset(self, url: str | None, seconds: float) -> bool:
        """Resets it; True if it is as new. A request that was given up may still change it: then it is not."""
        self.clean = False
        if url and not self._open:
            with contextlib.suppress(Exception):  # whatever it raises, it is thrown away
                response = await self.request("POST", url, None, seconds)
                self.clean = response.is_success
        return self.clean

    def point(self, settings: Mapping[str, Any], clock: type[datetime.datetime] = datetime.datetime) -> None:
        """At other data, which the next reset reads; `clock` says what time it is then."""
        names = vars(self._module)
        names.update(settings)
        if isinstance(names.get("datetime"), type):  # from datetime import datetime
            names["datetime"] = clock


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A service of an episode: what is started, with which variables, settings and clock, and where it is reset."""

    server: Server
    variables: Mapping[str, str]
    settings: Mapping[str, Any]
    reset_url: str | None
    clock: type[datetime.datetime] = datetime.datetime

    @property
    def kind(self) -> tuple:
        """What instances are interchangeable."""
        return self.server.path, () if self.server.pointable else tuple(sorted(self.variables.items()))


class Pool:
    """Instances by kind, at most `limit` of each; one that cannot be reset is dropped, a fresh one takes its place."""

    def __init__(self, limit: int):
        self.limit = limit
        self._idle: dict[tuple, list[Instance]] = collections.defaultdict(list)
        self._lent: collections.Counter[tuple] = collections.Counter()
        self._waiting: list[asyncio.Future] = []

    def counts(self) -> dict[str, tuple[int, int]]:
        """Per server, the numbers of instances that lie idle and that episodes have."""
        found: dict[str, tuple[int, int]] = {}
        for kind in {*self._idle, *self._lent}:
            idle, lent = found.get(name := kind[0].parent.name, (0, 0))
            found[name] = idle + len(self._idle[kind]), lent + self._lent[kind]
        return found

    async def take(self, wanted: Sequence[Wanted], seconds: float) -> list[Instance]:
        """An instance for each service, pointed at its data and reset; waits until all of them are free at once.

        Args:
          seconds: limit of one reset; waiting for others to finish has none.

        Raises:
          EnvironmentError: a server cannot be started or reset, or a task wants more than `limit` of one kind.
        """
        needed = collections.Counter(w.kind for w in wanted)
        if needed and max(needed.values()) > self.limit:
            raise EnvironmentError(f"one task needs more instances of a service than env.instances={self.limit}")
        while any(self._lent[kind] + n > self.limit for kind, n in needed.items()):
            await self._change()
        self._lent.update(needed)
        taken: list[Instance] = []
        try:
            for w in wanted:
                idle = self._idle[w.kind]
                taken.append(idle.pop() if idle else w.server.start(w.variables))
            for w, instance in zip(wanted, taken, strict=True):
                instance.point(w.settings, w.clock)
                if w.reset_url and not await instance.reset(w.reset_url, seconds):
                    raise EnvironmentError(f"{w.server.path.parent.name}: {w.reset_url} does not reset it")
                instance.clean = False
            return taken
        except BaseException:
            self._free(wanted, [])
            raise

    async def give_back(self, wanted: Sequence[Wanted], instances: Sequence[Instance], seconds: float) -> None:
        """Resets the instances and keeps those that are as new; also when it is cancelled none stays lent."""
        try:
            for w, instance in zip(wanted, instances, strict=True):
                await instance.reset(w.reset_url, seconds)
        finally:
            self._free(wanted, [(w.kind, i) for w, i in zip(wanted, instances, strict=True) if i.clean])

    def _free(self, wanted: Sequence[Wanted], kept: Sequence[tuple[tuple, Instance]]) -> None:
        self._lent.subtract(w.kind for w in wanted)
        for kind, instance in kept:
            self._idle[kind].append(instance)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter


@functools.cache
def server(checkout: Checkout, path: pathlib.Path) -> Server:
    return Server(checkout, path)


@functools.cache
def pool(checkout: Checkout, limit: int) -> Pool:
    return Pool(limit)


@functools.cache
def clock(moment: str) -> type[datetime.datetime]:
    """The datetime class whose `now` is always the moment (ISO, with a time zone); the real one for none.

    Mail and calendar shift their data to the day on which they are read.
    """
    if not moment:
        return datetime.datetime
    fixed = datetime.datetime.fromisoformat(moment)

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return fixed.astimezone(tz) if tz else fixed.replace(tzinfo=None)

    return Stopped


def _variable(node: ast.AST) -> str:
    """The environment variable that an expression reads, "" for none."""
    match node:
        case (
            ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"),
                args=[ast.Constant(value=str() as name), *_],
            )
            | ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(value=str() as name), *_])
            | ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str() as name))
        ):
            return name
    return ""


def _is_main(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__": ...`."""
    return isinstance(statement, ast.If) and "__name__" in {
        n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)
    }


@contextlib.contextmanager
def _environment(read: set[str], given: Mapping[str, str]) -> Iterator[None]:
    """The process' environment as a service's own would be: of the variables that it reads, only the task's are set."""
    touched = {*read, *given, "ERROR_RATE"}
    before = {name: os.environ[name] for name in touched if name in os.environ}
    try:
        for name in touched:
            os.environ.pop(name, None)
        os.environ.update(given)
        yield
    finally:
        for name in touched:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _registered(module: types.ModuleType) -> Iterator[None]:
    """pydantic resolves a module's annotations through sys.modules, at the latest when the application is built."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
