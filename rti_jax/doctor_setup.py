"""Checks of `rti doctor` on what a run finds around it: model folder, devices, endpoints, tasks, disk."""

import collections
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

from envs.base import ModelEndpoint
from rti_jax import config as config_lib
from rti_jax import config_diff, endpoint_policy, evaluate, replay, roles, runs, task_sets, weight_sync
from rti_jax.config_sections import PolicyEndpointConfig
from rti_jax.doctor_records import Finding, Subject, failure, listed, not_applicable, ok, warning
from rti_jax.engine_errors import CutOffError, EngineError
from rti_jax.environments import sample_tasks

ENDPOINT_SECONDS = 30.0
GIB = 2**30


async def model(subject: Subject) -> Finding:
    """The folder holds a supported model with weights of the expected names."""
    from models import hf

    described = hf.describe(subject.folder)
    shapes = weight_sync.expected_shapes(subject.folder)
    wanted = {name: tensor.hf_shape for tensor in described.tensors for name in tensor.hf_names()}
    if wrong := sorted(n for n in wanted.keys() | shapes.keys() if wanted.get(n) != shapes.get(n)):
        return failure(
            f"weights that config.json does not describe, or that are missing: {listed(wrong)}",
            "get the model folder anew, all of its files",
        )
    tied = ", head tied to the embedding" if subject.tied else ""
    return ok(f"{subject.folder}: {described.model_type}, {_parameters(shapes) / 1e6:.1f}M parameters{tied}")


async def devices(subject: Subject) -> Finding:
    """The mesh fits the devices that are here."""
    import jax

    from rti_jax.runtime import make_mesh

    shape = make_mesh(subject.config.mesh).shape
    axes = " ".join(f"{name}={size}" for name, size in shape.items())
    return ok(f"{jax.device_count()} {jax.default_backend()} device(s), mesh {axes}")


async def run_folder(subject: Subject) -> Finding:
    """`rti train` would not refuse the run folder."""
    run = runs.Run(subject.config.run_dir)
    if not run.config.is_file():
        if run.folder.is_dir() and any(run.folder.iterdir()):
            return failure(f"{run.folder} is not empty and holds no run", "give another name=")
        return ok(f"{run.folder} is free")
    if run.begun:
        config_diff.check_resume(config_lib.load_config(run.config), subject.config)
        return ok(f"{run.folder} holds a run, which would go on")
    return ok(f"{run.folder} holds a run that has not begun")


async def keys(subject: Subject) -> Finding:
    """Every endpoint that the config names has its key, and answers."""
    config = subject.config
    subject.source.check()
    endpoints = (
        _role_endpoints(config)
        | _policy_endpoint(config.eval.endpoint)
        | {f"env.{role}": e for role, e in subject.source.cls.endpoints(subject.source.config).items()}
    )
    servers = config.engine.urls if config.engine.kind == "server" else []
    if not endpoints and not servers:
        return not_applicable("the config names no endpoint")
    problems = [p for name, e in endpoints.items() if (p := await _unanswered(name, e))]
    problems += [p for url in servers if (p := await _unreachable(url))]
    if problems:
        return failure("; ".join(problems), "set the key, start what does not answer, or correct its url and model")
    return ok(f"{len(endpoints) + len(servers)} answer: {', '.join([*endpoints, *servers])}")


def _role_endpoints(config: config_lib.Config) -> dict[str, ModelEndpoint]:
    """Roles that another model plays."""
    chosen = {r: roles.role_config(config.rti, r) for r in roles.ROLES} if config.rti.enabled else {}
    key = os.environ.get("OPENAI_API_KEY", "")
    return {
        f"rti.roles.{r}": ModelEndpoint(c.endpoint, c.model, key, "OPENAI_API_KEY")
        for r, c in chosen.items()
        if c.endpoint
    }


def _policy_endpoint(chosen: PolicyEndpointConfig) -> dict[str, ModelEndpoint]:
    """Another model that `rti eval` plays in the policy's place."""
    name = chosen.key_variable
    key = endpoint_policy.key(chosen) or os.environ.get("OPENAI_API_KEY", "")  # as ChatEndpoint takes it
    return {"eval.endpoint": ModelEndpoint(chosen.url, chosen.model, key, name)} if chosen.url else {}


async def _unanswered(name: str, endpoint: ModelEndpoint) -> str:
    """Why an endpoint does not answer a request of one token, or nothing."""
    from rti_jax.endpoints import ChatEndpoint

    client = ChatEndpoint(endpoint.url, endpoint.model, key=endpoint.key, timeout=ENDPOINT_SECONDS, retries=0)
    try:
        await client.complete([{"role": "user", "content": "Say ok."}], temperature=0.0, max_tokens=1)
        return ""
    except CutOffError:
        return ""  # after the one token that was asked for
    except EngineError as error:
        refused = error.http_status in (401, 403)
        kind = ("wrong key: " if endpoint.key else "missing key: ") if refused else ""
        return f"{kind}{name}: {error}" + ("" if endpoint.key else f" ({endpoint.key_variable} is not set)")
    finally:
        await client.close()


async def _unreachable(url: str) -> str:
    import httpx

    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        async with httpx.AsyncClient(timeout=ENDPOINT_SECONDS) as client:
            response = await client.get(address)
    except httpx.HTTPError as error:
        return f"engine.urls: {address}: {type(error).__name__} {error}".rstrip()
    return f"engine.urls: {address}: {response.status_code}" if response.is_error else ""


async def tasks(subject: Subject) -> Finding:
    """The splits are there and share no task, a step can be drawn, and role prompts can be read."""
    config, source = subject.config, subject.source
    trained, held_out = task_sets.trained(source, config), task_sets.held_out(source, config)
    evaluate.check_disjoint(trained, held_out)
    sample_tasks(trained, 0, config.rollout.groups_per_step, config.seed, config.rollout.mix)
    roles.RolePrompts(config.rti.prompts)
    replay.check(config)
    kinds = collections.Counter(t.kind for t in trained)
    shown = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return ok(f"{shown} to train on, {len(held_out)} held out, none in both")


async def disk(subject: Subject) -> Finding:
    """Room for checkpoints and the export, and for handing over weights."""
    config = subject.config
    shapes = weight_sync.expected_shapes(subject.folder)
    parameters = _parameters(shapes)
    checkpoint = 12 * parameters  # float32 parameters and at most two moments
    export = 4 * parameters * (2 if config.eval.keep_best else 1)
    # A checkpoint is written before the oldest one is deleted.
    need = checkpoint * (config.checkpoint.keep + 1) + export
    folder = _existing(pathlib.Path(config.runs_dir))
    if not os.access(folder, os.W_OK):
        return failure(f"{folder} cannot be written", "set runs_dir to a folder of your own")
    free = shutil.disk_usage(folder).free
    said = (
        f"{free / GIB:.1f} GiB free in {folder}, {need / GIB:.2f} needed ({config.checkpoint.keep} + 1 checkpoints of "
        f"{checkpoint / GIB:.2f}, export {export / GIB:.2f})"
    )
    if free < need:
        return failure(f"disk: {said}", "free space, set runs_dir to another disk, or lower checkpoint.keep")
    payload = parameters * (2 if config.model.dtype == "bfloat16" else 4)
    if not any(shutil.disk_usage(f).free > 1.05 * payload + 2**20 for f in _handover(config.engine.weights_dir)):
        return failure(
            f"no room for {payload / GIB:.2f} GiB of weights in {weight_sync.SHARED_MEMORY} or {tempfile.gettempdir()}",
            "enlarge shared memory (docker: --shm-size), or set engine.weights_dir",
        )
    if free < 1.5 * need:
        return warning(f"little room: {said}; trajectories and evaluations come on top", "free space")
    return ok(said)


def _handover(chosen: str) -> list[pathlib.Path]:
    folders = [chosen] if chosen else [weight_sync.SHARED_MEMORY, tempfile.gettempdir()]
    return [p for p in map(pathlib.Path, folders) if p.is_dir()]


def _existing(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.is_dir())


def _parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
