"""Models behind HTTP: vLLM servers of the policy or of a teacher, and any OpenAI-compatible endpoint in a role.

A policy's server is a `vllm serve` of the same model folder, on a machine where rti-jax is installed (its plugin
receives the weights), started as

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \\
        --weight-transfer-config '{"backend": "rti_shared_memory"}'

(on CPU also `--no-enable-chunked-prefill --enforce-eager`: engine.py says why). The routes of the weight update exist
in that mode only, so keep such a server on a trusted network.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from rti_jax import weight_sync
from rti_jax.config import Config, ConfigError
from rti_jax.engine import GenerateRequest, GenerateResult, admit
from rti_jax.engine_errors import EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread
from rti_jax.vllm_settings import text_config

ATTEMPTS = 3  # of a request whose connection fails; seeds make a repeated request the same request
GENERATE_SECONDS = 3600.0  # an episode's own time limit is the rollout's business
CONTROL_SECONDS = 600.0


class ServerEngine:
    """The Engine protocol over vLLM servers that share the requests in turn.

    Versions are exact because an update starts when the last request has been answered, and no request is sent before
    it ends. Payloads go through shared memory; for servers on other machines set `engine.weights_dir` to a folder
    that all of them see.
    """

    def __init__(self, model_path: str | os.PathLike, config: Config):
        self.version = 0
        self.dtype = config.model.dtype
        self.vocab_size = text_config(pathlib.Path(model_path))["vocab_size"]
        self._expected = weight_sync.expected_shapes(pathlib.Path(model_path))
        self._weights_dir = config.engine.weights_dir
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in config.engine.urls]
        self._broken = ""
        self._running = 0
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._loop, clients := [])
        try:
            self._loop.call(self._connect(clients, config.rollout.concurrency, config.sampling.max_context))
        except BaseException:
            self._finalizer()
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._loop.wrap(self._generate(request))

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        return await self._loop.wrap(self._update_weights(tensors, version))

    async def close(self) -> None:
        """Closes the connections; the servers go on."""
        await asyncio.to_thread(self._finalizer)

    async def _connect(self, clients: list, concurrency: int, max_context: int) -> None:
        limits = httpx.Limits(max_connections=concurrency)
        timeout = httpx.Timeout(GENERATE_SECONDS, connect=30.0, pool=None)
        clients += [httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) for url in self._urls]
        self._clients, self._turns = clients, itertools.cycle(clients)
        self._idle = asyncio.Condition()
        self._updating = asyncio.Lock()
        models = [(await _call(client, "GET", "/v1/models"))["data"][0] for client in clients]
        self._model = models[0]["id"]
        self.max_context = min(max_context, *(model["max_model_len"] for model in models))
        for client in clients:
            await self._check_settings(client)
        self.version = max([_number(await self._served(client)) for client in clients])

    async def _check_settings(self, client: httpx.AsyncClient) -> None:
        info = await _call(client, "GET", "/server_info?config_format=json", missing=_DEV_MODE)
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(
                f"{client.base_url}: start the server with --logprobs-mode processed_logprobs, not {mode}"
            )
        transfer = info["vllm_config"]["weight_transfer_config"]
        if not transfer or transfer["backend"] != weight_sync.BACKEND:
            raise ConfigError(
                f"{client.base_url}: start it with --weight-transfer-config "
                f"'{json.dumps({'backend': weight_sync.BACKEND})}'"
            )

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        body = _sampling(self._model, request, admit(request, self.max_context, self.vocab_size))
        async with self._admitted() as version:
            choice = (await _try_in_turn(self._turns, body))["choices"][0]
        return _sampled(choice, request.role, version)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[int]:
        """Counts a request as running, once no update is under way; yields the version that answers it."""
        async with self._updating:
            if self._broken:
                raise EngineDiedError(self._broken)
            self._running += 1
        try:
            yield self.version
        finally:
            self._running -= 1
            async with self._idle:
                self._idle.notify_all()

    async def _update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        async with self._updating:
            if self._broken:
                raise EngineDiedError(self._broken)
            weight_sync.check_version(version, self.version)
            payload = weight_sync.payload(tensors, self._expected, self.dtype, self._weights_dir)
            with contextlib.ExitStack() as stack:
                path = await asyncio.to_thread(stack.enter_context, payload)
                async with self._idle:
                    await self._idle.wait_for(lambda: not self._running)
                for client in self._clients:
                    await self._check_served(client)
                try:
                    await asyncio.gather(*[self._load(client, path, version) for client in self._clients])
                except BaseException as error:
                    self._broken = f"the update to weights version {version} failed ({error}); restart the servers"
                    if not isinstance(error, Exception):
                        raise
                    raise EngineDiedError(self._broken) from error
            self.version = version
            return version

    async def _load(self, client: httpx.AsyncClient, path: pathlib.Path, version: int) -> None:
        update = {"path": str(path), "aliases": weight_sync.aliases(self._expected)}
        await _call(client, "POST", "/pause?mode=wait", missing=_DEV_MODE)
        await _call(client, "POST", "/start_weight_update")
        await _call(client, "POST", "/update_weights", json={"update_info": update})
        await _call(client, "POST", "/finish_weight_update", json={"weight_version": str(version)})
        if not (await _call(client, "POST", "/reset_prefix_cache"))["success"]:
            raise EngineError(f"{client.base_url} did not reset its prefix cache")
        if (confirmed := await self._served(client)) != str(version):
            raise EngineError(f"{client.base_url} confirms weights version {confirmed}, not {version}")
        await _call(client, "POST", "/resume")

    async def _served(self, client: httpx.AsyncClient) -> str:
        return (await _call(client, "GET", "/weight_info", missing=_DEV_MODE))["weight_version"]

    async def _check_served(self, client: httpx.AsyncClient) -> None:
        served = _number(await self._served(client))
        if served != self.version:
            self._broken = (
                f"{client.base_url} serves weights version {served}, not {self.version}: it was restarted or updated "
                "by another trainer, so answers since the last update may be of the wrong weights"
            )
            raise EngineDiedError(self._broken)


class FrozenServers:
    """vLLM servers of a teacher, never updated (a plain `vllm serve MODEL` each): they sample, and score prompts.

    Args:
      urls: base URLs; they share the requests in turn. tokenizer: the policy's, which the servers' must equal.

    Raises:
      ConfigError: a server encodes text into other ids. EngineError: it does not answer.
    """

    PROBE = 'The quick brown fox, 12.5 km; naïve Łódź 東京 \n<|im_start|>assistant\n{"name": [1, -2]}<|im_end|>'

    def __init__(self, urls: Sequence[str], tokenizer: Any, concurrency: int):
        self.version = 0
        self.vocab_size = len(tokenizer)
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._loop, clients := [])
        try:
            self._loop.call(self._connect(clients, urls, tokenizer, concurrency))
        except BaseException:
            self._finalizer()
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._loop.wrap(self._generate(request))

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        raise EngineError("a teacher's servers are never updated")

    def score(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """log p of every id given the ids before it, at temperature 1, float32 [len(row)] each; 0 for a row's first."""
        return self._loop.call(self._score_all(rows))

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    async def _connect(self, clients: list, urls: Sequence[str], tokenizer: Any, concurrency: int) -> None:
        limits, timeout = httpx.Limits(max_connections=concurrency), httpx.Timeout(GENERATE_SECONDS, connect=30.0)
        bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
        clients += [httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) for url in bases]
        self._turns, self._slots = itertools.cycle(clients), asyncio.Semaphore(concurrency)
        models = [(await _call(client, "GET", "/v1/models"))["data"][0] for client in clients]
        self._model = models[0]["id"]
        self.max_context = min(model["max_model_len"] for model in models)
        ids = tokenizer.encode(self.PROBE, add_special_tokens=False)
        body = {"model": self._model, "prompt": self.PROBE, "add_special_tokens": False}
        for client in clients:
            if (await _call(client, "POST", "/tokenize", json=body))["tokens"] != ids:
                raise ConfigError(f"{client.base_url}: this model has another tokenizer than the policy")

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        body = _sampling(self._model, request, admit(request, self.max_context, self.vocab_size))
        return _sampled((await _try_in_turn(self._turns, body))["choices"][0], request.role, self.version)

    async def _score_all(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return list(await asyncio.gather(*map(self._score_one, rows)))

    async def _score_one(self, row: Sequence[int]) -> np.ndarray:
        if len(row) >= self.max_context:  # one token has to be sampled after it
            raise ConfigError(
                f"a row of {len(row)} tokens does not fit the teacher's servers: start them with --max-model-len "
                f"{len(row) + 1} or more"
            )
        body = {"model": self._model, "prompt": list(row), "max_tokens": 1, "prompt_logprobs": 0}
        async with self._slots:
            choice = (await _try_in_turn(self._turns, body))["choices"][0]
        found = zip(choice["prompt_logprobs"][1:], row[1:], strict=True)
        return np.asarray([0.0, *(at[str(token)]["logprob"] for at, token in found)], np.float32)


class ChatEndpoint:
    """A model behind an OpenAI-compatible endpoint that plays a role: messages and tools in, text out.

    Args:
      url: base URL, with /v1. model: name there; empty takes the endpoint's first.
      key: API key; empty is $OPENAI_API_KEY, or none.
    """

    def __init__(self, url: str, model: str = "", *, key: str = "", timeout: float = 300.0, retries: int = 2):
        import openai

        self.url, self.model = url, model
        self._loop = LoopThread()
        key = key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries)
        self._finalizer = weakref.finalize(self, _close, self._loop, [self._client])

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
    ) -> str:
        """The reply's text; calls that the endpoint has parsed come back as <tool_call> blocks after it.

        Raises:
          EngineError: the endpoint failed, after retries; one line that names it.
        """
        arguments: dict[str, Any] = {
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({"tools": list(tools)} if tools else {}),
            **({"seed": seed} if seed is not None else {}),
        }
        return await self._loop.wrap(self._complete(arguments))

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    async def _complete(self, arguments: dict[str, Any]) -> str:
        import openai

        try:
            if not self.model:
                self.model = (await self._client.models.list()).data[0].id
            reply = await self._client.chat.completions.create(model=self.model, **arguments)
        except openai.OpenAIError as error:
            raise EngineError(f"endpoint {self.url}: {_one_line(error)}") from error
        message = reply.choices[0].message
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n'
            "</tool_call>"
            for call in message.tool_calls or []
        ]
        return "\n".join([*([message.content] if message.content else []), *calls])


def _sampling(model: str, request: GenerateRequest, max_tokens: int) -> dict[str, Any]:
    """Body of a /v1/completions request: ids in, ids and their log-probabilities out."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        # A server adds its model folder's sampling defaults to what a request leaves out.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _sampled(choice: Mapping[str, Any], role: str, version: int) -> GenerateResult:
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"a server ended a {role} request with {choice['finish_reason']!r}")
    logprobs = tuple(choice["logprobs"]["token_logprobs"])
    return GenerateResult(tuple(choice["token_ids"]), logprobs, choice["finish_reason"], version)


async def _try_in_turn(clients: Iterator[httpx.AsyncClient], body: dict) -> dict:
    """A completion by the next client, or by the one after it where that one cannot be reached."""
    for attempt in range(ATTEMPTS):
        client = next(clients)
        try:
            return await _call(client, "POST", "/v1/completions", json=body)
        except EngineDiedError:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(2.0**attempt)
    raise AssertionError("unreachable")


_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 (the weight update's routes exist only then)"


async def _call(client: httpx.AsyncClient, method: str, path: str, *, json: Any = None, missing: str = "") -> Any:
    """A JSON request to a server; EngineDiedError if it cannot be reached, EngineError with its words if it refuses."""
    seconds = {} if path == "/v1/completions" else {"timeout": CONTROL_SECONDS}
    try:
        response = await client.request(method, path, json=json, **seconds)
    except httpx.TransportError as error:
        raise EngineDiedError(f"server {client.base_url} cannot be reached: {_one_line(error)}") from error
    if response.status_code == 404 and missing:
        raise ConfigError(f"{client.base_url}: {missing}")
    if response.is_error:
        raise EngineError(f"server {client.base_url}{path}: {response.status_code} {_one_line(response.text)}")
    return response.json()


def _number(served: str) -> int:
    """Servers name their versions by a string; "default" until the first update."""
    return 0 if served == "default" else int(served)


def _one_line(text: Any) -> str:
    return " ".join((str(text) or repr(text)).split())[:300]


def _close(loop: LoopThread, clients: list) -> None:
    async def close() -> None:
        for client in clients:
            await (client.aclose() if isinstance(client, httpx.AsyncClient) else client.close())

    loop.call(close())
    loop.stop()
