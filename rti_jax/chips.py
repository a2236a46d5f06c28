"""Accelerators by name: what a data sheet says, in its units (1 GB = 1e9 bytes)."""

import dataclasses

from rti_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      memory: bytes. flops: dense bfloat16 products a second. bandwidth: of its memory, bytes a second.
      link: bytes a second that it sends to its neighbours, one direction (NVLink, ICI).
      host_link: the same to its host (PCIe); None where no data sheet says it.
    """

    name: str
    kind: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    host_link: float | None = None


# NVIDIA's data sheets; cloud.google.com/tpu/docs/v5p and /v6e. A driver shows up to 6% more bytes than the name's GB;
# that is what the runtime and the collectives' buffers take.
CHIPS = {
    "h20": Chip("H20", "gpu", 96e9, 148e12, 4.0e12, 450e9, 64e9),
    "h100": Chip("H100", "gpu", 80e9, 989e12, 3.35e12, 450e9, 64e9),
    "h200": Chip("H200", "gpu", 141e9, 989e12, 4.8e12, 450e9, 64e9),
    "v5p": Chip("TPU v5p", "tpu", 95e9, 459e12, 2.765e12, 600e9),
    "v6e": Chip("TPU v6e", "tpu", 32e9, 918e12, 1.64e12, 448e9),
}


def chip(name: str) -> Chip:
    """Raises ConfigError that names the chips there are."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"--chip {name}: choose one of {', '.join(CHIPS)}")
    return CHIPS[name.lower()]
