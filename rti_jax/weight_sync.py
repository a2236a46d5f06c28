"""Weights from the learner to the engine: parameters -> Hugging Face names -> safetensors in shared memory -> vLLM.

The order of an update, and why (each step's absence is a fault seen in practice):

1. `write_payload`: every tensor is written, in the engine's dtype, into one file in shared memory.
2. `check_names`: names and shapes must be exactly those of the model folder that the engine was started from. This
   comes before the engine is touched: vLLM ignores unknown names, and an update that fails half-way leaves an engine
   that can only be restarted.
3. The engine pauses (running requests end on the old weights, so that no answer mixes two versions), loads, finishes,
   resets its prefix cache, and resumes (engine.py).
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from models.safetensors_file import DTYPES, TAGS, Entry, Writer
from rti_jax.disk import writing
from rti_jax.engine_errors import EngineError, StaleVersionError, WeightMismatchError

BACKEND = "rti_shared_memory"  # name in vLLM's registry of weight transfer backends
DEVICE_BACKENDS = ("nccl", "ipc")  # vLLM's own, between devices
OWNED_ENGINE = "RTI_JAX_OWNED_ENGINE"  # environment variable: set in engine processes that a trainer started
PREFIX = "rti_jax_weights_"
SHARED_MEMORY = pathlib.Path("/dev/shm")
HEAD, EMBEDDING = "lm_head.weight", ".embed_tokens.weight"  # the latter after "model" or "model.language_model"

Shapes = dict[str, tuple[int, ...]]


async def sync(engine, model, params, version: int) -> int:
    """Brings the learner's `params` to `engine` as `version`; returns the version that the engine confirms.

    Args:
      engine: None on the hosts that have none: gathering the parameters takes all of them.
      model: models.hf.LanguageModel. params: its pytree of float32 master weights.
      version: above every version that the engine has served.

    Raises:
      WeightMismatchError, StaleVersionError: nothing was changed, the engine still serves the old weights.
    """
    weights = FlaxWeights(model, params)
    if engine is None:
        for _ in weights:
            pass
        return version
    return await engine.update_weights(weights, version)


class FlaxWeights:
    """A learner's weights as (Hugging Face name, float32 array), gathered a layer at a time whenever they are read.

    Attributes:
      shapes: of each name, in the order in which they come.
    """

    def __init__(self, model, params):
        self._model, self._params = model, params

    @property
    def shapes(self) -> Shapes:
        from models import names

        return {name: tensor.hf_shape for name, tensor, _ in names.entries(self._model.tensors)}

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        from models import hf

        return hf.to_hf(self._model, self._params)


def expected_shapes(model_path: str | os.PathLike) -> Shapes:
    """Names and shapes that an update of the model in `model_path` must have, from the headers of its safetensors.

    A tied model has no `lm_head.weight`, whether or not the folder holds a copy of it.

    Raises:
      EngineError: the folder holds no weights, or a model that is not supported.
    """
    from models import checkpoint_folder, hf  # here: this module is also imported in vLLM's processes

    folder = pathlib.Path(model_path)
    try:
        model = hf.describe(folder)
        with checkpoint_folder.Reader(folder) as reader:
            shapes = {n: e.shape for n, e in reader.entries.items() if not model.untrained(n)}
    except ValueError as error:
        raise EngineError(str(error)) from error
    if model.config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    return shapes


def aliases(expected: Shapes) -> dict[str, str]:
    """Extra names that the engine must load for a tied model: the head, from the embedding."""
    embedding = next((name for name in expected if name.endswith(EMBEDDING)), None)
    return {HEAD: embedding} if HEAD not in expected and embedding else {}


def check_names(sent: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightMismatchError unless names and shapes are equal; the message lists every difference."""
    problems = [f"missing {name}" for name in sorted(expected.keys() - sent.keys())]
    problems += [f"unexpected {name}" for name in sorted(sent.keys() - expected.keys())]
    problems += [
        f"{name} has shape {sent[name]}, not {expected[name]}"
        for name in sorted(sent.keys() & expected.keys())
        if sent[name] != expected[name]
    ]
    if problems:
        raise WeightMismatchError(f"weight update refused, the engine is unchanged: {'; '.join(problems)}")


def check_version(version: int, current: int) -> None:
    """Raises StaleVersionError unless `version` is above `current`."""
    if version <= current:
        raise StaleVersionError(f"weights version {version} offered, but the engine already serves {current}")


def backend(weight_transfer: str) -> str:
    """vLLM's name of the backend for `engine.weight_transfer`."""
    return weight_transfer if weight_transfer in DEVICE_BACKENDS else BACKEND


class Payload:
    """The weights that engines serve, on disk or in shared memory, for as long as one may have to load them again.

    An engine that is started anew has the weights of the model folder; version 0 is those, and needs no file.

    Attributes:
      version: of the weights at hand; -1 if there are none. expected: names and shapes.
    """

    def __init__(self, model_path: str | os.PathLike, dtype: str, directory: str = ""):
        self.version = 0
        self.expected = expected_shapes(model_path)
        self._dtype, self._directory = dtype, directory
        self._file, self._path = contextlib.ExitStack(), ""

    def write(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> None:
        """Replaces what is at hand; the former is removed first, so that there is room for one.

        Raises:
          WeightMismatchError: nothing is at hand then.
        """
        self.close()
        self.version = -1
        self._path = str(self._file.enter_context(payload(tensors, self.expected, self._dtype, self._directory)))
        self.version = version

    def pass_by(self, shapes: Shapes) -> None:
        """Weights of these names and shapes go to the engines by another way; nothing is at hand then.

        Raises:
          WeightMismatchError: they are not the model's.
        """
        check_names(shapes, self.expected)
        self.close()
        self.version = -1

    @property
    def update(self) -> dict[str, Any]:
        """What the engine's side loads (vllm_plugin.UpdateInfo). Raises EngineError if nothing is at hand."""
        if self.version < 0:
            raise EngineError("the weights of now are not at hand: refused, or sent from device to device")
        return {"path": self._path, "aliases": aliases(self.expected)}

    def close(self) -> None:
        """Removes the file."""
        self._file.close()
        self._path = ""


@contextlib.contextmanager
def payload(
    tensors: Iterable[tuple[str, np.ndarray]], expected: Shapes, dtype: str, directory: str = ""
) -> Iterator[pathlib.Path]:
    """Writes the tensors as one safetensors file, checks them against `expected`, yields the path, removes the file.

    Tensors are written as they arrive, so that a model streamed layer by layer is never held twice.

    Args:
      dtype: "float32" or "bfloat16", what the engine computes in.
      directory: where; empty is /dev/shm, or the temporary directory if /dev/shm is too small.

    Raises:
      WeightMismatchError: before the body runs.
    """
    entries = {name: Entry.of(TAGS[dtype], shape) for name, shape in expected.items()}
    folder = pathlib.Path(directory) if directory else _roomy_folder(sum(e.size for e in entries.values()))
    _remove_abandoned(folder)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=PREFIX, suffix=".safetensors")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # marks the file as in use, also across containers
        with writing(folder), open(descriptor, "wb", closefd=False) as stream:
            check_names(_write(stream, tensors, entries), expected)
        yield pathlib.Path(name)
    finally:
        pathlib.Path(name).unlink(missing_ok=True)
        os.close(descriptor)


def _write(stream, tensors, entries: Mapping[str, Entry]) -> Shapes:
    """Writes header and data of `entries`; returns the shapes seen. Tensors that do not fit are not written."""
    writer, sent = Writer(stream, entries), {}
    for name, tensor in tensors:
        sent[name] = tuple(tensor.shape)
        if name in entries and entries[name].shape == sent[name]:
            writer.write(name, np.asarray(tensor, DTYPES[entries[name].dtype]))  # to nearest even
    return sent


def _roomy_folder(size: int) -> pathlib.Path:
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.05 * size + 2**20:
        return SHARED_MEMORY
    return pathlib.Path(tempfile.gettempdir())


def _remove_abandoned(folder: pathlib.Path) -> None:
    """Removes payloads of trainers that were killed: older than a minute, and nobody holds a lock on them."""
    for file in folder.glob(f"{PREFIX}*.safetensors"):
        with contextlib.suppress(OSError), open(file, "rb", opener=_regular) as stream:
            if time.time() - os.fstat(stream.fileno()).st_mtime > 60:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()


def _regular(path: str, flags: int) -> int:
    """Opens a file of a folder that others may write to: a link is refused, and a pipe is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
