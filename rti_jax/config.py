"""Typed configuration: sparse YAML plus dotted overrides; unknown keys and wrong types are one clear line.

Config         the sections of config_sections.py, where the keys are, and what they ask of each other
load_config    a YAML file, those that it inherits from, and overrides -> a checked config
"""

import difflib
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pydantic

from rti_jax import config_errors, redaction, strict_yaml
from rti_jax.config_sections import (
    AlarmsConfig,
    BatchConfig,
    CheckpointConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    GateConfig,
    HostsConfig,
    LoggingConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ReweightConfig,
    RolloutConfig,
    RTIConfig,
    SamplingConfig,
    Section,
    StopConfig,
)


class ConfigError(Exception):
    """A user's mistake in a config or on the command line: one line, names the fix, never a traceback."""


class Config(Section):
    """The whole configuration of a run."""

    name: str = "run"  # run folder: runs/NAME
    runs_dir: str = "runs"  # where run folders are
    seed: int = 0  # of everything that is drawn: tasks, sampling, interventions
    steps: int = pydantic.Field(100, ge=0)  # rollout + update; ours
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    rti: RTIConfig = RTIConfig()
    gate: GateConfig = GateConfig()
    reweight: ReweightConfig = ReweightConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    logging: LoggingConfig = LoggingConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _baseline_without_rti(cls, data: Any) -> Any:
        """rti.enabled is true by default, but not beside a baseline."""
        loss, rti = (data.get(k, {}) for k in ("loss", "rti")) if isinstance(data, dict) else (None, None)
        if isinstance(loss, dict) and isinstance(rti, dict) and loss.get("baseline", "none") != "none":
            return data | {"rti": {"enabled": False} | rti}
        return data

    @pydantic.model_validator(mode="before")
    @classmethod
    def _recorded_behavior(cls, data: Any) -> Any:
        """A batch of older weights is corrected by the log-probabilities that were recorded when it was sampled."""
        loss, rollout = (data.get(k, {}) for k in ("loss", "rollout")) if isinstance(data, dict) else (None, None)
        if isinstance(loss, dict) and isinstance(rollout, dict) and rollout.get("staleness") == 1:
            if loss.get("mismatch_clip") is None:
                return data | {"loss": {"behavior": "engine"} | loss}
        return data

    @pydantic.model_validator(mode="after")
    def _bounded_staleness(self):
        if not self.rollout.staleness:
            return self
        if self.loss.behavior == "recompute" and self.loss.mismatch_clip is None:
            raise ValueError(
                "rollout.staleness=1 trains on what older weights sampled, and loss.behavior=recompute alone forgets "
                "that; set loss.behavior=engine, or loss.mismatch_clip (e.g. 2) beside it"
            )
        if self.engine.sleep:
            raise ValueError(
                "rollout.staleness=1 samples while the update runs, in which engine.sleep=true gives the engine's "
                "memory away; set one of them to its default"
            )
        if self.hosts.coordinator and self.gate.scope == "turn":
            raise ValueError(
                "rollout.staleness=1 with hosts.coordinator scores corrections after the update, for which no episode "
                "can wait in its middle; set gate.scope=trajectory or rollout.staleness=0"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _consistent(self):
        if self.loss.baseline != "none" and self.rti.enabled:
            raise ValueError(
                f"loss.baseline={self.loss.baseline} and rti.enabled=true are two methods; "
                "set rti.enabled=false or loss.baseline=none"
            )
        if self.rollout.max_rounds > 1 and self.loss.variant != "dapo":
            raise ValueError(
                f"rollout.max_rounds={self.rollout.max_rounds} replaces groups without a gradient, which only "
                "loss.variant=dapo leaves out; set loss.variant=dapo or rollout.max_rounds=1"
            )
        if self.loss.variant == "gspo" and self.reweight.enabled and self.rti.enabled:
            raise ValueError(
                "loss.variant=gspo has one ratio per sequence, so token weights have no place in it; "
                "set reweight.enabled=false or rti.enabled=false"
            )
        if self.engine.kind == "server" and not (self.engine.urls or self.engine.start):
            raise ValueError("engine.kind=server needs engine.urls, or engine.start for servers on this host")
        if self.engine.devices and len(self.engine.devices) != self.engine.start:
            raise ValueError(
                f"engine.devices names {len(self.engine.devices)} sets of devices for engine.start={self.engine.start} "
                "servers; give one each"
            )
        for transfer, kind in (("nccl", "server"), ("ipc", "vllm")):
            if self.engine.weight_transfer == transfer and self.engine.kind != kind:
                raise ValueError(
                    f"engine.weight_transfer={transfer} is for engine.kind={kind}: NCCL needs GPUs of its own on each "
                    "side, CUDA IPC the same ones"
                )
        if self.engine.weight_transfer == "file" and not self.engine.weights_dir:
            raise ValueError("engine.weight_transfer=file needs engine.weights_dir, a folder that every engine sees")
        if self.optimizer.offload and self.rti.replay.rows:
            raise ValueError("optimizer.offload=true: role replay (rti.replay.rows) needs the moments on the device")
        if self.hosts.coordinator:
            if self.loss.baseline != "none":
                raise ValueError(
                    f"loss.baseline={self.loss.baseline}: not with hosts.coordinator yet, on one host only"
                )
            if self.rollout.max_rounds > 1:
                raise ValueError(
                    f"rollout.max_rounds={self.rollout.max_rounds}: not with hosts.coordinator yet, on one host only"
                )
        if odd := [b for b in self.batch.buckets if b % self.mesh.context]:
            raise ValueError(
                f"batch.buckets holds {odd}, rows that mesh.context={self.mesh.context} devices cannot share evenly; "
                f"use multiples of {self.mesh.context}"
            )
        if self.mesh.fsdp == 0:
            raise ValueError("mesh.fsdp=0: give a number of devices, or -1 for those that are left")
        if self.name in ("", "..") or pathlib.PurePath(self.name).name != self.name or not self.name.isprintable():
            raise ValueError(f"name={self.name!r} must be one folder name; use runs_dir for where runs are kept")
        if math.isnan(self.gate.delta):
            raise ValueError("gate.delta must be a number, or inf to admit every perplexity")
        return self

    @property
    def on_policy(self) -> bool:
        """Whether the update's own forward pass is the behaviour of what it trains: one update, on its own samples."""
        own = self.rollout.staleness == 0 and self.optimizer.minibatches == 1
        return own and self.loss.behavior == "recompute"

    @property
    def frozen_folders(self) -> dict[str, str]:
        """Key -> folder of a model that a vLLM of its own serves in this run, never updated."""
        asked = self.rti.enabled or self.eval.roles
        folders = {f"rti.roles.{k}.model": v for k, v in self.rti.role_folders.items()} if asked else {}
        if self.loss.baseline == "luffy" and self.loss.teacher.path:
            folders["loss.teacher.path"] = self.loss.teacher.path
        return folders

    @property
    def run_dir(self) -> pathlib.Path:
        return pathlib.Path(self.runs_dir) / self.name


Origin = Callable[[str], str]  # where a key was given, as the start of an error line
SchemaT = TypeVar("SchemaT", bound=pydantic.BaseModel)


def load_config(
    path: str | pathlib.Path,
    overrides: Sequence[str] = (),
    schema: type[SchemaT] = Config,
    check_env: Callable[[EnvConfig, Origin], Any] | None = None,
) -> SchemaT:
    """A checked config: the YAML file, then `a.b=value` overrides in their order (values are YAML).

    A file may start from another one, `inherits: other.yaml` (relative to it): its keys are set over that one's.

    Args:
      check_env: checks the environment's own keys too (`rti_jax.environments.env_config`).

    Raises:
      ConfigError: one line for each mistake; a key's line names where it was given and the nearest valid key.
    """
    data = read_inherited(path)
    given = [apply_override(data, override) for override in overrides]
    origin: Origin = lambda key: _origin(key, given, path)  # noqa: E731
    config = validate(data, schema, origin)
    redaction.learn_config(config.model_dump())
    if check_env:
        check_env(config.env, origin)
    return config


def read_inherited(path: str | pathlib.Path, seen: Sequence[pathlib.Path] = ()) -> dict[str, Any]:
    """A YAML file set over the one that its key `inherits` names, section by section; lists are replaced."""
    path = pathlib.Path(path)
    if path.resolve() in seen:
        raise ConfigError(f"{path}: inherits from itself")
    data = read_yaml(path)
    if "inherits" not in data:
        return data
    base = data.pop("inherits")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: inherits: expected the name of a config beside it, got {config_errors.shown(base)}")
    return _over(read_inherited(path.parent / base, (*seen, path.resolve())), data)


def _over(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in data.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _over(base[key], value) if both else value
    return merged


def read_yaml(path: str | pathlib.Path) -> dict[str, Any]:
    """A YAML file that holds a mapping (or nothing)."""
    path = pathlib.Path(path)
    try:
        data = strict_yaml.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such config{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except strict_yaml.YamlError as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {config_errors.shown(data)}, not keys with values")
    return data or {}


def apply_override(data: dict[str, Any], override: str) -> str:
    """Sets `a.b=value` in nested dicts, in place, and returns the key; the value is YAML (`inf`, `[1, 2]`, `null`)."""
    key, equals, text = override.partition("=")
    *sections, leaf = key.split(".")
    if not equals or not all([*sections, leaf]):
        raise ConfigError(f"override {override!r} is not KEY=VALUE, e.g. optimizer.lr=3e-6")
    try:
        value = strict_yaml.parse(text)
    except strict_yaml.YamlError as error:
        raise ConfigError(f"override {override!r}: {error}") from None
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[leaf] = value
    return key


def _origin(key: str, given: list[str], path: str | pathlib.Path) -> str:
    """Where a key was given, as the start of an error line; empty for the command line and for several keys."""
    overridden = any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in given)
    return "" if overridden or key in ("", "env") else f"{path}: "


def validate(data: dict[str, Any], schema: type[SchemaT], origin: Origin = lambda key: "") -> SchemaT:
    """Nested dicts as a checked config. Raises ConfigError."""
    try:
        return schema.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(config_errors.explain(error, schema, origin=origin)) from None


def resolved_yaml(config: pydantic.BaseModel) -> str:
    """All keys with their values, as YAML that `load_config` reads back to an equal config."""
    return strict_yaml.dump(config.model_dump(mode="python"))


def without_secrets(config: SchemaT) -> SchemaT:
    """The config as it may be shown, and kept in a run folder."""
    return validate(redaction.described(config.model_dump()), type(config))


def save_resolved(config: pydantic.BaseModel, path: str | pathlib.Path) -> None:
    """Writes the resolved config, whole or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(resolved_yaml(config), encoding="utf-8")
    temporary.replace(path)
