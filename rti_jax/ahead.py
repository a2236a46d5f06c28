"""The update compiled for TPU without one, by libtpu: what its compiler says of the memory.

The programs are those of learner.py, lowered from shapes. CPU's compiler lays out its temporaries in another way (about
twice as many bytes), and no GPU's works without the GPU, so their figures are never shown as an accelerator's.
"""

import dataclasses
import importlib.util
import math
import os
import time
from typing import Any

from models.accelerated_attention import SPLASH_LANES
from rti_jax import learner, memory
from rti_jax.chips import Chip
from rti_jax.config import Config, ConfigError
from rti_jax.optimizer import make_optimizer, total_updates

TOPOLOGIES = {
    "TPU v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 32: "v5p:2x4x4", 64: "v5p:4x4x4"},
    "TPU v6e": {1: "v6e:1x1", 4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4", 32: "v6e:4x8", 64: "v6e:8x8"},
}
# Set before the library is loaded: it would ask Google's metadata server where it is, and lock out other processes,
# although no device is used.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def peak(model: Any, config: Config, chip: Chip, rows: int, length: int) -> dict[str, Any]:
    """Bytes on one device by program ("accumulate", "apply"), as the compiler reports them.

    A program that the compiler finds too large for the chip has its message as "refused" instead.

    Args:
      model: models.hf.LanguageModel. config: mesh.fsdp resolved. rows, length: of a whole micro-batch.

    Raises ConfigError for a chip whose compiler does not work without it, or if libtpu is not installed.
    """
    mesh = topology_mesh(config, chip)
    attention = model.execution.attention
    if attention == "auto":
        part = length // config.mesh.context
        lanes = part % SPLASH_LANES == 0 and model.config.head_dim % SPLASH_LANES == 0
        attention = "splash" if lanes else "blockwise"
    execution = dataclasses.replace(model.execution, attention=attention, mesh=mesh)
    model = dataclasses.replace(model, execution=execution)
    return {name: _report(lowered) for name, lowered in lowered_update(model, config, mesh, rows, length).items()}


def lowered_update(model: Any, config: Config, mesh: Any, rows: int, length: int) -> dict[str, Any]:
    """The programs of an update on a mesh, lowered from shapes."""
    params = memory.parameters(model, mesh)
    optimizer = make_optimizer(config.optimizer, params, total_updates(config))
    update = learner.make_update_step(model, config, mesh, optimizer, on_policy=config.on_policy)
    state = learner.abstract_state(params, optimizer, mesh, offload=config.optimizer.offload)
    return update.lower(state, learner.abstract_batch(rows, length, mesh))


def topology_mesh(config: Config, chip: Chip) -> Any:
    """The run's mesh over devices that exist for the compiler only."""
    if chip.name not in TOPOLOGIES:
        raise ConfigError(
            f"--compile: {chip.name}'s compiler needs the device; TPU's does not: --chip v5p or --chip v6e"
        )
    shape = tuple(getattr(config.mesh, axis) for axis in ("data", "fsdp", "tensor", "context"))
    if math.prod(shape) not in TOPOLOGIES[chip.name]:
        known = ", ".join(str(n) for n in TOPOLOGIES[chip.name])
        raise ConfigError(f"--compile: {chip.name} comes in slices of {known} devices, not {math.prod(shape)}")
    spec = importlib.util.find_spec("libtpu")
    if "TPU_LIBRARY_PATH" not in os.environ and (spec is None or spec.origin is None):  # DIR itself is no package
        raise ConfigError(
            "--compile needs TPU's compiler: pip install libtpu (a folder of its own, pip install --target DIR "
            "--no-deps libtpu and TPU_LIBRARY_PATH=DIR/libtpu/libtpu.so, leaves JAX as it is)"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    jax.config.update("jax_platforms", "cpu")  # constants; with libtpu installed JAX would look for a TPU
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip.name][math.prod(shape)])
    return Mesh(np.array(topology.devices).reshape(shape), ("data", "fsdp", "tensor", "context"))


def _report(lowered: Any) -> dict[str, Any]:
    import jax

    start = time.monotonic()
    try:
        analysis = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error).splitlines()[0]}
    return {
        "peak": analysis.peak_memory_in_bytes,
        "arguments": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "compile_seconds": round(time.monotonic() - start, 1),
    }
