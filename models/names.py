"""The name table: which Hugging Face tensor is which parameter of ours, read in both directions.

A family lists its `Tensor`s once. Loading, saving, weight sync to an engine and sharding all read that list, so a name
cannot be right in one of them and wrong in another.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axis -> mesh axes that split it, of parameters and, "rows" and "tokens", of activations. Axes that are absent
# are not sharded; "data" holds replicas of the parameters, and so does "context".
SHARDING_RULES: dict[str, tuple[str, ...]] = {
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "rows": ("data", "fsdp"),
    "tokens": ("context",),
    "recurrent_heads": ("tensor", "context"),  # a recurrence needs all tokens, so that its heads are split instead
}

Params = dict[str, Any]  # nested dict of arrays


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One parameter of ours and the Hugging Face tensors that it holds.

    Attributes:
      path: keys in the nested parameter dict.
      name: Hugging Face name; "{}" stands for the layer if `layers` is set.
      axes: logical axis (a key of `SHARDING_RULES`, or None) of each dimension of *our* array, layer axis left out.
      shape: of our array, layer axis left out.
      transpose: Hugging Face stores the reverse of our dimensions (a torch Linear is [out, in], our kernel [in, out]).
      layers: Hugging Face layer numbers in the order of our leading axis; empty for a tensor outside the layers.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    transpose: bool = False
    layers: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.name}: {len(self.axes)} axes for shape {self.shape}")

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of our array, layer axis included."""
        return (len(self.layers), *self.shape) if self.layers else self.shape

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each Hugging Face tensor."""
        return self.shape[::-1] if self.transpose else self.shape

    def hf_name(self, index: int | None = None) -> str:
        """Hugging Face name of entry `index` of our leading axis (None for a tensor outside the layers)."""
        return self.name if index is None else self.name.format(self.layers[index])

    def hf_names(self) -> tuple[str, ...]:
        """All Hugging Face names that this parameter holds."""
        return tuple(self.hf_name(i) for i in range(len(self.layers))) if self.layers else (self.name,)

    def spec(self, mesh: Mesh) -> PartitionSpec:
        """Partition of our array on `mesh`; a dimension that the mesh axis does not divide is replicated."""
        layers = (None,) if self.layers else ()
        return spec(mesh, (*layers, *self.axes), self.full_shape)


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """Makes the entries of parameters that several layers have, stacked on a leading axis.

    Attributes:
      name: Hugging Face prefix with "{}" for the layer. path: ours. layers: layer numbers, in the order of the axis.
    """

    name: str
    path: tuple[str, ...]
    layers: tuple[int, ...]

    def kernel(self, module: str, inputs: int, outputs: int, axes: tuple[str | None, str | None]) -> Tensor:
        """A Linear's matrix [inputs, outputs]."""
        return self._tensor(module, "kernel", "weight", (inputs, outputs), axes, transpose=True)

    def bias(self, module: str, size: int, axis: str | None) -> Tensor:
        """A Linear's bias."""
        return self._tensor(module, "bias", "bias", (size,), (axis,))

    def scale(self, module: str, size: int) -> Tensor:
        """A norm's scale."""
        return self._tensor(module, "scale", "weight", (size,), (None,))

    def conv(self, module: str, taps: int, channels: int) -> Tensor:
        """A depthwise convolution's kernel [taps, 1, channels]."""
        return self._tensor(module, "kernel", "weight", (taps, 1, channels), (None, None, "heads"), transpose=True)

    def vector(self, name: str, size: int) -> Tensor:
        """A parameter that is no module's weight."""
        return Tensor((*self.path, *name.split(".")), f"{self.name}.{name}", (size,), (None,), layers=self.layers)

    def _tensor(self, module, leaf, hf_leaf, shape, axes, transpose=False) -> Tensor:
        path = (*self.path, *module.split("."), leaf)
        return Tensor(path, f"{self.name}.{module}.{hf_leaf}", shape, axes, transpose, self.layers)


def mesh_axes(mesh: Mesh, logical: str | None, size: int) -> tuple[str, ...]:
    """Mesh axes that split a dimension of `size`; none where they are absent or do not divide it."""
    axes = tuple(a for a in SHARDING_RULES.get(logical, ()) if a in mesh.axis_names)
    return axes if size % math.prod(mesh.shape[a] for a in axes) == 0 else ()


def spec(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Partition of an array whose dimensions have these logical axes."""
    entries = (mesh_axes(mesh, axis, size) for axis, size in zip(axes, shape, strict=True))
    return PartitionSpec(*((e[0] if len(e) == 1 else e) if e else None for e in entries))


def embedding(name: str, vocabulary: int, width: int) -> Tensor:
    return Tensor(("embed_tokens", "embedding"), f"{name}.weight", (vocabulary, width), ("vocab", "embed"))


def final_norm(name: str, width: int) -> Tensor:
    return Tensor(("norm", "scale"), f"{name}.weight", (width,), (None,))


def head(vocabulary: int, width: int) -> Tensor:
    return Tensor(("lm_head", "kernel"), "lm_head.weight", (width, vocabulary), ("embed", "vocab"), True)


def shardings(tensors: tuple[Tensor, ...], mesh: Mesh | None) -> Params:
    """Sharding of every parameter, as a nested dict shaped like the parameters."""
    if mesh is None:
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return nest({t.path: single for t in tensors})
    return nest({t.path: NamedSharding(mesh, t.spec(mesh)) for t in tensors})


def nest(flat: Mapping[tuple[str, ...], Any]) -> Params:
    """{("a", "b"): x} -> {"a": {"b": x}}."""
    nested: Params = {}
    for path, value in flat.items():
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return nested


def get(params: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The entry of a nested dict at `path`."""
    for key in path:
        params = params[key]
    return params


def entries(tensors: tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor, int | None]]:
    """(Hugging Face name, tensor, index on its leading axis), layer by layer, as checkpoints order them."""
    stacked = [t for t in tensors if t.layers]
    order = sorted((layer, position, i) for position, t in enumerate(stacked) for i, layer in enumerate(t.layers))
    before_layers = True
    for tensor in tensors:
        if not tensor.layers:
            yield tensor.name, tensor, None
        elif before_layers:
            before_layers = False
            for _, position, i in order:
                yield stacked[position].hf_name(i), stacked[position], i
