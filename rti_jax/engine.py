"""The engine that samples: one protocol, vLLM beside the learner (here) or vLLM servers (endpoints.py).

Token ids in, token ids and their log-probabilities out; the log-probabilities are at the sampling temperature. A
request's seed determines its tokens exactly, whatever else runs at the time. Every result says which version of the
weights sampled it, and never mixes two: an update waits for the requests that run.

`VLLMEngine` is vLLM's AsyncLLM with its engine in a spawned process (JAX is threaded, so never forked). It owns a
thread with an event loop, so that it can be used from any loop, and samples while the main thread is busy in JAX.
What makes it start fast on CPU, measured with a model of 0.1M parameters: the worker inside the engine process instead
of a third one (28 s -> 20 s, it would import everything again), no torch.compile of the sampler's helpers (2.5 s warm,
19 s the first time on a machine), a cache no larger than needed (3 s per GiB are spent on clearing it).
"""

import asyncio
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
from typing import Protocol

import numpy as np

from rti_jax import weight_sync
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread
from rti_jax.vllm_settings import QUIET, arguments, environment

INSTALL = "vLLM is not installed: run `make install` in a checkout, or `pip install 'rti-jax[cpu]'` (cuda, tpu)"
SHUTDOWN_SECONDS = 10.0
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
    if config.engine.weight_transfer not in ("auto", "shared_memory"):
        raise ConfigError(
            f"engine.weight_transfer={config.engine.weight_transfer} needs a torch process group in the trainer, which "
            "a JAX learner has not; use auto or shared_memory"
        )
    if config.engine.kind == "server":
        from rti_jax.endpoints import ServerEngine

        return ServerEngine(model_path, config)
    return VLLMEngine(model_path, config)


class VLLMEngine:
    """vLLM in its own process on this machine. Use `close()`, or a `with` block around it."""

    def __init__(self, model_path: str | os.PathLike, config: Config):
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(INSTALL)
        self.version = 0
        self.model_path = pathlib.Path(model_path)
        self.dtype = config.model.dtype
        self._weights_dir = config.engine.weights_dir
        self._expected = weight_sync.expected_shapes(self.model_path)
        self._broken = ""
        self._requests = itertools.count()
        self._loop = LoopThread()
        with _STARTING:
            before = _engine_processes()
            try:
                self._llm = self._loop.call(_start(self.model_path, config))
            except BaseException as error:
                # Ctrl-C included: vLLM's constructor has not returned, so nothing else knows the process it started.
                _end(_engine_processes() - before)
                self._loop.stop()
                if isinstance(error, Exception) and not isinstance(error, ConfigError):
                    raise EngineError(f"vLLM did not start ({error}); VLLM_LOGGING_LEVEL=INFO shows its log") from error
                raise
            self._processes = _engine_processes() - before
        self.max_context = self._llm.model_config.max_model_len
        self.vocab_size = self._llm.model_config.get_vocab_size()
        self._lock = asyncio.Lock()  # belongs to the engine's loop
        self._finalizer = weakref.finalize(self, _shutdown, self._llm, self._loop, self._processes)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_alive()
        return await self._loop.wrap(self._generate(request))

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        self._check_alive()
        return await self._loop.wrap(self._update_weights(tensors, version))

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._finalizer()

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
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
        with self._translated():
            async for output in self._llm.generate(prompt, params, name):
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
        async with self._lock:
            self._check_alive()
            weight_sync.check_version(version, self.version)
            payload = weight_sync.payload(tensors, self._expected, self.dtype, self._weights_dir)
            with contextlib.ExitStack() as stack:
                path = await asyncio.to_thread(stack.enter_context, payload)
                try:
                    with self._translated():
                        await self._load(path, version)
                except BaseException as error:
                    self._broken = f"the update to weights version {version} failed ({error!r})"
                    if not isinstance(error, Exception):
                        raise
                    raise EngineDiedError(f"{self._broken}; start the engine again") from error
            self.version = version
            return version

    async def _load(self, path: pathlib.Path, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, aliases = self._llm, weight_sync.aliases(self._expected)
        await llm.pause_generation(mode="wait", clear_cache=True)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest({"path": str(path), "aliases": aliases}))
        await llm.finish_weight_update(str(version))
        if not await llm.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache, which still holds the old weights' keys and values")
        confirmed = await llm.get_weight_version()
        if confirmed != str(version):
            raise EngineError(f"vLLM confirms weights version {confirmed}, not {version}")
        await llm.resume_generation()

    def _check_alive(self) -> None:
        if not self._finalizer.alive:
            raise EngineDiedError("the engine is closed")
        if self._broken:
            raise EngineDiedError(f"{self._broken}; start the engine again")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """vLLM's exceptions as ours, one line each."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            self._broken = "vLLM's engine process died (VLLM_LOGGING_LEVEL=INFO shows its log)"
            raise EngineDiedError(f"{self._broken}; start the engine again") from error
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


async def _start(model_path: pathlib.Path, config: Config):
    """An AsyncLLM, ready; runs in the loop that will serve it."""
    with environment(QUIET):
        # vLLM warns through a logger that it has not configured yet while it is imported.
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    args = arguments(model_path, config, on_cpu=on_cpu)
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for key in args.keys() - set(known):
        near = difflib.get_close_matches(key, known, 1)
        raise ConfigError(f"engine.args.{key}: vLLM has no such argument" + (f"; nearest: {near[0]}" if near else ""))
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", weight_sync.OWNED_ENGINE: "1"}
    if on_cpu:
        variables |= {
            # One core stays free for the trainer's side of the rollouts, as vLLM itself does by default.
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process; AsyncLLM still spawns that one
        }
    if args.get("enforce_eager"):
        variables["TORCH_COMPILE_DISABLE"] = "1"
    with environment(QUIET | variables):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))


def _shutdown(llm, loop: LoopThread, processes: set) -> None:
    try:
        llm.shutdown(timeout=SHUTDOWN_SECONDS)
    finally:
        _end(processes)
        loop.stop()


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
