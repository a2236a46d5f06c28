"""One vLLM server: what it can take, what it is asked, and what counts as an answer.

Token ids in, token ids out, by vLLM's own route for that (`/inference/v1/generate`), whose answers say which weights
sampled them. Versions are named `TRAINER-N`: a server that was restarted, or was updated by another trainer, is found
out by its first answer, and none of its answers is used.
"""

import asyncio
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import httpx

from rti_jax.config import ConfigError
from rti_jax.engine import GenerateRequest, GenerateResult
from rti_jax.engine_errors import BusyError, EngineError, GarbageError, HungError, ServerError, UnreachableError
from rti_jax.server_process import ServerProcess

TOKENS = "/inference/v1/generate"
CONTROL_SECONDS = 600.0  # of a step of a weight update
FIRST_VERSION = "default"  # what vLLM calls the weights that it has started with
DEV_MODE = "start it by `rti serve`, or with VLLM_SERVER_DEV_MODE=1 (the weight update's routes exist only then)"
SCALE_OUT = "start it by `rti serve`, or with --enable-scale-out (the route for token ids exists only then)"


class Server:
    """A server and what the trainer knows of it.

    Attributes:
      alive: it serves the trainer's weights, as far as we know. failed: set when it no longer does.
      running: requests that it answers now. work: tokens that these may still cost.
      strikes: failures since its last good answer. restarts: since the last weight update.
      limit: requests that it is given at once. max_context: prompt and response.
      process: if the trainer started it.
    """

    def __init__(self, url: str, process: ServerProcess | None = None):
        self.url = url
        self.process = process
        self.alive, self.failed = False, asyncio.Event()
        self.running = self.work = self.strikes = self.restarts = 0
        self.limit, self.max_context, self.model, self.version = 1, 0, "", ""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(base_url=url, limits=limits)

    async def connect(self, seconds: float, limit: int | None, backend: str) -> None:
        """Asks for what it serves and how it was started.

        Raises:
          ConfigError: it was started otherwise than a policy's server must be. ServerError: it does not answer.
        """
        (model, *_) = (await self.call("GET", "/v1/models", seconds))["data"]
        info = (await self.call("GET", "/server_info?config_format=json", seconds, missing=DEV_MODE))["vllm_config"]
        mode, transfer = info["model_config"]["logprobs_mode"], info["weight_transfer_config"]
        if mode != "processed_logprobs":
            raise ConfigError(f"{self.url}: start the server with --logprobs-mode processed_logprobs, not {mode}")
        if not transfer or transfer["backend"] != backend:
            wanted = json.dumps({"backend": backend})
            raise ConfigError(f"{self.url}: start it with --weight-transfer-config '{wanted}'")
        replicas = info.get("parallel_config", {}).get("data_parallel_size", 1)
        self.limit = limit or info["scheduler_config"]["max_num_seqs"] * replicas
        self.model, self.max_context = model["id"], model["max_model_len"]
        self.version = await self.served(seconds)

    async def served(self, seconds: float = CONTROL_SECONDS) -> str:
        """The name of the weights version that it says it serves."""
        return (await self.call("GET", "/weight_info", seconds, missing=DEV_MODE))["weight_version"]

    async def healthy(self, seconds: float) -> None:
        """Raises ServerError unless it answers, and its engine lives."""
        await self.call("GET", "/health", seconds, text=True)

    async def sample(
        self,
        request: GenerateRequest,
        tokens: int,
        seconds: float,
        vocab_size: int,
        names: Collection[str],
        version: int,
    ) -> GenerateResult:
        """One answer, checked.

        Args:
          tokens: to ask for. seconds: it may take. names: of the weights that must have sampled it, as `version`.

        Raises:
          ServerError: there is none; another server may have one. EngineError: the request was refused.
        """
        body = {
            "model": self.model,
            "token_ids": list(request.prompt_ids),
            # All that a server may have defaults for is said.
            "sampling_params": {
                "max_tokens": tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "stop_token_ids": list(request.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
        }
        reply = await self.call("POST", TOKENS, seconds, body, missing=SCALE_OUT)
        return checked(reply, request, tokens, vocab_size, names, version, self.url)

    async def load(self, update: Mapping[str, Any], name: str) -> None:
        """New weights, confirmed, with nothing left of the old ones.

        Args:
          update: `weight_sync.Payload.update`. name: of their version.
        """
        await self.pause()
        await self.call("POST", "/start_weight_update", CONTROL_SECONDS)
        await self.call("POST", "/update_weights", CONTROL_SECONDS, {"update_info": dict(update)})
        await self.call("POST", "/finish_weight_update", CONTROL_SECONDS, {"weight_version": name})
        await self.confirm(name)

    async def pause(self) -> None:
        """Lets what runs end, and takes nothing new."""
        await self.call("POST", "/pause?mode=wait", CONTROL_SECONDS, missing=DEV_MODE)

    async def step(self, name: str, arguments: dict[str, Any]) -> None:
        """A step of an update that somebody else drives (device_transfer.Client)."""
        await self.call("POST", f"/{name}", CONTROL_SECONDS, arguments)

    async def workers(self) -> int:
        """Processes that take part in a transfer between devices."""
        return (await self.call("GET", "/get_world_size", CONTROL_SECONDS))["world_size"]

    async def finish(self, name: str) -> None:
        """The end of such an update."""
        await self.call("POST", "/update_weight_version", CONTROL_SECONDS, {"new_version": name})
        await self.confirm(name)

    async def confirm(self, name: str) -> None:
        """The end of an update: no old keys and values, the version confirmed, requests let in again."""
        if not (await self.call("POST", "/reset_prefix_cache", CONTROL_SECONDS))["success"]:
            raise ServerError(f"{self.url} did not reset its prefix cache")
        self.version = await self.served()
        if self.version != name:
            raise ServerError(f"{self.url} confirms weights version {self.version}, not {name}")
        await self.call("POST", "/resume", CONTROL_SECONDS)

    async def checksums(self) -> dict[str, str]:
        """A digest of every parameter as the workers hold it."""
        reply = await self.call("POST", "/weight_checker", CONTROL_SECONDS, {"action": "checksum"}, missing=DEV_MODE)
        return reply["checksums"]

    async def call(
        self, method: str, path: str, seconds: float, body: Any = None, *, missing: str = "", text: bool = False
    ) -> Any:
        """A JSON request.

        Args:
          missing: what to do where the route does not exist. text: any answer will do.

        Raises:
          ServerError: no answer in time, or one that says nothing about the request (busy, broken, not JSON).
          EngineError: the request was refused, in the server's words. ConfigError: the route is missing.
        """
        try:
            async with asyncio.timeout(seconds):
                response = await self.client.request(method, path, json=body, timeout=None)
        except TimeoutError as error:
            raise HungError(f"server {self.url}{path} did not answer within {seconds:g} s") from error
        except httpx.HTTPError as error:
            raise UnreachableError(f"server {self.url} cannot be reached: {one_line(error)}") from error
        status = response.status_code
        if status in (403, 404) and missing:
            raise ConfigError(f"{self.url}: {missing}")
        if response.is_error:
            kind = BusyError if status in (429, 503) else ServerError if status >= 500 else EngineError
            raise kind(f"server {self.url}{path}: {status} {one_line(response.text)}")
        if text:
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise GarbageError(f"server {self.url}{path} answers no JSON: {one_line(response.text[:80])}") from error

    async def close(self) -> None:
        await self.client.aclose()
        if self.process:
            await asyncio.to_thread(self.process.stop)


def checked(
    reply: Any,
    request: GenerateRequest,
    tokens: int,
    vocab_size: int,
    names: Collection[str],
    version: int,
    url: str,
) -> GenerateResult:
    """A server's answer as a result. Raises GarbageError for what cannot be one, ServerError for other weights."""
    try:
        (choice,) = reply["choices"]
        ids, content = tuple(choice["token_ids"]), choice["logprobs"]["content"]
        logprobs = tuple(float(step["logprob"]) for step in content)
        reason, spans = choice["finish_reason"], [span["version"] for span in choice["weight_versions"]]
        named = tuple(step["token_id"] for step in content)
    except (KeyError, TypeError, ValueError) as error:
        raise GarbageError(f"server {url}: an answer without {one_line(error)}") from error
    if reason not in ("stop", "length"):
        raise ServerError(f"server {url} ended a {request.role} request with {reason!r}")
    if set(spans) - set(names) or len(set(spans)) != 1:
        raise ServerError(
            f"{url} serves weights version {', '.join(spans)}, not {min(names)}: it was restarted, or updated by "
            "another trainer"
        )
    right = (
        1 <= len(ids) <= tokens
        and named == ids
        and all(type(i) is int and 0 <= i < vocab_size for i in ids)
        and all(value < 1e-3 and not math.isnan(value) for value in logprobs)
        and (reason == "length" or ids[-1] in request.stop_token_ids)
    )
    if not right:
        raise GarbageError(f"server {url}: {len(ids)} ids that end with {reason!r} are no answer to the request")
    return GenerateResult(ids, logprobs, reason, version)


def one_line(text: Any) -> str:
    return " ".join((str(text) or repr(text)).split())[:300]
