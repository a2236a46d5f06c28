"""The Engine protocol over any number of vLLM servers: balanced, retried, restarted, and never of two versions.

What keeps a run going when servers do not (docs/engines.md):

- A request goes to the server that has the least left to do, its prefix counted in (balance.py), and to none that has
  as many as it runs at once; the others wait here, in order, so that whatever server is free first takes them.
- A server that is gone, hangs, or answers garbage serves no longer. What it was asked is asked elsewhere; a request's
  seed makes the repetition the same request. It comes back only after it has loaded the weights of now and sampled a
  token with them. One that the trainer started is started again for that, at most `engine.restarts` times.
- An update begins when the last request has been answered, and no request is sent before it ends. It is confirmed by
  every server that serves; one that fails it serves no longer, and comes back as above.
- Every answer names the weights that sampled it. Others than the trainer's are no answer.

The run ends (EngineDiedError) when no server has served for `engine.restart_timeout`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import time
import uuid
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from rti_jax import weight_sync
from rti_jax.balance import PrefixTable, cheapest
from rti_jax.config import Config, ConfigError
from rti_jax.engine import GenerateRequest, GenerateResult, admit
from rti_jax.engine_errors import (
    BusyError,
    EngineDiedError,
    EngineError,
    GarbageError,
    HungError,
    ServerError,
)
from rti_jax.loop_thread import LoopThread
from rti_jax.server import CONTROL_SECONDS, FIRST_VERSION, Server
from rti_jax.server_process import ServerProcess, free_ports
from rti_jax.vllm_settings import text_config

ATTEMPTS = 4  # of a request, each at a server that is alive then
STRIKES = 3  # failures in a row after which a server that we started is started again
PATIENCE = 3.0  # times engine.probe_seconds that a server may take to answer a look at it
BACKOFF_SECONDS = 0.1, 30.0  # before a server is looked at again: doubled with each strike, up to
logger = logging.getLogger(__name__)


class ServerEngine:
    """vLLM servers as one engine. `close()` ends those that it started; the others go on."""

    def __init__(self, model_path: str | os.PathLike, config: Config):
        self._loop = LoopThread()
        self._pool = _Pool(pathlib.Path(model_path), config)
        self.vocab_size = self._pool.vocab_size
        self._finalizer = weakref.finalize(self, _shutdown, self._loop, self._pool)
        try:
            self._loop.call(self._pool.connect())
        except BaseException:
            self._finalizer()
            raise
        self.max_context = self._pool.max_context

    @property
    def version(self) -> int:
        return self._pool.version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._wrapped(self._pool.generate(request))

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        return await self._wrapped(self._pool.update(tensors, version))

    async def checksums(self) -> dict[str, str]:
        """A digest of every parameter. Raises EngineError if two servers have different ones."""
        return await self._wrapped(self._pool.checksums())

    async def sleep(self) -> None:
        """Nothing to do: the servers' memory is not the learner's."""

    async def wake_up(self) -> None:
        """Nothing to do."""

    def pop_metrics(self) -> dict[str, float]:
        return self._pool.pop_metrics()

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    async def _wrapped(self, coroutine):
        if not self._finalizer.alive:
            coroutine.close()
            raise EngineDiedError("the engine is closed")
        return await self._loop.wrap(coroutine)


@dataclasses.dataclass
class _Waiting:
    """A request that waits for a server."""

    request: GenerateRequest
    tokens: int
    placed: asyncio.Future  # -> _Place


@dataclasses.dataclass
class _Place:
    """A request's place at a server, and the work that it is there."""

    server: Server
    work: int


class _Pool:
    """The servers; all of it but the constructor and `pop_metrics` runs in the engine's loop."""

    def __init__(self, model_path: pathlib.Path, config: Config):
        engine = config.engine
        self.config, self.version = engine, 0
        self.vocab_size = text_config(model_path)["vocab_size"]
        self.max_context = config.sampling.max_context
        self._model_path, self._whole = model_path, config
        self._trainer = uuid.uuid4().hex[:8]
        self._weights = weight_sync.Payload(model_path, config.model.dtype, engine.weights_dir)
        self._servers: list[Server] = []
        self._watchers: list[asyncio.Task] = []
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._prefixes = PrefixTable()
        self._updates, self._updating = asyncio.Lock(), False
        self._idle, self._standing = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._transfer: tuple[list[Server], Any] | None = None  # between devices: who takes part
        self._deadline: asyncio.TimerHandle | None = None
        self._broken = ""
        self._counts: collections.Counter[str] = collections.Counter()
        self._waited = self._seen = self._prompted = 0.0

    # Starting and ending.

    async def connect(self) -> None:
        """Starts what is to be started, and takes every server in. All of them must be there and right."""
        urls = [url.rstrip("/").removesuffix("/v1") for url in self.config.urls]
        self._servers += [Server(url) for url in urls]
        own = self._whole.model_copy(
            update={"model": self._whole.model.model_copy(update={"path": str(self._model_path.resolve())})}
        )
        for i, port in enumerate(free_ports(self.config.start)):
            devices = self.config.devices[i] if self.config.devices else ""
            process = ServerProcess(own, port, devices, siblings=self.config.start)
            self._servers.append(Server(process.url, process))
        await asyncio.gather(*[self._first(server) for server in self._servers])
        self.max_context = min(self.max_context, *(server.max_context for server in self._servers))
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def _first(self, server: Server) -> None:
        if server.process:
            await server.process.start()
        try:
            await self._prepare(server)
        except ServerError as error:
            raise EngineDiedError(str(error)) from error
        self._join(server)

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._deadline:
            self._deadline.cancel()
        await asyncio.gather(*[server.close() for server in self._servers])
        self._weights.close()

    # Requests.

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One sample. Raises EngineError when ATTEMPTS servers had no answer, EngineDiedError when none is left."""
        tokens = admit(request, self.max_context, self.vocab_size)
        for attempt in range(1, ATTEMPTS + 1):
            place = await self._place(request, tokens, first=attempt > 1)
            server = place.server
            try:
                result = await self._ask(server, request, tokens)
            except ServerError as error:
                self._count(error)
                if not isinstance(error, BusyError):
                    self._fail(server, error)
                if attempt == ATTEMPTS:
                    raise EngineError(
                        f"a {request.role} request had no answer in {ATTEMPTS} attempts: {error}"
                    ) from error
                self._counts["retried_requests"] += 1
                last = error
            else:
                server.strikes = 0
                self._prefixes.add(request.prompt_ids + result.ids, server)
                return result
            finally:
                self._release(place)
            if isinstance(last, BusyError):
                await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    async def _ask(self, server: Server, request: GenerateRequest, tokens: int) -> GenerateResult:
        """The server's answer, or a ServerError as soon as it is known that none will come."""
        seconds, names = self.config.request_timeout, self._names(self.version)
        answer = asyncio.ensure_future(server.sample(request, tokens, seconds, self.vocab_size, names, self.version))
        failed = asyncio.ensure_future(server.failed.wait())
        try:
            await asyncio.wait({answer, failed}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ServerError(f"server {server.url} serves no longer")
        finally:
            answer.cancel()
            failed.cancel()
            await asyncio.gather(answer, failed, return_exceptions=True)

    async def _place(self, request: GenerateRequest, tokens: int, *, first: bool) -> _Place:
        """Waits for a server that serves and has room; in order of arrival, repetitions first."""
        self._check()
        waiting = _Waiting(request, tokens, asyncio.get_running_loop().create_future())
        (self._queue.appendleft if first else self._queue.append)(waiting)
        started = time.monotonic()
        self._dispatch()
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.done() and not waiting.placed.cancelled() and not waiting.placed.exception():
                self._release(waiting.placed.result())
            raise
        finally:
            self._waited += time.monotonic() - started

    def _dispatch(self) -> None:
        """Gives places to the requests that wait, as far as there are any."""
        while self._queue and not self._updating:
            if self._queue[0].placed.done():  # its episode has given up
                self._queue.popleft()
                continue
            work = {s: s.work for s in self._servers if s.alive and s.running < s.limit}
            if not work:
                return
            waiting = self._queue.popleft()
            prompt = waiting.request.prompt_ids
            server, seen = cheapest(prompt, work, self._prefixes)
            self._seen, self._prompted = self._seen + seen, self._prompted + len(prompt)
            self._prefixes.add(prompt, server)
            place = _Place(server, len(prompt) - seen + waiting.tokens)
            server.running, server.work = server.running + 1, server.work + place.work
            self._idle.clear()
            waiting.placed.set_result(place)

    def _release(self, place: _Place) -> None:
        server = place.server
        server.running, server.work = server.running - 1, server.work - place.work
        if not any(s.running for s in self._servers):
            self._idle.set()
        self._dispatch()

    # Weights.

    async def update(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        """New weights on every server that serves; at least one does when this returns."""
        async with self._updates:
            self._check()
            weight_sync.check_version(version, self.version)
            devices = self.config.weight_transfer in weight_sync.DEVICE_BACKENDS
            if devices:
                self._weights.pass_by(tensors.shapes)
            else:
                await asyncio.to_thread(self._weights.write, tensors, version)
            self._updating = True
            try:
                await self._idle.wait()
                serving = [s for s in self._servers if s.alive]
                if devices:
                    await self._send(serving, tensors)
                name, update = self._name(version), None if devices else self._weights.update
                loads = [s.finish(name) if devices else s.load(update, name) for s in serving]
                for server, error in zip(serving, await asyncio.gather(*loads, return_exceptions=True), strict=True):
                    if isinstance(error, EngineError | ConfigError):
                        self._fail(server, error)
                    elif error:
                        raise error
                    else:
                        server.restarts = 0
                self.version = version
                self._prefixes.clear()
            except BaseException as error:
                self._give_up(f"the update to weights version {version} was not completed ({error!r})")
                raise
            finally:
                self._updating = False
                self._dispatch()
        await self._standing.wait()
        self._check()
        return version

    async def _send(self, servers: list[Server], weights: weight_sync.FlaxWeights) -> None:
        """An update by vLLM's own engine between devices (not run: it needs CUDA). The servers stay the same ones."""
        from rti_jax import device_transfer

        for server in servers:
            await server.pause()
        if self._transfer is None:
            workers = [await server.workers() for server in servers]
            client = device_transfer.Client([s.step for s in servers], workers, asyncio.get_running_loop())
            aliases, dtype = weight_sync.aliases(self._weights.expected), self._whole.model.dtype
            source = device_transfer.NamedTensors(weights.shapes, dtype, aliases)
            kind = self.config.weight_transfer
            self._transfer = (
                servers,
                await asyncio.to_thread(device_transfer.DeviceTransfer, kind, client, sum(workers), source),
            )
        joined, transfer = self._transfer
        if joined != servers:
            raise EngineError("a server of the NCCL group is gone, and a group cannot be joined again")
        await asyncio.to_thread(transfer.send, weights)

    async def checksums(self) -> dict[str, str]:
        found = await asyncio.gather(*[s.checksums() for s in self._servers if s.alive])
        if any(f != found[0] for f in found):
            raise EngineError("the servers hold different weights")
        return found[0] if found else {}

    def _name(self, version: int) -> str:
        return f"{self._trainer}-{version}"

    def _names(self, version: int) -> tuple[str, ...]:
        """Names under which a server may serve `version`: one that was just started has the first weights."""
        return (self._name(version), FIRST_VERSION) if version == 0 else (self._name(version),)

    # Servers that come and go.

    async def _watch(self, server: Server) -> None:
        """For as long as the engine lives: looks whether the server does, and brings it back when it does not."""
        while True:
            if server.alive:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.config.probe_seconds):  # wait_for may swallow a cancellation
                        await server.failed.wait()
                    continue
                try:
                    await server.healthy(PATIENCE * self.config.probe_seconds)
                except (EngineError, ConfigError) as error:
                    self._count(error)
                    self._fail(server, error)
                continue
            least, most = BACKOFF_SECONDS
            await asyncio.sleep(min(most, least * 2 ** min(server.strikes, 20)))
            try:
                await self._revive(server)
            except EngineDiedError as error:
                logger.warning("%s", error)
                return self._abandon(str(error))
            except (EngineError, ConfigError) as error:
                server.strikes += 1
                log = logger.warning if server.strikes == STRIKES else logger.info
                log("server %s does not serve yet: %s", server.url, error)

    async def _revive(self, server: Server) -> None:
        """Brings a server back: started again if it is ours and needs it, with the weights of now, and tried.

        Raises EngineDiedError if it has been started again too often.
        """
        if server.process and (not server.process.running or server.strikes >= STRIKES):
            if server.restarts >= self.config.restarts:
                raise EngineDiedError(
                    f"the vLLM server at {server.url} was started again {server.restarts} times since the last weight "
                    "update (engine.restarts) and does not stay"
                )
            server.restarts += 1
            self._counts["restarts"] += 1
            await server.process.start()
        await server.healthy(PATIENCE * self.config.probe_seconds)
        while True:
            version = self.version
            await self._prepare(server)
            async with self._updates:  # an update that is under way ends first
                if version == self.version:
                    return self._join(server)

    async def _prepare(self, server: Server) -> None:
        """A server's settings looked at, the weights of now loaded where it has others, and one token sampled."""
        backend = weight_sync.backend(self.config.weight_transfer)
        await server.connect(CONTROL_SECONDS, self.config.max_in_flight, backend)
        version = self.version
        if server.version not in self._names(version):
            if self._weights.version != version:
                raise ServerError(f"weights version {version} is not at hand now")
            await server.load(self._weights.update, self._name(version))
        trial = GenerateRequest((0,), 1, 1.0, 0, ())
        await server.sample(trial, 1, self.config.request_timeout, self.vocab_size, self._names(version), version)

    def _join(self, server: Server) -> None:
        server.alive, server.failed = True, asyncio.Event()
        self._standing.set()
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
        self._dispatch()

    def _fail(self, server: Server, error: Exception) -> None:
        """The server serves no longer; its requests are asked elsewhere."""
        if not server.alive:
            return
        logger.warning("server %s serves no longer: %s", server.url, error)
        server.alive = False
        server.strikes += 1
        server.failed.set()
        self._prefixes.forget(server)
        self._counts["failures"] += 1
        if not any(s.alive for s in self._servers):
            self._standing.clear()
            seconds = self.config.restart_timeout
            said = f"no vLLM server has served for {seconds:g} s; the last one: {error}"
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._give_up, said)

    def _abandon(self, why: str) -> None:
        """One server will not come back; with none left, nothing is waited for."""
        here = asyncio.current_task()
        if not any(s.alive for s in self._servers) and all(w.done() or w is here for w in self._watchers):
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._broken = f"{why}; start the servers again"
        for waiting in self._queue:
            if not waiting.placed.done():
                waiting.placed.set_exception(EngineDiedError(self._broken))
        self._queue.clear()
        self._standing.set()

    def _check(self) -> None:
        if self._broken:
            raise EngineDiedError(self._broken)

    # What is counted.

    def _count(self, error: Exception) -> None:
        for kind, name in ((GarbageError, "garbage"), (HungError, "hung"), (BusyError, "busy")):
            self._counts[name] += isinstance(error, kind)

    def pop_metrics(self) -> dict[str, float]:
        """What happened since the last call (docs/metrics.md)."""
        counts, self._counts = self._counts, collections.Counter()
        share = self._seen / self._prompted if self._prompted else math.nan
        waited, self._waited, self._seen, self._prompted = self._waited, 0.0, 0.0, 0.0
        names = ("retried_requests", "failures", "restarts", "garbage", "hung", "busy")
        return {
            "engine/servers": float(len(self._servers)),
            "engine/servers_alive": float(sum(s.alive for s in self._servers)),
            **{f"engine/{name}": float(counts[name]) for name in names},
            "engine/queued_seconds": waited,
            "engine/prefix_share": share,
        }


def _shutdown(loop: LoopThread, pool: _Pool) -> None:
    try:
        loop.call(pool.close())
    finally:
        loop.stop()
