"""Several runs, one after another, on one engine: starting vLLM takes longer than pushing a small model's weights."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from rti_jax.engine import Engine, GenerateRequest, GenerateResult


class EngineSession:
    """An engine as one run sees it: version 0 is the weights that the run starts from, `close()` leaves it running.

    Only the newest session of an engine may be used.
    """

    def __init__(self, engine: Engine, base: int):
        self._engine, self._base = engine, base

    @classmethod
    async def begin(cls, engine: Engine, tensors: Iterable[tuple[str, np.ndarray]]) -> "EngineSession":
        """Serves `tensors` (Hugging Face names, exactly the model's) as the session's version 0."""
        engine.pop_metrics()  # the former run's
        return cls(engine, await engine.update_weights(tensors, engine.version + 1))

    @property
    def version(self) -> int:
        return self._engine.version - self._base

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await self._engine.generate(request)
        return dataclasses.replace(result, policy_version=result.policy_version - self._base)

    async def update_weights(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> int:
        return await self._engine.update_weights(tensors, self._base + version) - self._base

    async def checksums(self) -> dict[str, str]:
        return await self._engine.checksums()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake_up(self) -> None:
        await self._engine.wake_up()

    def pop_metrics(self) -> dict[str, float]:
        return self._engine.pop_metrics()

    async def close(self) -> None:
        """Nothing: the engine is its owner's."""
