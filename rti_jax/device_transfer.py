"""New weights between devices by vLLM's own engines: NCCL, and CUDA IPC on one host. Written to their API, not run.

vLLM's trainer side drives a whole update (start, send, finish) through a client; ours is every engine at once. Tensors
go layer by layer through host memory onto the trainer's GPU, and from there.
"""

import asyncio
import concurrent.futures
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rti_jax import weight_sync

Calls = Callable[[str, dict[str, Any]], Coroutine]  # one engine: a step of an update and its arguments


def calls(llm) -> Calls:
    """An AsyncLLM's steps of an update."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    requests = {
        "init_weight_transfer_engine": WeightTransferInitRequest,
        "update_weights": WeightTransferUpdateRequest,
    }

    async def call(step: str, arguments: dict[str, Any]) -> None:
        method = getattr(llm, step)
        await (method(requests[step](**arguments)) if step in requests else method(**arguments))

    return call


class NamedTensors(WeightSource):
    """What vLLM's trainer side sends: Hugging Face names and tensors in the serving dtype, on the trainer's device.

    Args:
      shapes: in the order in which the tensors will come. aliases: extra names of a tensor, after its own.

    Attributes:
      tensors: of the next update (`weight_sync.FlaxWeights`).
    """

    def __init__(self, shapes: weight_sync.Shapes, dtype: str, aliases: Mapping[str, str], device: str = "cuda"):
        self.tensors: Iterable[tuple[str, np.ndarray]] = ()
        self._dtype, self._device = getattr(torch, dtype), device
        self._names = {n: [n, *(a for a, of in aliases.items() if of == n)] for n in shapes}
        self._shapes = shapes

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, self._dtype, shape) for of, shape in self._shapes.items() for n in self._names[of]]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for of, array in self.tensors:
            tensor = torch.from_numpy(np.array(array, np.float32)).to(self._device, self._dtype)
            for name in self._names[of]:
                yield name, tensor


class Client:
    """vLLM's weight-sync client over several engines: each step in all of them at once.

    Args:
      calls: one for each engine, run in `loop`. workers: of each engine; their ranks follow one another.
    """

    def __init__(self, calls: Sequence[Calls], workers: Sequence[int], loop: asyncio.AbstractEventLoop):
        self._calls, self._loop = calls, loop
        self._offsets = [sum(workers[:i]) for i in range(len(workers))]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        ranked = "rank_offset" in init_info
        infos = [init_info | ({"rank_offset": init_info["rank_offset"] + o} if ranked else {}) for o in self._offsets]
        self._all("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [{"update_info": update_info}] * len(self._calls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", [{"weight_version": weight_version}] * len(self._calls))

    def _all(self, step: str, arguments: Sequence[dict[str, Any]] | None = None) -> None:
        each = arguments or [{}] * len(self._calls)
        futures = [
            asyncio.run_coroutine_threadsafe(call(step, a), self._loop)
            for call, a in zip(self._calls, each, strict=True)
        ]
        for future in concurrent.futures.as_completed(futures):
            future.result()


class DeviceTransfer:
    """The trainer's end of the transfer; blocks, so use it in a thread other than the client's loop.

    Args:
      kind: "nccl" or "ipc". workers: in all engines together.
    """

    def __init__(self, kind: str, client: Client, workers: int, source: NamedTensors):
        self._source = source
        self._engine = WeightTransferTrainerFactory.trainer_init(_info(kind, workers), client=client, source=source)

    def send(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """One update in every engine, without its version."""
        self._source.tensors = tensors
        self._engine.send_weights()


def _info(kind: str, workers: int):
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0, master_address=socket.gethostbyname(socket.gethostname()), master_port=port, world_size=1 + workers
    )
