"""The engine that samples: one protocol, vLLM beside the learner (here) or vLLM servers (server_engine.py).

Token ids in, token ids and their log-probabilities out; the log-probabilities are at the sampling temperature. A
request's seed determines its tokens exactly, whatever else runs at the time. Every result says which version of the
weights sampled it, and never mixes two: an update waits for the requests that run. An engine that dies is started again
with the weights of now, and what it was asked is asked again: the same seeds give the same answers.

`VLLMEngine` is vLLM's AsyncLLM with its engine in a spawned process (JAX is threaded, so never forked). It owns a
thread with an event loop, so that it can be used from any loop, and samples while the main thread is busy in JAX.
What makes it start fast on CPU, measured with a model of 0.1M parameters: the worker inside the engine process instead
of a third one (28 s -> 20 s, it would import everything again), no torch.compile of the sampler's helpers (2.5 s warm,
19 s the first time on a machine), a cache no larger than needed (3 s per GiB are spent on clearing it).
"""

import asyncio
import collections
import contextlib
import dataclasses
import difflib
import importlib.util
import itertools
import logging
import multiprocessing
import os
import pathlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from rti_jax import weight_sync
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread
from rti_jax.vllm_settings import QUIET, arguments, environment, variables

INSTALL = "vLLM is not installed: run `make install` in a checkout, or `pip install 'rti-jax[cpu]'` (cuda, tpu)"
SHUTDOWN_SECONDS = 10.0
logger = logging.getLogger(__name__)
_STARTING = threading.Lock()  # one start at a time: it sets environment variables, and claims the new process


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One sample to draw.

    Attributes:
      prompt_ids: everything before the response. max_tokens: of the response; clipped to the context that is left.
      temperature: 0 is greedy. seed: determines the sample. stop_token_ids: sampling one of them ends the response.
      role: who asks, for statistics: "policy", "validator", "corrector", "verifier".
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    role: str = "policy"


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """A sampled response.

    Attributes:
      ids: as sampled, the terminal token included. logprobs: of `ids`, at the sampling temperature (greedy: at 1).
      finish_reason: "stop" (ends in a stop token) or "length". policy_version: the weights that sampled all of it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    policy_version: int


class Engine(Protocol):
    """What rollouts and the training loop know of an engine."""

    version: int

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises ContextLengthError if the prompt leaves no room, EngineDiedError if the engine is gone."""

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        """Serves `tensors` (Hugging Face names, exactly the model's) as `version`; returns the confirmed version."""

    async def checksums(self) -> dict[str, str]:
        """A digest of every parameter as the engine holds it; takes a while, for looking into a fault."""

    async def sleep(self) -> None:
        """Gives the engine's accelerator memory to the learner (`engine.sleep`); no request may run."""

    async def wake_up(self) -> None:
        """Takes it back."""

    def pop_metrics(self) -> dict[str, float]:
        """engine/... metrics since the last call."""

    async def close(self) -> None:
        """Stops everything the engine started; may be called twice."""


def make_engine(model_path: str | os.PathLike, config: Config) -> Engine:
    """Starts the engine that `config.engine` asks for; blocks until it can sample (may run in a thread).

    Args:
      model_path: Hugging Face folder of the policy; its weights are version 0.

    Raises:
      ConfigError: no such folder, vLLM missing, an unknown key in engine.args. EngineError: vLLM did not start.
    """
    if not (pathlib.Path(model_path) / "config.json").is_file():
        raise ConfigError(f"model.path={model_path} is not a Hugging Face folder: it has no config.json")
    if config.engine.kind == "server":
        from rti_jax.server_engine import ServerEngine

        return ServerEngine(model_path, config)
    return VLLMEngine(model_path, config)


def check_installed() -> None:
    """Raises ConfigError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(INSTALL)


class VLLMEngine:
    """vLLM in its own process on this machine. Use `close()`, or a `with` block around it."""

    def __init__(self, model_path: str | os.PathLike, config: Config):
        check_installed()
        self.version = 0
        self._config, self._model_path = config, pathlib.Path(model_path)
        self._weights = weight_sync.Payload(model_path, config.model.dtype, config.engine.weights_dir)
        self._broken = ""
        self._requests = itertools.count()
        self._counts: collections.Counter[str] = collections.Counter()
        self._restarts = self._starts = 0  # since the last weight update; in all
        self._loop = LoopThread()
        self._vllm = _VLLM()
        self._transfer: Any = None  # between devices, where engine.weight_transfer asks for it
        with _STARTING:
            before = _engine_processes()
            try:
                self._loop.call(self._vllm.start(self._model_path, config))
            except BaseException:
                # Ctrl-C is raised here, while vLLM's constructor goes on in the loop: nothing else knows its process.
                _end(_engine_processes() - before)
                self._loop.stop()
                raise
        self.max_context = self._vllm.llm.model_config.max_model_len
        self.vocab_size = self._vllm.llm.model_config.get_vocab_size()
        self._updates, self._starting = asyncio.Lock(), asyncio.Lock()  # belong to the engine's loop
        self._finalizer = weakref.finalize(self, _shutdown, self._vllm, self._loop, self._weights)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_alive()
        return await self._loop.wrap(self._generate(request))

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        self._check_alive()
        return await self._loop.wrap(self._update_weights(tensors, version))

    async def checksums(self) -> dict[str, str]:
        self._check_alive()
        workers = await self._loop.wrap(self._vllm.llm.compute_weight_checksums())
        return {name: digest for worker in workers for name, digest in worker.items()}

    async def sleep(self) -> None:
        if self._config.engine.sleep:
            await self._loop.wrap(self._vllm.llm.sleep(level=1, mode="wait"))

    async def wake_up(self) -> None:
        if self._config.engine.sleep:
            await self._loop.wrap(self._vllm.llm.wake_up())

    def pop_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, collections.Counter()
        return {f"engine/{name}": float(counts[name]) for name in ("retried_requests", "restarts")}

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._finalizer()

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        while True:
            start = self._starts
            try:
                return await self._sample(request)
            except EngineDiedError as error:
                await self._start_again(start, error)
                self._counts["retried_requests"] += 1

    async def _sample(self, request: GenerateRequest) -> GenerateResult:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=admit(request, self.max_context, self.vocab_size),
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the request alone says what ends it
            logprobs=0,  # of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        name = f"{request.role}-{next(self._requests)}"
        with _translated():
            async for output in self._vllm.llm.generate(prompt, params, name):
                final = output
        return self._result(final.outputs[0], request)

    def _result(self, output, request: GenerateRequest) -> GenerateResult:
        versions = {0 if span.version == "default" else int(span.version) for span in output.weight_versions}
        if len(versions) != 1:
            raise EngineError(f"a {request.role} response was sampled by several weights versions: {sorted(versions)}")
        ids = tuple(output.token_ids)
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a {request.role} request with {output.finish_reason!r}")
        logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs, ids, strict=True))
        return GenerateResult(ids, logprobs, output.finish_reason, versions.pop())

    async def _update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        async with self._updates:
            self._check_alive()
            weight_sync.check_version(version, self.version)
            devices = self._config.engine.weight_transfer in weight_sync.DEVICE_BACKENDS
            if devices:
                self._weights.pass_by(tensors.shapes)
            else:
                await asyncio.to_thread(self._weights.write, tensors, version)
            start = self._starts
            try:
                await (self._send(tensors, version) if devices else self._load())
            except Exception as error:
                # Half an update cannot be taken back: a new engine loads all of it.
                await self._start_again(
                    start, EngineDiedError(f"the update to weights version {version} failed ({error!r})")
                )
            except BaseException as error:
                self._broken = f"the update to weights version {version} was interrupted ({error!r})"
                raise
            self.version, self._restarts = version, 0
            return version

    async def _load(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, version = self._vllm.llm, str(self._weights.version)
        with _translated():
            await llm.pause_generation(mode="wait", clear_cache=True)
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(self._weights.update))
            await llm.finish_weight_update(version)
        await self._confirm(version)

    async def _send(self, weights: weight_sync.FlaxWeights, version: int) -> None:
        """An update by vLLM's own engine between devices (not run: it needs CUDA)."""
        llm, loop = self._vllm.llm, asyncio.get_running_loop()

        def send() -> None:
            from rti_jax import device_transfer

            if self._transfer is None:
                client = device_transfer.Client([device_transfer.calls(llm)], [0], loop)
                aliases = weight_sync.aliases(self._weights.expected)
                source = device_transfer.NamedTensors(weights.shapes, self._config.model.dtype, aliases)
                kind = self._config.engine.weight_transfer
                self._transfer = device_transfer.DeviceTransfer(kind, client, 0, source)
            self._transfer.send(weights)

        with _translated():
            await llm.pause_generation(mode="wait", clear_cache=True)
            await asyncio.to_thread(send)
            await llm.update_weight_version(str(version))
        await self._confirm(str(version))

    async def _confirm(self, version: str) -> None:
        """The end of an update: no old keys and values, the version confirmed, requests let in again."""
        llm = self._vllm.llm
        with _translated():
            if not await llm.reset_prefix_cache():
                raise EngineError(
                    "vLLM did not reset its prefix cache, which still holds the old weights' keys and values"
                )
            confirmed = await llm.get_weight_version()
            if confirmed != version:
                raise EngineError(f"vLLM confirms weights version {confirmed}, not {version}")
            await llm.resume_generation()

    async def _start_again(self, start: int, error: EngineDiedError) -> None:
        """A new engine with the weights of now, unless that has happened since `start`.

        Raises EngineDiedError if it has been tried `engine.restarts` times since the last weight update.
        """
        async with self._starting:
            if start != self._starts:
                return
            if self._broken or self._restarts >= self._config.engine.restarts:
                self._broken = self._broken or str(error)
                raise EngineDiedError(f"{self._broken}; start the engine again") from error
            logger.warning("%s; starting it again", error)
            self._restarts += 1
            self._counts["restarts"] += 1
            await asyncio.to_thread(self._vllm.end)
            await asyncio.to_thread(_STARTING.acquire)
            try:
                await self._vllm.start(self._model_path, self._config)
                if self._weights.version:
                    await self._load()
            except (EngineError, ConfigError) as again:
                self._broken = str(again)
                raise EngineDiedError(f"{error}, and does not start again: {again}") from again
            finally:
                _STARTING.release()
            self._starts += 1
            self._transfer = None

    def _check_alive(self) -> None:
        if not self._finalizer.alive:
            raise EngineDiedError("the engine is closed")
        if self._broken:
            raise EngineDiedError(f"{self._broken}; start the engine again")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """vLLM's exceptions as ours, one line each."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError("vLLM's engine process died (VLLM_LOGGING_LEVEL=INFO shows its log)") from error
    except ValueError as error:
        raise EngineError(f"vLLM refused a request: {error}") from error


def admit(request: GenerateRequest, max_context: int, vocab_size: int) -> int:
    """Checks a request before an engine sees it; returns the tokens to ask for.

    Returns:
      request.max_tokens, or what the context leaves.

    Raises:
      ContextLengthError: the context leaves nothing. EngineError: an empty prompt, or an id outside the vocabulary
        (which would end vLLM's engine: it has no tokenizer to check by).
    """
    ids, room = request.prompt_ids, max_context - len(request.prompt_ids)
    if room < 1:
        raise ContextLengthError(
            f"a {request.role} prompt of {len(ids)} tokens leaves no room in a context of {max_context}"
        )
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise EngineError(f"a {request.role} prompt is empty or has ids outside the vocabulary of {vocab_size}")
    return min(request.max_tokens, room)


def on_cpu() -> bool:
    """Whether the vLLM that is installed runs on CPU."""
    with environment(QUIET):
        # vLLM warns through a logger that it has not configured yet while it is imported.
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        from vllm.platforms import current_platform
    return current_platform.is_cpu()


def check_arguments(args: dict[str, Any]) -> None:
    """Raises ConfigError for an engine argument that vLLM does not have."""
    from vllm import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for key in args.keys() - set(known):
        near = difflib.get_close_matches(key, known, 1)
        raise ConfigError(f"engine.args.{key}: vLLM has no such argument" + (f"; nearest: {near[0]}" if near else ""))


def serve(flags: list[str]) -> None:
    """Runs vLLM's own server in this process, until it ends. (Its `vllm` command does not start where only the CPU
    build, a package of another name, is installed.)"""
    from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(flags)
    ServeSubcommand().validate(args)
    ServeSubcommand.cmd(args)


class _VLLM:
    """An AsyncLLM and the processes that it has started; may be started again after its end."""

    def __init__(self):
        self.llm: Any = None
        self.processes: set = set()

    async def start(self, model_path: pathlib.Path, config: Config) -> None:
        """Makes it ready, in the loop that will serve it.

        Raises:
          ConfigError: an argument that vLLM does not have. EngineError: vLLM did not start.
        """
        before = _engine_processes()
        try:
            self.llm = _make(model_path, config)
        except BaseException as error:
            _end(_engine_processes() - before)
            if isinstance(error, Exception) and not isinstance(error, ConfigError):
                raise EngineError(f"vLLM did not start ({error}); VLLM_LOGGING_LEVEL=INFO shows its log") from error
            raise
        self.processes = _engine_processes() - before

    def end(self) -> None:
        """Ends it; blocks."""
        try:
            # vLLM itself stops this task last, which until then may take the end of the process for a death and log it.
            if (outputs := self.llm.output_handler) is not None:
                outputs.get_loop().call_soon_threadsafe(outputs.cancel)
            self.llm.shutdown(timeout=SHUTDOWN_SECONDS)
        finally:
            _end(self.processes)


def _make(model_path: pathlib.Path, config: Config):
    cpu = on_cpu()
    with environment(QUIET):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    args = arguments(model_path, config, on_cpu=cpu)
    check_arguments(args)
    if config.engine.sleep and cpu:
        raise ConfigError("engine.sleep=true: vLLM has no sleep mode on CPU")
    with environment(QUIET | variables(args, on_cpu=cpu) | {weight_sync.OWNED_ENGINE: "1"}):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))


def _shutdown(vllm: _VLLM, loop: LoopThread, weights: weight_sync.Payload) -> None:
    try:
        vllm.end()
    finally:
        vllm.llm = None  # its destructor would complain at the interpreter's end
        loop.stop()
        weights.close()


def _engine_processes() -> set:
    return {process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")}


def _end(processes: set) -> None:
    """Ends child processes: asks, then kills."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(SHUTDOWN_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
