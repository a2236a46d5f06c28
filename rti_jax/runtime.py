"""What a run is made of: devices, the model born sharded on them, the tokenizer and the environment's class."""

import dataclasses
import pathlib
import typing
from typing import Any

from rti_jax import config as config_lib

if typing.TYPE_CHECKING:
    from rti_jax.chat import Chat


def make_mesh(config: config_lib.MeshConfig):
    """A device mesh with axes (data, fsdp, tensor, context); fsdp = -1 takes the devices that are left.

    Raises:
      ConfigError: if the axes do not multiply to the number of devices, or rows would be shared by hosts.
    """
    import jax

    devices = jax.device_count()
    fixed = config.data * config.tensor * config.context
    fsdp = devices // fixed if config.fsdp == -1 else config.fsdp
    if fsdp < 1 or fixed * fsdp != devices:
        raise config_lib.ConfigError(
            f"mesh data={config.data} fsdp={config.fsdp} tensor={config.tensor} context={config.context} does not "
            f"multiply to the {devices} device(s) here; set mesh.fsdp=-1 to take what is left"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * 4
    mesh = jax.make_mesh(
        (config.data, fsdp, config.tensor, config.context), ("data", "fsdp", "tensor", "context"), axis_types=axis_types
    )
    shared = mesh.devices.reshape(config.data * fsdp, -1)  # devices that hold the same rows
    if any(len({d.process_index for d in devices}) > 1 for devices in shared):
        raise config_lib.ConfigError(
            f"mesh.tensor={config.tensor} mesh.context={config.context} spread rows over several hosts; each gives its "
            f"own rows, so that tensor times context must divide the {jax.local_device_count()} device(s) of a host"
        )
    return mesh


def check_folder(path: str) -> pathlib.Path:
    """The model folder, or a one-line error that says how to get one."""
    folder = pathlib.Path(path)
    if not path:
        raise config_lib.ConfigError("model.path is empty: name a Hugging Face folder, e.g. model.path=models/Qwen3-8B")
    if not (folder / "config.json").is_file():
        if (folder / "config.yaml").is_file():
            raise config_lib.ConfigError(
                f"model.path={path} is a run folder: give model.path={folder / 'export'}, or for a checkpoint of it "
                f"rti eval {folder} --step N"
            )
        raise config_lib.ConfigError(
            f"model.path={path}: no config.json there (seen from {pathlib.Path.cwd()}); give a Hugging Face folder"
        )
    return folder


@dataclasses.dataclass(frozen=True)
class Policy:
    """The learner's side of the policy: model functions, parameters on the mesh, and how to talk to it."""

    model: Any  # models.hf.LanguageModel
    params: Any
    mesh: Any
    chat: "Chat"


def load_policy(config: config_lib.Config) -> Policy:
    """Loads `model.path` onto the mesh."""
    folder = check_folder(config.model.path)
    from models import hf
    from rti_jax.chat import Chat

    mesh = make_mesh(config.mesh)
    try:
        model, params = hf.load(
            folder,
            dtype=config.model.dtype,
            attention=config.model.attention,
            remat=config.model.remat,
            scan_layers=config.model.scan_layers,
            mesh=mesh,
        )
    except ValueError as error:
        raise config_lib.ConfigError(f"model.path={folder}: {error}") from error
    return Policy(model, params, mesh, Chat.from_folder(folder, thinking=config.sampling.thinking))
