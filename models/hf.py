"""Hugging Face folders in and out: one entry point for every family.

A family is a module of this package that is listed in `FAMILIES` by its `model_type` and defines

    MODEL_TYPE, Config (from_hf(dict), to_hf() -> dict, vocab_size, tie_word_embeddings),
    Model(config, execution, rngs)    nnx.Module: tokens, positions, segment_ids [B, T] -> [B, T, D], final norm done
    tensors(config)                   its name table (models/names.py)
    UNTRAINED                         patterns of checkpoint tensors that it does not use and `save` copies through

Its parameters hold `embed_tokens.embedding` [V, D] and, if the embedding is not tied, `lm_head.kernel` [D, V].
"""

import dataclasses
import functools
import importlib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models import checkpoint_folder, names
from models.layers import Execution
from models.names import Params, Tensor

FAMILIES = {"qwen3": "models.qwen3"}


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A causal language model without its parameters: pure functions of a nested dict of arrays.

    Attributes:
      config: the family's Config. model_type: Hugging Face's name of the family.
      source: folder that the model came from; None for a new one.
      execution: dtype, attention, rematerialisation, layer loop and mesh.
    """

    config: Any
    model_type: str
    source: Path | None
    execution: Execution

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The name table."""
        return family(self.model_type).tensors(self.config)

    @functools.cached_property
    def _graph(self) -> nnx.GraphDef:
        module = family(self.model_type).Model
        return nnx.graphdef(nnx.eval_shape(lambda: module(self.config, self.execution, nnx.Rngs(0))))

    @property
    def mesh(self) -> Mesh | None:
        return self.execution.mesh

    def hidden(self, params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] after the final norm, in the compute dtype.

        Args:
          tokens, positions, segment_ids: int32 [B, T]; positions restart in each segment, segment 0 is padding.
        """
        with jax.default_matmul_precision(self.execution.precision):
            return nnx.merge(self._graph, params)(tokens, positions, segment_ids)

    def head(self, params: Params) -> jax.Array:
        """Output projection [D, V], float32; the transposed embedding where it is tied."""
        if self.config.tie_word_embeddings:
            return params["embed_tokens"]["embedding"].T
        return params["lm_head"]["kernel"]

    def shardings(self) -> Params:
        """Sharding of every parameter, shaped like the parameters."""
        return names.shardings(self.tensors, self.mesh)


def family(model_type: str) -> types.ModuleType:
    """The module of a family. Raises ValueError that names an unsupported model type."""
    if model_type not in FAMILIES:
        raise ValueError(f"model type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[model_type])


def describe(path: str | Path, **execution: Any) -> LanguageModel:
    """The model of a folder's config.json, without its parameters.

    Args:
      execution: fields of `Execution`.

    Raises ValueError that names a missing folder or file, an unsupported model type or an unsupported setting.
    """
    path = Path(path)
    raw = checkpoint_folder.read_config(path)
    model_type = raw.get("model_type", "")
    try:
        config = family(model_type).Config.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return LanguageModel(config, model_type, path, Execution(**execution))


def load(
    path: str | Path,
    *,
    dtype: str = "float32",
    attention: str = "auto",
    remat: str = "none",
    scan_layers: bool = True,
    mesh: Mesh | None = None,
) -> tuple[LanguageModel, Params]:
    """The model of a Hugging Face folder and its parameters: float32 masters, born on their shards of `mesh`.

    Tensors are read one by one, and of each only the part that a device holds.

    Raises ValueError that lists every missing, unexpected and mis-shaped tensor.
    """
    model = describe(path, dtype=dtype, attention=attention, remat=remat, scan_layers=scan_layers, mesh=mesh)
    with checkpoint_folder.Reader(Path(path)) as reader:
        _check(model, reader)
        placed = model.shardings()
        arrays = {t.path: _read(reader, t, names.get(placed, t.path)) for t in model.tensors}
    return model, names.nest(arrays)


def init(
    config: Any, rng: jax.Array, *, source: str | Path | None = None, **execution: Any
) -> tuple[LanguageModel, Params]:
    """A new model with random parameters, for warm starts.

    Args:
      config: a family's Config, or a folder (config.json, tokenizer files; no weights needed).
      rng: JAX key.
      source: folder whose tokenizer files `save` copies; a folder given as `config` is its own source.
      execution: fields of `Execution`.

    Returns (LanguageModel, params), params born on their shards.
    """
    if isinstance(config, str | Path):
        model = describe(config, **execution)
    else:
        model_type = importlib.import_module(type(config).__module__).MODEL_TYPE
        model = LanguageModel(config, model_type, None, Execution(**execution))
    model = dataclasses.replace(model, source=Path(source) if source else model.source)

    @functools.partial(jax.jit, out_shardings=model.shardings())
    def create(key):
        module = family(model.model_type).Model(model.config, model.execution, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    return model, create(rng)


def to_hf(model: LanguageModel, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 array), layer by layer, by the table that `load` reads.

    A tied model yields no lm_head.weight. On several hosts every process must iterate.
    """
    for name, tensor, index in names.entries(model.tensors):
        array = names.get(params, tensor.path)
        if _on_host(array):
            array = np.asarray(array)  # no copy, where slicing a JAX array would be a dispatch per layer
        value = _to_host(array if index is None else array[index])
        yield name, value.T if tensor.transpose else value


def save(
    model: LanguageModel,
    params: Params,
    out_dir: str | Path,
    *,
    source: str | Path | None = None,
    dtype: str | None = None,
) -> Path:
    """Writes a complete Hugging Face folder; it appears under its name only when it is complete.

    Args:
      source: folder whose config keys, tokenizer, chat template, generation_config, licence and readme are copied
        (default: the model's own).
      dtype: of the written tensors, "float32" or "bfloat16"; default the source's, float32 without a source. bfloat16
        drops updates smaller than 1/256 of a weight.

    Raises ValueError if `out_dir` exists and is not a model folder. On several hosts every process must call it.
    """
    source = Path(source) if source else model.source
    raw = checkpoint_folder.read_config(source) if source else {}
    dtype = dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return checkpoint_folder.write(
        Path(out_dir),
        config=_config_json(model, raw, dtype),
        shapes={name: t.hf_shape for name, t, _ in names.entries(model.tensors)},
        tensors=to_hf(model, params),
        dtype=dtype,
        source=source,
        copied=family(model.model_type).UNTRAINED,
    )


def _config_json(model: LanguageModel, raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json: the source's as it stands if it describes this model, ours over the source's other keys if not."""
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    if raw.get("model_type") == model.model_type and type(model.config).from_hf(raw) == model.config:
        return {**raw, key: dtype}
    kept = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling", "auto_map")}
    return {**kept, **model.config.to_hf(), key: dtype}


def _check(model: LanguageModel, reader: checkpoint_folder.Reader) -> None:
    """Compares names and shapes with the table; every difference is in the one error."""
    expected = {name: t.hf_shape for name, t, _ in names.entries(model.tensors)}
    found = reader.shapes(ignore=family(model.model_type).UNTRAINED)
    if model.config.tie_word_embeddings:  # some folders store the tied head a second time
        found.pop("lm_head.weight", None)
    problems = [f"missing {n} {list(expected[n])}" for n in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {n} {list(found[n])}" for n in sorted(found.keys() - expected.keys())]
    problems += [
        f"{n} is {list(found[n])}, expected {list(expected[n])}"
        for n in sorted(expected.keys() & found.keys())
        if found[n] != expected[n]
    ]
    if problems:
        raise ValueError(f"{reader.path} does not hold the weights of its config.json: " + "; ".join(problems))


def _read(reader: checkpoint_folder.Reader, tensor: Tensor, sharding: jax.sharding.Sharding) -> jax.Array:
    """One parameter; each device's part is read from disk on its own."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if not tensor.layers:
            return one(tensor.name, index)
        layers = range(*index[0].indices(len(tensor.layers)))
        return np.stack([one(tensor.hf_name(i), index[1:]) for i in layers])

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        array = reader.read(name, index[::-1] if tensor.transpose else index).astype(np.float32)
        return np.ascontiguousarray(array.T if tensor.transpose else array)

    return jax.make_array_from_callback(tensor.full_shape, sharding, part)


def _on_host(array: jax.Array | np.ndarray) -> bool:
    return isinstance(array, np.ndarray) or [d.platform for d in array.devices()] == ["cpu"]


def _to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
