"""`rti plan CONFIG`: what a configuration needs, before it runs, without an accelerator.

    rti plan configs/navigation_qwen3_8b.yaml                        on the devices of its mesh, H20
    rti plan configs/navigation_qwen3_8b.yaml --devices 1            does not fit: exit code 1, and what to change
    rti plan configs/navigation_qwen3_8b.yaml --chip v5p --compile   also what TPU's compiler says

Memory by the formulas of memory.py, operations by flops.py, communication by traffic.py, time at a stated utilisation.
docs/plan.md says what each number means, and how far it is from what a compiler reports.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from models.accelerated_attention import cudnn_can
from rti_jax import chips, flops, memory, published, traffic
from rti_jax.chips import Chip
from rti_jax.config import Config, ConfigError, MeshConfig
from rti_jax.launcher import engine_share
from rti_jax.packing import line_counts

DECODE_UTILIZATION = 0.6  # share of the memory's bandwidth that decoding reaches
GB = 1e9


def main(
    config: Config,
    *,
    chip: str = "h20",
    devices: int | None = None,
    model: str | None = None,
    utilization: float = 0.4,
    episode_tokens: int | None = None,
    compile: bool = False,
    as_json: bool = False,
) -> int:
    """Prints the plan; returns 1 if it does not fit.

    Args:
      devices: how many; None is the product of the mesh's axes (1 if mesh.fsdp is -1).
      model: a key of `published.PUBLISHED` instead of model.path.
      utilization: share of a chip's peak that an update reaches.
      episode_tokens: mean length of an episode; None is the most there can be.
      compile: also asks TPU's compiler.

    Raises ConfigError.
    """
    target = chips.chip(chip)
    if not 0 < utilization <= 1:
        raise ConfigError(f"--utilization {utilization}: expected a share of the peak, above 0 and at most 1")
    most = min(config.sampling.max_context, max(config.batch.buckets))
    if episode_tokens is not None and not 0 < episode_tokens <= most:
        raise ConfigError(f"--episode-tokens {episode_tokens}: expected 1 to {most} (sampling.max_context)")
    config = config.model_copy(update={"mesh": resolved_mesh(config.mesh, devices)})
    described, source = describe(config, model)
    result = {"model": source, **plan(described, config, target, utilization, episode_tokens or most)}
    if compile:
        result["compiled"] = compiled(described, config, target, result)
        result["fits"] &= not any("refused" in said for said in result["compiled"]["programs"].values())
    print(json.dumps(result, indent=2) if as_json else text(result))
    return 0 if result["fits"] else 1


def compiled(model: Any, config: Config, chip: Chip, result: dict[str, Any]) -> dict[str, Any]:
    """What TPU's compiler says of an update's programs, and the formulas' figure for the first of them."""
    from rti_jax import ahead

    shape = result["microbatch"]
    programs = ahead.peak(model, config, chip, microbatch_rows(config), shape["row_length"])
    return {"programs": programs, "estimated_peak": update_bytes(result["parts"])}


def update_bytes(parts: dict[str, float]) -> float:
    """Those parts that one micro-batch's program holds: not optimizer, engine, reference or a second sum."""
    inside = ("parameters", "compute_weights", "activations", "workspace")
    return 2 * parts["parameters"] + sum(parts[name] for name in inside)


def describe(config: Config, name: str | None) -> tuple[Any, str]:
    """(model without parameters, where its shapes come from)."""
    m = config.model
    execution = {"dtype": m.dtype, "attention": m.attention, "remat": m.remat, "scan_layers": m.scan_layers}
    return published.describe(m.path, name, **execution)


def resolved_mesh(mesh: MeshConfig, devices: int | None) -> MeshConfig:
    """The mesh with a number in fsdp: what the other axes leave of `devices`.

    Raises ConfigError if they do not divide.
    """
    fixed = mesh.data * mesh.tensor * mesh.context
    total = devices or fixed * max(mesh.fsdp, 1)
    if total % fixed:
        raise ConfigError(
            f"--devices {total} is not a multiple of mesh data={mesh.data} tensor={mesh.tensor} context={mesh.context}"
        )
    return mesh.model_copy(update={"fsdp": total // fixed})


def mesh_axes(mesh: MeshConfig) -> dict[str, int]:
    return {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor, "context": mesh.context}


def abstract_mesh(mesh: MeshConfig) -> Any:
    """The mesh without devices."""
    import jax

    axes = mesh_axes(mesh)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a configuration.

    Attributes:
      rows, length: of a micro-batch of the longest bucket, those that a device takes part in.
      parts: bytes on the fullest device, by what they are for. workspaces: of which the larger is one of the parts.
      host: bytes that it keeps in its host's memory.
      cache_tokens: that the engine's key/value cache holds; None if no engine shares the devices.
    """

    rows: int
    length: int
    parts: dict[str, float]
    workspaces: dict[str, float]
    host: dict[str, float]
    available: float
    cache_tokens: float | None
    longest_sequence: int

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def starved(self) -> bool:
        """True if the engine has no room for one sequence."""
        return self.cache_tokens is not None and self.cache_tokens < self.longest_sequence

    @property
    def fits(self) -> bool:
        return self.bytes <= self.available and not self.starved


def estimate(model: Any, config: Config, chip: Chip) -> Estimate:
    """Memory on the fullest device: one that the engine shares, if there is one."""
    model = on_chip(model, chip)
    mesh, length = abstract_mesh(config.mesh), max(config.batch.buckets)
    rows = microbatch_rows(config) // (config.mesh.data * config.mesh.fsdp)
    parts = memory.learner_parts(model, config, mesh, rows, length)
    cache_tokens = None
    if config.engine.kind == "vllm":
        weights, cache = engine_bytes(model, config, chip)
        parts |= {"engine_weights": weights, "engine_cache": max(cache, 0.0)}
        cache_tokens = max(cache, 0.0) / bytes_per_token(model, config)
    parts |= other_models(model, config, mesh, chip)
    spaces = memory.workspaces(model, mesh, rows, length)
    host = memory.host_parts(model, config, mesh, rows, length)
    return Estimate(rows, length, parts, spaces, host, chip.memory, cache_tokens, config.sampling.max_context)


def other_models(model: Any, config: Config, mesh: Any, chip: Chip) -> dict[str, float]:
    """Bytes of a teacher's parameters beside the learner's, and of the engines of frozen models."""
    teacher = teacher_of(model, config)
    share = config.engine.frozen_fraction * chip.memory
    return {
        "teacher": memory.held(memory.parameters(teacher, mesh)) if teacher else 0.0,
        "frozen_engines": share * len(set(config.frozen_folders.values())),
    }


def teacher_of(model: Any, config: Config) -> Any:
    """The model that on-policy distillation scores beside the policy; of unknown shapes it counts as large as that."""
    path = config.loss.teacher.path
    if config.loss.baseline != "opd" or not path:
        return None
    own = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    try:
        return describe(own, None)[0]
    except ConfigError:
        return model


def microbatch_rows(config: Config) -> int:
    """Rows of a micro-batch of the longest bucket on all devices, as batching.py makes it."""
    buckets, multiple = config.batch.buckets, config.mesh.data * config.mesh.fsdp
    return line_counts(buckets, config.batch.rows_per_microbatch, multiple)[max(buckets)]


def engine_argument(config: Config, name: str, default: Any) -> Any:
    return config.engine.args.get(name, default)


def engine_bytes(model: Any, config: Config, chip: Chip) -> tuple[float, float]:
    """(weights, what is left for its cache and graphs) of the engine on one of its devices."""
    share = engine_argument(config, "gpu_memory_utilization", config.engine.memory_fraction)
    size = memory.SIZES.get(engine_argument(config, "dtype", config.model.dtype), 2)
    weights = memory.count(model) * size / engine_argument(config, "tensor_parallel_size", 1)
    return weights, share * chip.memory - weights


def bytes_per_token(model: Any, config: Config) -> float:
    """Of the engine's cache on one of its devices, the states of linear layers spread over a longest sequence."""
    dtype = engine_argument(config, "dtype", config.model.dtype)
    token, sequence = memory.cache_bytes(model, dtype if dtype in memory.SIZES else "bfloat16")
    ways = min(engine_argument(config, "tensor_parallel_size", 1), model.config.num_key_value_heads)
    return (token + sequence / config.sampling.max_context) / ways


def plan(model: Any, config: Config, chip: Chip, utilization: float, episode_tokens: int) -> dict[str, Any]:
    """The plan as plain data; docs/plan.md explains its keys."""
    model = on_chip(model, chip)
    estimated = estimate(model, config, chip)
    devices = math.prod(mesh_axes(config.mesh).values())
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    tokens = episodes * episode_tokens
    forward = flops.forward(model, tokens, episodes * flops.causal_pairs(episode_tokens))
    computed = flops.forward(model, tokens, episodes * flops.shared_pairs(episode_tokens, config.mesh.context))
    extra = (config.loss.behavior == "recompute" and not config.on_policy) + bool(config.loss.kl_beta)
    operations = computed.update(config.model.remat, model.execution.attention) + extra * computed.forward
    if config.loss.baseline == "opd":  # the student's own forward pass, and the teacher's
        teacher = teacher_of(model, config)
        pairs = episodes * flops.shared_pairs(episode_tokens, config.mesh.context)
        scored = flops.forward(teacher, tokens, pairs) if teacher else None
        operations += computed.forward + (scored.forward if scored else 0)
    row_tokens = estimated.rows * estimated.length
    microbatches = math.ceil(tokens / (row_tokens * config.mesh.data * config.mesh.fsdp))
    sent = traffic.per_microbatch(model, mesh_axes(config.mesh), row_tokens // config.mesh.context)
    to_host = traffic.host_bytes(estimated.host, config.optimizer.minibatches, microbatches)
    return {
        "model_parameters": memory.count(model),
        "chip": chip.name,
        "devices": devices,
        "mesh": mesh_axes(config.mesh),
        "fits": estimated.fits,
        "bytes_per_device": round(estimated.bytes),
        "bytes_available": round(chip.memory),
        "parts": {name: round(value) for name, value in estimated.parts.items()},
        "workspaces": {name: round(value) for name, value in estimated.workspaces.items()},
        "microbatch": {"rows_per_device": estimated.rows, "row_length": estimated.length, "per_step": microbatches},
        "host_bytes_per_device": {name: round(value) for name, value in estimated.host.items()},
        "engine_cache_tokens": None if estimated.cache_tokens is None else round(estimated.cache_tokens),
        "episode_tokens": episode_tokens,
        "tokens_per_step": tokens,
        "flops_per_step": operations,
        "model_flops_per_step": forward.model,
        "utilization": utilization,
        "decode_utilization": DECODE_UTILIZATION,
        "seconds_per_step": {
            name: {
                "update": operations / (devices * other.flops * utilization),
                "rollout": rollout_seconds(model, config, other, episodes, episode_tokens),
            }
            for name, other in chips.CHIPS.items()
        },
        "communication_bytes_per_step": {name: round(value * microbatches) for name, value in sent.items()},
        "communication_seconds": sent["bytes"] * microbatches / chip.link,
        "host_transfer_bytes_per_step": round(to_host),
        "host_transfer_seconds": to_host / chip.host_link if chip.host_link else None,
        "changes": [] if estimated.fits else list(changes(model, config, chip)),
        "notes": list(notes(model, config, chip, devices)),
    }


def notes(model: Any, config: Config, chip: Chip, devices: int) -> Iterator[str]:
    """What a colocated engine needs to be told, whether it fits or not."""
    if teacher_of(model, config) is model:
        yield f"loss.teacher.path={config.loss.teacher.path}: no config.json there, so it counts as large as the policy"
    if config.engine.kind != "vllm":
        return
    own = engine_argument(config, "tensor_parallel_size", 1) * engine_argument(config, "data_parallel_size", 1)
    if own < devices:
        yield (
            f"the engine runs on {own} of {devices} devices, the others wait while it samples; "
            f"engine.args={{tensor_parallel_size: {devices}}} or {{data_parallel_size: {devices}}} spreads it"
        )
    if chip.kind == "gpu":
        left = 1 - engine_share(config)
        yield (
            "by itself JAX takes three quarters of a GPU when it starts; beside the engine rti sets "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={max(0.05, left - 0.03):.2f}"
        )


def rollout_seconds(model: Any, config: Config, chip: Chip, episodes: int, episode_tokens: int) -> float | None:
    """Seconds to decode a step's episodes, bound by the memory's bandwidth: weights and caches are read for each token.

    Caches count at half length. Every token counts as decoded; interventions and role calls come on top. None where the
    engine is elsewhere, or has no room on this chip.
    """
    if config.engine.kind != "vllm":
        return None
    weights, cache = engine_bytes(model, config, chip)
    per_sequence = bytes_per_token(model, config) * episode_tokens
    replicas = engine_argument(config, "data_parallel_size", 1)
    fitting = int(max(cache, 0.0) // (per_sequence / 2))
    running = min(math.ceil(min(config.rollout.concurrency, episodes) / replicas), fitting)
    if not running:
        return None
    waves = math.ceil(episodes / replicas / running)
    return waves * episode_tokens * (weights + running * per_sequence / 2) / (chip.bandwidth * DECODE_UTILIZATION)


def changes(model: Any, config: Config, chip: Chip) -> Iterator[str]:
    """What would make it fit, each change alone, and the bytes that it would then take."""

    def tried(said: str, **sections: dict[str, Any]) -> Iterator[str]:
        changed = config
        for section, values in sections.items():
            changed = changed.model_copy(update={section: getattr(changed, section).model_copy(update=values)})
        result = estimate(describe_as(model, changed), changed, chip)
        if result.fits:
            yield f"{said} ({result.bytes / GB:.1f} GB)"

    fixed = config.mesh.data * config.mesh.fsdp
    if config.model.remat not in ("full", "offload"):
        yield from tried("model.remat=full", model={"remat": "full"})
    if config.model.remat != "offload":
        yield from tried("model.remat=offload", model={"remat": "offload"})
    if not config.optimizer.offload and not config.rti.replay.rows:
        yield from tried("optimizer.offload=true", optimizer={"offload": True})
    if config.rollout.staleness:  # which keeps weights for the scores of what it samples
        yield from tried("rollout.staleness=0", rollout={"staleness": 0})
    for rows in sorted({r for r in (fixed, microbatch_rows(config) // 2) if r < microbatch_rows(config)}, reverse=True):
        yield from tried(f"batch.rows_per_microbatch={rows}", batch={"rows_per_microbatch": rows})
    if config.engine.kind == "vllm":
        for share in (0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2):
            found = list(tried(f"engine.memory_fraction={share}", engine={"memory_fraction": share}))
            if share != config.engine.memory_fraction and found:
                yield found[0]
                break
        yield from tried("engine.kind=server with engine.urls, on devices of its own", engine={"kind": "server"})
    for factor in (2, 4, 8, 16, 32, 64):
        wider = config.mesh.fsdp * factor
        rows = max(config.batch.rows_per_microbatch, config.mesh.data * wider)
        found = list(
            tried(
                f"--devices {math.prod(mesh_axes(config.mesh).values()) * factor} (mesh.fsdp={wider})",
                mesh={"fsdp": wider},
                batch={"rows_per_microbatch": rows},
            )
        )
        if found:
            yield found[0]
            break
    devices = math.prod(mesh_axes(config.mesh).values())
    for factor in (2, 4, 8):
        context = config.mesh.context * factor
        said = f"--devices {devices * factor} mesh.context={context}"
        if all(b % context == 0 for b in config.batch.buckets) and (
            found := list(tried(said, mesh={"context": context}))
        ):
            yield found[0]
            break
    shorter = [b for b in config.batch.buckets if b < max(config.batch.buckets)]
    if shorter:
        yield from tried(
            f"batch.buckets={shorter} with sampling.max_context={max(shorter)}",
            batch={"buckets": shorter},
            sampling={"max_context": max(shorter)},
        )


def on_chip(model: Any, chip: Chip) -> Any:
    """The model with cuDNN's attention where `auto` takes it: no policy of rematerialisation reaches into that."""
    import jax

    execution = model.execution
    heads = jax.ShapeDtypeStruct((1, 1, 1, model.config.head_dim), execution.dtype)
    if chip.kind != "gpu" or execution.attention != "auto" or not cudnn_can(heads):
        return model
    return dataclasses.replace(model, execution=dataclasses.replace(execution, attention="cudnn"))


def describe_as(model: Any, config: Config) -> Any:
    """The model, executed as another config says."""
    execution = dataclasses.replace(model.execution, remat=config.model.remat)
    return dataclasses.replace(model, execution=execution)


PART_NAMES = {
    "parameters": "parameters, float32",
    "gradients": "gradients, float32: summed, of a micro-batch, of corrections",
    "optimizer": "optimizer moments",
    "reference": "reference parameters (loss.kl_beta)",
    "held": "parameters that sampled, for scores (rollout.staleness)",
    "teacher": "teacher's parameters, float32 (loss.teacher.path)",
    "frozen_engines": "engines of frozen models (engine.frozen_fraction)",
    "compute_weights": "weights of the layers in the compute dtype",
    "activations": "activations kept for the backward pass",
    "workspace": "working set",
    "engine_weights": "engine: weights",
    "engine_cache": "engine: key/value cache and graphs",
}


def text(result: dict[str, Any]) -> str:
    """The plan for a person."""
    shape, spaces = result["microbatch"], result["workspaces"]
    mesh = " ".join(f"{axis}={n}" for axis, n in result["mesh"].items() if n > 1) or "one device"
    lines = [
        f"{result['model']}: {result['model_parameters'] / 1e6:,.1f} million parameters",
        f"{result['devices']} x {result['chip']} ({mesh}), rows of {shape['row_length']} tokens, "
        f"{shape['rows_per_device']} on each "
        + (f"group of {shared} devices that share them" if (shared := result["mesh"]["context"]) > 1 else "device"),
        "",
        "bytes on the fullest device",
    ]
    lines += [f"  {value / GB:7.2f} GB  {PART_NAMES[name]}" for name, value in result["parts"].items() if value]
    lines += [
        f"  {result['bytes_per_device'] / GB:7.2f} GB  of {result['bytes_available'] / GB:.0f} GB: "
        + ("fits" if result["fits"] else "DOES NOT FIT"),
        f"  working set: a layer's backward pass {spaces['layer'] / GB:.2f} GB, or the logits' chunk and the head "
        f"{spaces['logits'] / GB:.2f} GB",
    ]
    if kept := sum(result["host_bytes_per_device"].values()):
        lines.append(f"  {kept / GB:7.2f} GB  in its host's memory: moments or layers' inputs")
    if result["engine_cache_tokens"] is not None:
        lines.append(f"  the engine's cache holds about {result['engine_cache_tokens']} tokens")
    sent = result["communication_bytes_per_step"]
    lines += [
        "",
        f"a step, episodes of {result['episode_tokens']} tokens: {result['tokens_per_step']} tokens, "
        f"{result['flops_per_step']:.3g} operations computed ({result['model_flops_per_step']:.3g} without what is "
        "computed again)",
        f"sent by a device: {sent['bytes'] / GB:.1f} GB, the least for this mesh {sent['ideal'] / GB:.1f} GB, "
        f"{result['communication_seconds']:.1f} s of its link",
        *host_lines(result),
        f"seconds at {result['utilization']:.0%} of the peak (update) and {result['decode_utilization']:.0%} of the "
        "memory's bandwidth (decoding, without interventions)",
    ]
    for name, seconds in result["seconds_per_step"].items():
        rollout = "-" if seconds["rollout"] is None else f"{seconds['rollout']:.4g}"
        lines.append(f"  {chips.CHIPS[name].name:8} update {seconds['update']:>8.4g}   rollout {rollout:>8}")
    if said := result.get("compiled"):
        lines += ["", *compiled_lines(said)]
    if not result["fits"]:
        changes = result["changes"] or ["no single change makes it fit; combine fewer rows, more devices, shorter rows"]
        lines += ["", "it does not fit; any of these changes alone would do:", *(f"  {c}" for c in changes)]
    if result["notes"]:
        lines += ["", *(f"note: {note}" for note in result["notes"])]
    return "\n".join(lines)


def host_lines(result: dict[str, Any]) -> Iterator[str]:
    """What goes to the host's memory and back in a step, if anything does."""
    if moved := result["host_transfer_bytes_per_step"]:
        seconds = result["host_transfer_seconds"]
        took = "" if seconds is None else f", {seconds:.1f} s of its link to the host"
        yield f"to the host's memory and back: {moved / GB:.1f} GB{took}"


def compiled_lines(said: dict[str, Any]) -> Iterator[str]:
    for name, program in said["programs"].items():
        if "refused" in program:
            yield f"TPU's compiler, {name}: {program['refused']}"
            continue
        yield (
            f"TPU's compiler, {name}: peak {program['peak'] / GB:.2f} GB (arguments {program['arguments'] / GB:.2f}, "
            f"temporaries as laid out {program['temporaries'] / GB:.2f}), {program['compile_seconds']:.0f} s"
        )
    yield (
        f"formulas for accumulate: {said['estimated_peak'] / GB:.2f} GB; optimizer, engine and the sum of corrected "
        "tokens are no part of that program"
    )
