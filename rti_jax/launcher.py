"""What must be set before anything heavy is imported: the allocator of CPU runs, JAX's share of a GPU beside vLLM.

An allocator can only be chosen before a process starts. JAX on CPU frees and allocates large buffers in every step, and
glibc returns them to the system each time: with tcmalloc, or glibc told to keep what it has, a step takes about 20%
less time, so the process is started once more with it. On a GPU JAX takes three quarters of the memory when it starts,
and does not give back what it has taken: beside a vLLM on the same GPUs it is told to take what
`engine.memory_fraction` leaves. A variable that is set is left as it is. RTI_NO_LAUNCHER=1 turns all of this off.
"""

import glob
import importlib.util
import os
import sys
import typing
from collections.abc import Mapping

if typing.TYPE_CHECKING:
    from rti_jax.config import Config

MARK = "RTI_LAUNCHED"  # set in the restarted process
TCMALLOC = "libtcmalloc_minimal.so*", "libtcmalloc.so*"
LIBRARIES = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/*-linux-gnu",
    "/usr/local/lib",
)  # no recursion: these trees have link loops
ACCELERATORS = "/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/kfd"

GPUS = "/dev/nvidia[0-9]*", "/dev/kfd"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARES = FRACTION, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
MARGIN = 0.03  # of a GPU: contexts and what else is on it

# glibc: keep freed memory, one arena, transparent huge pages (the last needs glibc 2.35).
GLIBC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "200000000000",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def find_tcmalloc() -> str | None:
    """Path of a tcmalloc library, the minimal one first."""
    for name in TCMALLOC:
        if found := sorted(path for folder in LIBRARIES for path in glob.glob(f"{folder}/{name}")):
            return found[0]
    return None


def runs_on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether JAX will run on CPU, told without importing it."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in ACCELERATORS) and importlib.util.find_spec("libtpu") is None


def additions(environment: Mapping[str, str], tcmalloc: str | None) -> dict[str, str]:
    """Variables to add: tcmalloc if there is one, else glibc's settings; none if the user chose an allocator."""
    if any(name in environment for name in ("LD_PRELOAD", *GLIBC)):
        return {}
    if tcmalloc:
        return {"LD_PRELOAD": tcmalloc, "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "100000000000"}
    return dict(GLIBC)


def engine_share(config: "Config") -> float:
    """The part of each GPU that vLLM beside the learner takes, engines of frozen models included."""
    engine = config.engine
    own = engine.args.get("gpu_memory_utilization", engine.memory_fraction) if engine.kind == "vllm" else 0.0
    return own + engine.frozen_fraction * len(set(config.frozen_folders.values()))


def gpu_additions(environment: Mapping[str, str], config: "Config") -> dict[str, str]:
    """Variables that keep JAX out of vLLM's part of each GPU; none if the user chose any of them.

    Raises:
      ConfigError: the user's fraction and the engine's are more than there is.
    """
    if not (share := engine_share(config)):
        return {}
    left = 1 - share
    if not any(name in environment for name in SHARES):
        # What is taken once is kept, so an engine that sleeps needs the allocator that gives memory back.
        if config.engine.sleep:
            return {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        return {FRACTION: f"{max(0.05, left - MARGIN):.2f}"}
    taken = float(environment.get(FRACTION, 0))
    if taken > left and environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0"):
        from rti_jax.config import ConfigError

        raise ConfigError(
            f"{FRACTION}={taken:g} and the {share:g} of vLLM (engine.memory_fraction, engine.frozen_fraction) are more "
            "than a GPU has; lower one, or leave the variable to rti"
        )
    return {}


def share_gpu(config: "Config") -> None:
    """Sets the variables of `gpu_additions` where JAX and vLLM will use the same GPUs, and says so."""
    if _turned_off() or runs_on_cpu(os.environ) or not any(glob.glob(pattern) for pattern in GPUS):
        return
    if added := gpu_additions(os.environ, config):
        os.environ.update(added)
        said = ", ".join(f"{name}={value}" for name, value in added.items())
        print(f"JAX beside vLLM on the same GPUs: {said}; set it yourself to have another", file=sys.stderr, flush=True)


def launch(config: "Config | None" = None) -> None:
    """What a computing command does first. May start the process again."""
    relaunch()
    if config:
        share_gpu(config)


def _turned_off() -> bool:
    return os.environ.get("RTI_NO_LAUNCHER", "0") not in ("", "0")


def relaunch() -> None:
    """Starts this process again with the variables of `additions`; returns where there is nothing to do."""
    if sys.platform != "linux":
        return
    if MARK in os.environ or _turned_off() or not runs_on_cpu(os.environ):
        return
    added = additions(os.environ, find_tcmalloc())
    if not added:
        return
    what = f"tcmalloc ({added['LD_PRELOAD']})" if "LD_PRELOAD" in added else "glibc's allocator keeping its memory"
    print(f"CPU run with {what}; RTI_NO_LAUNCHER=1 leaves the allocator alone", file=sys.stderr, flush=True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added, MARK: "1"})
