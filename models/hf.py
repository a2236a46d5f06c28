"""Hugging Face folders in and out: one entry point for every family.

A family is a module of this package that is listed in `FAMILIES` by its `model_type`s and defines

    Config                       from_hf(dict), to_hf() -> dict, model_type, vocab_size, tie_word_embeddings
    Model(config, execution, rngs)    nnx.Module: tokens, positions, segment_ids [B, T] -> [B, T, D], final norm done
    tensors(config, stem)        its name table (models/names.py); names of all but the head begin with `stem`
    stem(raw, names)             that beginning, from config.json and the tensor names of a folder ([] if it has none)
    untrained(stem, name)        True for tensors of a folder that it does not use and `save` copies byte for byte

Its parameters hold `embed_tokens.embedding` [V, D] and, if the embedding is not tied, `lm_head.kernel` [D, V].
"""

import dataclasses
import functools
import importlib
import itertools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models import checkpoint_folder, names
from models.layers import Execution
from models.names import Params, Tensor
from models.safetensors_file import DTYPES, TAGS, Entry

FAMILIES = {
    "llama": "models.dense",
    "qwen2": "models.dense",
    "qwen3": "models.dense",
    "qwen3_5": "models.qwen3_5",
    "qwen3_5_text": "models.qwen3_5",
}
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A causal language model without its parameters: pure functions of a nested dict of arrays.

    Attributes:
      config: the family's Config. model_type: Hugging Face's name of the family.
      source: folder that the model came from; None for a new one.
      execution: dtype, attention, rematerialisation, layer loop and mesh.
      stem: beginning of its Hugging Face names.
    """

    config: Any
    model_type: str
    source: Path | None
    execution: Execution
    stem: str = "model"

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The name table."""
        return family(self.model_type).tensors(self.config, self.stem)

    def untrained(self, name: str) -> bool:
        """True for a tensor of the source folder that is copied through, not trained."""
        return family(self.model_type).untrained(self.stem, name)

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
        if raw.get("quantization_config"):
            raise ValueError("quantized weights (quantization_config) are not supported")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stem = family(model_type).stem(raw, checkpoint_folder.tensor_names(path))
    return LanguageModel(config, model_type, path, Execution(**execution), stem)


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
        model = LanguageModel(config, config.model_type, None, Execution(**execution))
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
      source: folder whose config keys, tokenizer, chat template, generation_config, licence and readme are copied, and
        its untrained tensors, byte for byte (default: the model's own).
      dtype: of the written parameters, "float32" or "bfloat16"; default: of each what the source has, float32 without
        a source. bfloat16 drops updates smaller than 1/256 of a weight.

    Raises ValueError if `out_dir` exists and is not a model folder. On several hosts every process must call it.
    """
    source = Path(source) if source else model.source
    raw = checkpoint_folder.read_config(source) if source else {}
    stored = _stored(source) if source else {}
    same = _describes(raw, model)
    default = TAGS[dtype or _dtype(raw)]

    def entry(name: str, tensor: Tensor) -> Entry:
        tag = stored[name].dtype if name in stored and not dtype else default
        return Entry.of(tag if tag in DTYPES else default, tensor.hf_shape)

    entries = {name: entry(name, t) for name, t, _ in names.entries(model.tensors)}
    tensors = to_hf(model, params)
    if same and model.config.tie_word_embeddings and HEAD in stored:  # the folder holds the tied head a second time
        embedding = model.tensors[0]
        entries[HEAD] = entry(HEAD, embedding)
        tensors = itertools.chain(tensors, ((HEAD, _to_host(names.get(params, t.path))) for t in (embedding,)))
    return checkpoint_folder.write(
        Path(out_dir),
        config=_config_json(model, raw, dtype) if same else _new_config_json(model, raw, dtype),
        entries=entries,
        tensors=tensors,
        source=source,
        passed=model.untrained if same else None,
    )


def _stored(folder: Path) -> dict[str, Entry]:
    """The tensors of a folder that may have no weights."""
    if not checkpoint_folder.weight_files(folder):
        return {}
    with checkpoint_folder.Reader(folder) as reader:
        return reader.entries


def _describes(raw: Mapping[str, Any], model: LanguageModel) -> bool:
    """True if a config.json is this model's."""
    return raw.get("model_type") == model.model_type and type(model.config).from_hf(raw) == model.config


def _dtype(raw: Mapping[str, Any]) -> str:
    text = raw.get("text_config") or {}
    return next((r[k] for r in (raw, text) for k in ("dtype", "torch_dtype") if r.get(k) in TAGS), "float32")


def _config_json(model: LanguageModel, raw: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """config.json as it stands, with another dtype if one is asked for."""
    if not dtype:
        return dict(raw)
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    text = raw.get("text_config")
    nested = {"text_config": {**text, **{k: dtype for k in ("dtype", "torch_dtype") if k in text}}} if text else {}
    return {**raw, **nested, key: dtype}


def _new_config_json(model: LanguageModel, raw: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """This model's config.json, with those keys of another's that say nothing of a model's shape."""
    dropped = ("rope_theta", "rope_scaling", "auto_map", "text_config", "vision_config", "dtype", "torch_dtype")
    kept = {k: v for k, v in raw.items() if k not in dropped}
    return {**kept, **model.config.to_hf(), "dtype": dtype or _dtype(raw)}


def _check(model: LanguageModel, reader: checkpoint_folder.Reader) -> None:
    """Compares names, shapes and dtypes with the table; every difference is in the one error."""
    expected = {name: t.hf_shape for name, t, _ in names.entries(model.tensors)}
    found = {n: e for n, e in reader.entries.items() if not model.untrained(n)}
    tied_copy = found.pop(HEAD, None) if model.config.tie_word_embeddings else None
    problems = [f"missing {n} {list(expected[n])}" for n in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {n} {list(found[n].shape)}" for n in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if found[name].shape != expected[name]:
            problems.append(f"{name} is {list(found[name].shape)}, expected {list(expected[name])}")
        if found[name].dtype not in DTYPES:
            problems.append(f"{name} is stored as {found[name].dtype}, which is none of {', '.join(DTYPES)}")
    if tied_copy and not problems:
        embedding = model.tensors[0].name
        if found[embedding] != tied_copy or not np.array_equal(reader.data(HEAD), reader.data(embedding)):
            problems.append(f"{HEAD} differs from {embedding}, although config.json ties them (tie_word_embeddings)")
    if problems:
        raise ValueError(f"{reader.path} does not hold the weights of its config.json: " + "; ".join(problems))


def _read(reader: checkpoint_folder.Reader, tensor: Tensor, sharding: jax.sharding.Sharding) -> jax.Array:
    """One parameter, float32, on its shards. The host holds one layer's part of one shard at a time."""
    owners: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(tensor.full_shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, tensor.full_shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    shards = {}
    for bounds, devices in owners.items():
        index = tuple(slice(*b) for b in bounds)
        filled = _fill(reader, tensor, index, devices) if tensor.layers else None
        if filled is None:
            part = _part(reader, tensor, tensor.name, index)
            filled = [jax.device_put(part, device) for device in devices]
        shards |= dict(zip(devices, filled, strict=True))
    arrays = [shards[d] for d in sharding.addressable_devices_indices_map(tensor.full_shape)]
    return jax.make_array_from_single_device_arrays(tensor.full_shape, sharding, arrays)


def _fill(reader, tensor: Tensor, index: tuple[slice, ...], devices: list[jax.Device]) -> list[jax.Array]:
    """The stacked part `index` of a parameter, on each of `devices`, layer by layer."""
    layers = range(index[0].start, index[0].stop)
    shape = (len(layers), *(s.stop - s.start for s in index[1:]))
    stacks = [jnp.zeros(shape, jnp.float32, device=device) for device in devices]
    for row, layer in enumerate(layers):
        part = _part(reader, tensor, tensor.hf_name(layer), index[1:])
        stacks = [_set_row(stack, part, np.int32(row)) for stack in stacks]
        jax.block_until_ready(stacks)  # or parts of many layers would wait for their transfer
    return stacks


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(stack: jax.Array, part: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, part, row, 0)


def _part(reader, tensor: Tensor, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` (of our dimensions) of a stored tensor, float32."""
    array = reader.read(name, index[::-1] if tensor.transpose else index).astype(np.float32)
    return np.ascontiguousarray(array.T if tensor.transpose else array)


def _on_host(array: jax.Array | np.ndarray) -> bool:
    return isinstance(array, np.ndarray) or [d.platform for d in array.devices()] == ["cpu"]


def _to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
