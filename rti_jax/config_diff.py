"""What differs between two configs, and whether a run may go on under the new one."""

from typing import Any, NamedTuple

from rti_jax import config_errors, redaction
from rti_jax.config import Config, ConfigError

# Keys that may differ when a run is resumed: where and how fast it runs, what is measured, when it ends.
HARMLESS = (
    "name",
    "runs_dir",
    "steps",
    "eval",
    "checkpoint",
    "stop",
    "alarms",
    "logging",
    "engine",
    "mesh",
    "hosts",
    "rollout.concurrency",
    "rollout.episode_timeout",
    "rollout.step_timeout",
    "rollout.retries",
    "model.attention",
    "model.remat",
    "model.scan_layers",
    "optimizer.offload",
    "batch",
)


class Difference(NamedTuple):
    """One key whose value differs between two configs."""

    key: str
    old: Any
    new: Any
    harmless: bool

    def __str__(self) -> str:
        return f"{self.key}: {config_errors.shown(self.old)} -> {config_errors.shown(self.new)}"


def differences(old: Config, new: Config) -> list[Difference]:
    """Keys whose values differ, in order; `steps` is harmless only while no schedule depends on it.

    Secrets are left out: what a run folder keeps of its config is without them.
    """
    before, after = (flat(redaction.described(config.model_dump())) for config in (old, new))
    harmless = tuple(k for k in HARMLESS if k != "steps" or new.optimizer.schedule == "constant")
    return [
        Difference(key, before.get(key), after.get(key), any(f"{key}.".startswith(f"{h}.") for h in harmless))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def check_resume(old: Config, new: Config) -> None:
    """Refuses to continue a run under another algorithm.

    Raises:
      ConfigError: with a line for each key that changes what is trained.
    """
    changed = [d for d in differences(old, new) if not d.harmless]
    if changed:
        raise ConfigError(
            f"{new.run_dir} was started with other values of keys that change the algorithm; give them back, or start "
            "anew with another name=...\n" + "\n".join(f"  {d}" for d in changed)
        )


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict of dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found
