"""How a batch lies on the mesh: rows over the axes data and fsdp; where a model computes, their tokens over context.

The models' table (models/names.py) has the same entries, "rows" and "tokens", for activations; the learner knows no
model. What there is one number of for each token (masks, advantages, log-probabilities) stays with its row: it is
small, and a loss needs whole rows.
"""

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

ROW_AXES, TOKEN_AXES = ("data", "fsdp"), ("context",)


def row_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Partition of arrays [B, ...] over rows alone."""
    return PartitionSpec(tuple(a for a in ROW_AXES if a in mesh.axis_names))


def activation_axes(mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that split the rows and the tokens of activations [B, T, ...]; none where they do not divide."""
    rows, tokens = (
        tuple(a for a in axes if a in mesh.axis_names) if size % shards(mesh, axes) == 0 else ()
        for axes, size in zip((ROW_AXES, TOKEN_AXES), shape[:2], strict=True)
    )
    return rows, tokens


def shards(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    """Devices along these axes; absent ones have one."""
    return math.prod(mesh.shape[a] for a in axes if a in mesh.axis_names)
