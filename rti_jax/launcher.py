"""What makes CPU runs fast, set before anything heavy is imported, by starting the process once more.

An allocator can only be chosen before a process starts. JAX on CPU frees and allocates large buffers in every step, and
glibc returns them to the system each time: with tcmalloc, or glibc told to keep what it has, a step takes about 20%
less time. Nothing is done where an accelerator is used, and a variable that is already set is left as it is.
RTI_NO_LAUNCHER=1 turns all of this off.
"""

import glob
import importlib.util
import os
import sys
from collections.abc import Mapping

MARK = "RTI_LAUNCHED"  # set in the restarted process
TCMALLOC = "libtcmalloc_minimal.so*", "libtcmalloc.so*"
LIBRARIES = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/*-linux-gnu",
    "/usr/local/lib",
)  # no recursion: these trees have link loops
ACCELERATORS = "/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/kfd"

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


def relaunch() -> None:
    """Starts this process again with the variables of `additions`; returns where there is nothing to do."""
    if sys.platform != "linux":
        return
    if MARK in os.environ or os.environ.get("RTI_NO_LAUNCHER", "0") not in ("", "0") or not runs_on_cpu(os.environ):
        return
    added = additions(os.environ, find_tcmalloc())
    if not added:
        return
    what = f"tcmalloc ({added['LD_PRELOAD']})" if "LD_PRELOAD" in added else "glibc's allocator keeping its memory"
    print(f"CPU run with {what}; RTI_NO_LAUNCHER=1 leaves the allocator alone", file=sys.stderr, flush=True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added, MARK: "1"})
