"""What runs inside vLLM's processes: receiving the learner's weights, and living and dying with the trainer.

vLLM loads `register` in every process it starts, through the entry point group `vllm.general_plugins` of this
package, so that spawned workers and `vllm serve` find it. The trainer's side of the transfer is in weight_sync.py.
"""

import dataclasses
import glob
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from rti_jax.weight_sync import BACKEND, OWNED_ENGINE

EXIT_SECONDS = 10.0  # what an engine without a trainer gets for a clean end


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update names its own files."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update.

    Attributes:
      path: a safetensors file that this process can read, in shared memory or on a shared file system; empty for the
        model folder that this engine was started from.
      aliases: names to load a second time under another name, {"lm_head.weight": "model.embed_tokens.weight"} for
        tied models: vLLM's layerwise reload would otherwise leave the head at its old value.
    """

    path: str
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)


class SharedMemoryWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads checkpoint-format tensors from a safetensors file into the worker's model.

    Packed and sharded parameters are vLLM's business: the tensors go through the model's own `load_weights`, inside
    a layerwise reload (https://docs.vllm.ai/en/latest/training/layerwise/).
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No handshake."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        files = (
            [update_info.path] if update_info.path else sorted(glob.glob(f"{self.model_config.model}/*.safetensors"))
        )
        with disable_mtp_completeness_check():
            self.model.load_weights(_tensors(files, update_info.aliases))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _tensors(files: Sequence[str], aliases: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    targets: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        targets.setdefault(name, []).append(alias)
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                for target in (name, *targets.get(name, ())):
                    yield target, tensor


def register() -> None:
    """Entry point: makes the transfer backend known to vLLM; called once or more in every vLLM process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightTransfer)
    if os.environ.get(OWNED_ENGINE) and multiprocessing.parent_process() is not None:
        _follow_trainer()


def _follow_trainer() -> None:
    """In an engine process that a trainer started: only the trainer ends it, and it never outlives the trainer.

    Ctrl-C in a terminal reaches the whole process group; the trainer must still be able to finish its step and save,
    so the engine ignores it and waits for the trainer's close().
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not any(t.name == OWNED_ENGINE for t in threading.enumerate()):
        threading.Thread(target=_end_with_parent, name=OWNED_ENGINE, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_SECONDS)
    os._exit(1)
