"""New weights to the engine: bytes per second by shared memory and by a file, against memcpy; their share of a step.

    python benchmarks/weight_transfer.py                       1M to 600M parameters, vLLM up to 25M
    python benchmarks/weight_transfer.py --sizes 1M --vllm 1M --steps 0

Three measurements, each in this one run:

transfer  what our code does in an update, without vLLM: the learner's float32 parameters tensor by tensor, written in
          the serving dtype as one safetensors file (weight_sync.payload), and read from there into tensors that are
          allocated already, as a worker does. "memory" is /dev/shm, "file" a folder on disk (`--folder`), whose pages
          stay in the page cache: a file system of several hosts is slower. Next to it memcpy of as many bytes
          (a small model's are in the processor's cache).
sync      the whole update of a running vLLM (VLLMEngine.update_weights): the transfer, its pause, its own loading, its
          prefix cache reset, the version confirmed.
share     time/sync of a short `rti train configs/quickstart.yaml` over whole steps (or of the runs given by --run).

From the largest transfer follows what Qwen3-8B in bfloat16 would take, beside a step as `rti plan` estimates it for
eight H20; what is assumed is printed with it. Models are random Qwen3 with a small vocabulary.
"""

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from update_step import RESULTS, ROOT, make_folder
from update_step import SIZES as UPDATE_SIZES

from rti_jax import weight_sync
from rti_jax.metrics import read_metrics

SIZES = UPDATE_SIZES | {
    "300M": dict(width=1280, mlp=3840, layers=15, heads=10, kv=5, vocabulary=4096),
    "600M": dict(width=1536, mlp=4608, layers=22, heads=12, kv=4, vocabulary=4096),
}
DTYPES = {"bfloat16": 2, "float32": 4}
GOAL = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--vllm", nargs="*", choices=SIZES, default=["1M", "25M"], help="sizes that a vLLM loads too")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="what is served")
    parser.add_argument("--repeats", type=int, default=5, help="a number is their median, after one that is left out")
    parser.add_argument("--folder", type=pathlib.Path, default=None, help="of the file path; default: temporary")
    parser.add_argument("--steps", type=int, default=6, help="of the run whose share is measured; 0: none")
    parser.add_argument("--run", type=pathlib.Path, nargs="*", default=[], help="run folders instead of that run")
    parser.add_argument("--chip", default="h20", help="of the estimate for Qwen3-8B")
    parser.add_argument("--episode-tokens", type=int, default=3000, help="of the same")
    parser.add_argument("--utilization", type=float, default=0.4, help="of the same: of the chips' peak, in the update")
    parser.add_argument("--pcie", type=float, default=25.0, help="of the same: GB/s between host and device")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "weight_transfer.json")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = [row for size in given.sizes for row in measure(size, given)]
    shares = [share(run) for run in given.run] if given.run else [short_run(given)] if given.steps else []
    estimate = qwen3_8b(max(rows, key=lambda r: r["bytes"]), given)
    text = "\n".join([transfers(rows), shared(shares), estimated(estimate, given)])
    print("\n" + text)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"dtype": given.dtype, "cores": os.cpu_count(), "rows": rows, "shares": shares, "qwen3_8b": estimate}
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(text)


def measure(size: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The transfer by each path, and the whole sync if this size has a vLLM."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=given.folder) as disk:
        parameters = make_folder(pathlib.Path(folder), **SIZES[size])
        weights, expected = load(folder)
        whole = asyncio.run(synced(folder, weights, given)) if size in given.vllm else {}
        rows = []
        for path, directory in (("memory", ""), ("file", disk)):
            found = transferred(weights, expected, directory, given)
            rows.append({"size": size, "parameters": parameters, "path": path, "sync": whole.get(path), **found})
            print(line(rows[-1]), flush=True)
    return rows


def load(folder: str) -> tuple[weight_sync.FlaxWeights, weight_sync.Shapes]:
    """The learner's weights, as a run has them, and what an update must hold."""
    from models import hf
    from rti_jax.config import MeshConfig
    from rti_jax.runtime import make_mesh

    model, params = hf.load(folder, dtype="bfloat16", mesh=make_mesh(MeshConfig()))
    return weight_sync.FlaxWeights(model, params), weight_sync.expected_shapes(folder)


def transferred(
    weights: weight_sync.FlaxWeights, expected: weight_sync.Shapes, directory: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of writing and reading, and of a memcpy of the same bytes."""
    import torch
    from safetensors import safe_open

    held = {name: torch.empty(shape, dtype=getattr(torch, given.dtype)) for name, shape in expected.items()}
    total = sum(t.numel() for t in held.values()) * DTYPES[given.dtype]
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    writes, reads, copies = [], [], []
    for _ in range(given.repeats + 1):
        started = time.perf_counter()
        with weight_sync.payload(weights, expected, given.dtype, directory) as path:
            written = time.perf_counter()
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():
                    held[name].copy_(file.get_tensor(name))
            read = time.perf_counter()
        writes.append(written - started)
        reads.append(read - written)
        copying = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - copying)
    measured = {"write": writes, "read": reads, "memcpy": copies}
    return {"bytes": total} | {name: statistics.median(seconds[1:]) for name, seconds in measured.items()}


async def synced(folder: str, weights: weight_sync.FlaxWeights, given: argparse.Namespace) -> dict[str, float]:
    """Seconds of whole weight updates of a vLLM, by each path."""
    from rti_jax.config import Config
    from rti_jax.engine import VLLMEngine

    seconds = {}
    for path, transfer in (("memory", {}), ("file", {"weight_transfer": "file", "weights_dir": None})):
        with tempfile.TemporaryDirectory(dir=given.folder) as disk:
            engine = {k: v or disk for k, v in transfer.items()} | {"args": {"max_model_len": 512}}
            sampling = {"max_context": 512, "max_tokens": 64}
            keys = {"model": {"path": folder, "dtype": given.dtype}, "engine": engine, "sampling": sampling}
            vllm = await asyncio.to_thread(VLLMEngine, folder, Config.model_validate(keys))
            try:
                times = []
                for version in range(1, given.repeats + 2):
                    started = time.perf_counter()
                    await vllm.update_weights(weights, version)
                    times.append(time.perf_counter() - started)
            finally:
                await vllm.close()
        seconds[path] = statistics.median(times[1:])
    return seconds


def share(run: pathlib.Path, skip: int = 2) -> dict[str, Any]:
    """Seconds of the weight updates and of the steps of a run, without the first ones, which compile."""
    lines = [x for x in read_metrics(run / "metrics.jsonl") if x["step"] > skip and x.get("optimizer/updates")]
    if not lines:
        raise SystemExit(f"{run}: no step with an update after the first {skip}")
    sync = float(np.mean([x["time/sync"] for x in lines]))
    step = float(np.mean([sum(v for k, v in x.items() if k.startswith("time/")) for x in lines]))
    return {"run": run.name, "steps": len(lines), "sync": sync, "step": step, "share": sync / step}


def short_run(given: argparse.Namespace) -> dict[str, Any]:
    """The share in a run of the quickstart, whose policy has a million parameters."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"runs_dir={folder}", f"steps={given.steps}", "eval.limit=1", "eval.trials=1", "checkpoint.every=1000"]
        command = [sys.executable, "-m", "rti_jax.cli", "train", "configs/quickstart.yaml", *keys]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"rti train failed with exit code {done.returncode}")
        return share(pathlib.Path(folder) / "quickstart")


def qwen3_8b(largest: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update of Qwen3-8B in bfloat16 and of a step, from the largest transfer and `rti plan`."""
    from rti_jax import memory, plan
    from rti_jax.chips import CHIPS
    from rti_jax.config import load_config

    if given.chip not in CHIPS:
        raise SystemExit(f"--chip {given.chip}: choose one of {', '.join(CHIPS)}")
    config = load_config(ROOT / "configs" / "navigation_qwen3_8b.yaml")
    model, _ = plan.describe(config, "qwen3-8b")
    planned = plan.plan(model, config, CHIPS[given.chip], given.utilization, given.episode_tokens)
    seconds = planned["seconds_per_step"][given.chip]
    parameters = memory.count(model)
    sent = 2 * parameters
    host = sent * (largest["write"] + largest["read"]) / largest["bytes"]
    devices = (4 + 2) * parameters / (given.pcie * 1e9)
    step = seconds["update"] + (seconds["rollout"] or 0.0)
    total = host + devices
    return {
        "parameters": parameters,
        "bytes": sent,
        "from_size": largest["size"],
        "from_path": largest["path"],
        "host_seconds": host,
        "device_seconds": devices,
        "update_seconds": seconds["update"],
        "rollout_seconds": seconds["rollout"],
        "tokens_per_step": planned["tokens_per_step"],
        "share": total / (step + total),
        "step_for_goal": total / GOAL,
    }


def gigabytes(row: dict[str, Any], *phases: str) -> float:
    return row["bytes"] / sum(row[p] for p in phases) / 1e9


def line(row: dict[str, Any]) -> str:
    whole = f", vLLM's whole update {row['sync']:.3f} s" if row["sync"] else ""
    phases = {"write": ["write"], "read": ["read"], "both": ["write", "read"], "memcpy": ["memcpy"]}
    speeds = ", ".join(f"{name} {gigabytes(row, *parts):.2f}" for name, parts in phases.items())
    return f"{row['size']:>5} {row['path']:<6} {row['bytes'] / 1e6:8.1f} MB: {speeds} GB/s{whole}"


def transfers(rows: list[dict[str, Any]]) -> str:
    head = (
        "model",
        "parameters",
        "path",
        "MB",
        "write GB/s",
        "read GB/s",
        "both GB/s",
        "memcpy GB/s",
        "both / memcpy",
        "vLLM, s",
    )
    text = "| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|\n"
    for row in rows:
        speeds = [gigabytes(row, *p) for p in (("write",), ("read",), ("write", "read"), ("memcpy",))]
        cells = [row["size"], f"{row['parameters'] / 1e6:.1f}M", row["path"], f"{row['bytes'] / 1e6:.1f}"]
        cells += [*(f"{s:.2f}" for s in speeds), f"{speeds[2] / speeds[3]:.2f}"]
        text += "| " + " | ".join([*cells, f"{row['sync']:.3f}" if row["sync"] else "transfer alone"]) + " |\n"
    return text


def shared(shares: list[dict[str, Any]]) -> str:
    text = "| run | steps | sync s | step s | share |\n| --- | --- | --- | --- | --- |\n" if shares else ""
    for s in shares:
        text += f"| {s['run']} | {s['steps']} | {s['sync']:.3f} | {s['step']:.2f} | {100 * s['share']:.1f}% |\n"
    return text


def estimated(e: dict[str, Any], given: argparse.Namespace) -> str:
    """The calculation for Qwen3-8B with what it assumes."""
    transfer, rollout = e["host_seconds"] + e["device_seconds"], e["rollout_seconds"] or 0.0
    step = e["update_seconds"] + rollout + transfer
    verdict = "below" if e["share"] < GOAL else "above"
    return f"""Qwen3-8B in bfloat16, {e["bytes"] / 1e9:.1f} GB: {transfer:.1f} s of a step of {step:.0f} s, \
{100 * e["share"]:.2f}%, {verdict} the goal of {100 * GOAL:.0f}% (which needs a step of {e["step_for_goal"]:.0f} s). \
Calculated, not run. Assumed:

- writing and reading are as fast per byte as with {e["from_size"]} by {e["from_path"]} on this machine, in one
  thread, one after the other: {e["host_seconds"]:.1f} s; vLLM's pause, and loading beyond reading, come on top;
- float32 from the learner's devices and bfloat16 to the engine's at {given.pcie:g} GB/s, nothing of it overlapped: \
{e["device_seconds"]:.1f} s;
- a step of configs/navigation_qwen3_8b.yaml as `rti plan --chip {given.chip}` estimates it: {e["tokens_per_step"]} \
tokens ({given.episode_tokens} an episode),
  update {e["update_seconds"]:.0f} s at {100 * given.utilization:.0f}% of the chips' peak, rollouts {rollout:.0f} s; \
roles, tools and waiting for them are left out, and would lower the share.
"""


if __name__ == "__main__":
    main()
