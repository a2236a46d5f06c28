"""vLLM servers of a model that a run never updates: a teacher behind `loss.teacher.urls`.

A plain `vllm serve MODEL` each, asked by OpenAI's route for completions, ids in and ids out: it also gives the
log-probabilities of a prompt, and needs nothing that a policy's server is started with (server.py).
"""

import asyncio
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rti_jax.config import ConfigError
from rti_jax.engine import GenerateRequest, GenerateResult, admit
from rti_jax.engine_errors import EngineDiedError, EngineError, ServerError, UnreachableError
from rti_jax.loop_thread import LoopThread
from rti_jax.server import CONTROL_SECONDS, Server

ATTEMPTS = 3  # of a request, each at the next server; seeds make a repeated request the same request
BACKOFF_SECONDS = 1.0  # before the second attempt, then doubled
REQUEST_SECONDS = 3600.0  # an episode's own time limit is the rollout's business
COMPLETIONS = "/v1/completions"


class FrozenServers:
    """They sample as an engine does, and score prompts; requests go to them in turn.

    Args:
      urls: base URLs. tokenizer: the policy's, which the servers' must equal. concurrency: requests at once.

    Raises:
      ConfigError: a server encodes text into other ids. EngineError: it does not answer.
    """

    PROBE = 'The quick brown fox, 12.5 km; naïve Łódź 東京 \n<|im_start|>assistant\n{"name": [1, -2]}<|im_end|>'

    def __init__(self, urls: Sequence[str], tokenizer: Any, concurrency: int):
        self.version = 0
        self.vocab_size = len(tokenizer)
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._loop, servers := [])
        try:
            self._loop.call(self._connect(servers, urls, tokenizer, concurrency))
        except BaseException:
            self._finalizer()
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises ContextLengthError if the prompt leaves no room, EngineDiedError if no server can be reached."""
        return await self._loop.wrap(self._generate(request))

    def score(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """log p of every id given the ids before it, at temperature 1, float32 [len(row)] each; 0 for a row's first."""
        return self._loop.call(self._score_all(rows))

    async def close(self) -> None:
        """Closes the connections; the servers go on."""
        await asyncio.to_thread(self._finalizer)

    async def _connect(self, servers: list, urls: Sequence[str], tokenizer: Any, concurrency: int) -> None:
        servers += [Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._turns, self._slots = itertools.cycle(servers), asyncio.Semaphore(concurrency)
        models = [(await server.call("GET", "/v1/models", CONTROL_SECONDS))["data"][0] for server in servers]
        self._model = models[0]["id"]
        self.max_context = min(model["max_model_len"] for model in models)
        ids = tokenizer.encode(self.PROBE, add_special_tokens=False)
        body = {"model": self._model, "prompt": self.PROBE, "add_special_tokens": False}
        for server in servers:
            if (await server.call("POST", "/tokenize", CONTROL_SECONDS, body))["tokens"] != ids:
                raise ConfigError(f"{server.url}: this model has another tokenizer than the policy")

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        tokens = admit(request, self.max_context, self.vocab_size)
        return _sampled(await self._complete(_body(self._model, request, tokens)), request.role, self.version)

    async def _score_all(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return list(await asyncio.gather(*map(self._score_one, rows)))

    async def _score_one(self, row: Sequence[int]) -> np.ndarray:
        if len(row) >= self.max_context:  # one token has to be sampled after it
            raise ConfigError(
                f"a row of {len(row)} tokens does not fit the teacher's servers: start them with --max-model-len "
                f"{len(row) + 1} or more"
            )
        body = {"model": self._model, "prompt": list(row), "max_tokens": 1, "prompt_logprobs": 0}
        choice = await self._complete(body)
        found = zip(choice["prompt_logprobs"][1:], row[1:], strict=True)
        return np.asarray([0.0, *(at[str(token)]["logprob"] for at, token in found)], np.float32)

    async def _complete(self, body: dict[str, Any]) -> Mapping[str, Any]:
        """The one choice of a completion by the next server, or by the one after it where that one cannot answer."""
        async with self._slots:
            for attempt in range(1, ATTEMPTS + 1):
                server = next(self._turns)
                try:
                    return (await server.call("POST", COMPLETIONS, REQUEST_SECONDS, body))["choices"][0]
                except ServerError as error:
                    if attempt == ATTEMPTS:
                        # Where servers answer at all, this request has failed and the next one may not.
                        kind = EngineDiedError if isinstance(error, UnreachableError) else EngineError
                        raise kind(str(error)) from error
                    await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable")


def _body(model: str, request: GenerateRequest, tokens: int) -> dict[str, Any]:
    """Of a completion, ids in and out; all that a server may have defaults for is said."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
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


def _close(loop: LoopThread, servers: list) -> None:
    async def close() -> None:
        for server in servers:
            await server.close()

    loop.call(close())
    loop.stop()
