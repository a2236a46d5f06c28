"""What an evaluation's episodes were made with, kept beside them: another setup may not add to them."""

import dataclasses
import pathlib
from collections.abc import Mapping

from rti_jax import config_diff, config_errors, strict_yaml
from rti_jax.config import Config, ConfigError, validate, without_secrets
from rti_jax.redaction import redact

# Config keys that change what is played. Not those of how fast it runs, and not eval.trials: an episode's seeds are
# those of its trial, so more trials only add to what is there.
DECISIVE = (
    "seed",
    "env",
    "sampling",
    "rollout.truncated_is_failure",
    "eval.temperature",
    "eval.split",
    "eval.splits",
    "eval.tasks",
    "eval.limit",
)
OF_AN_ENGINE = ("model.dtype", "engine.args")
OF_AN_ENDPOINT = ("eval.endpoint.extra_body",)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which policy it is; two are the same exactly if their digests are.

    Attributes:
      key: what chose it, a config key or an option. name: readable.
    """

    key: str
    name: str
    digest: str

    def difference(self, other: "Identity") -> str:
        """How another policy than the recorded one was chosen, as a line; empty for the same."""
        if self.digest == other.digest:
            return ""
        if self.name == other.name:
            return f"{self.key}: the files of {self.name} have changed"
        key = other.key if self.key == other.key else f"{self.key}, {other.key}"
        return f"{key}: {config_errors.shown(self.name)} -> {config_errors.shown(other.name)}"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What episodes are made with; without secrets, since it is kept beside them.

    Attributes:
      purpose: the random stream, e.g. "eval". tasks: ids, in order.
      asked: which other model plays each role of the environment ("user", "judge"), wherever its name comes from.
    """

    purpose: str
    config: Config
    policy: Identity
    tasks: tuple[str, ...]
    asked: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        shown = {
            "config": without_secrets(self.config),
            "policy": dataclasses.replace(self.policy, name=redact(self.policy.name)),
            "asked": {role: redact(model) for role, model in self.asked.items()},
        }
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    def differences(self, new: "Setup") -> list[str]:
        """What is different in `new`, a line each."""
        lines = [] if self.purpose == new.purpose else [f"made by rti {self.purpose}, not rti {new.purpose}"]
        keys = DECISIVE + (OF_AN_ENDPOINT if new.config.eval.endpoint.url else OF_AN_ENGINE)
        roles = sorted({*self.asked, *new.asked})
        told = {f"env.{role}.{key}" for role in roles for key in ("url", "model")}  # by `asked`: an address may change
        lines += [
            str(d)
            for d in config_diff.differences(self.config, new.config)
            if any(f"{d.key}.".startswith(f"{key}.") for key in keys) and d.key not in told
        ]
        lines += filter(None, [self.policy.difference(new.policy)])
        for role in roles:
            old, now = self.asked.get(role, ""), new.asked.get(role, "")
            if old != now:
                lines.append(f"{role}: {config_errors.shown(old)} -> {config_errors.shown(now)}")
        if self.tasks != new.tasks:
            odd = sorted(set(self.tasks) ^ set(new.tasks))
            example = f", e.g. {odd[0]}" if odd else ", in another order"
            lines.append(f"tasks: {len(self.tasks)} -> {len(new.tasks)}{example}")
        return lines

    def write(self, path: pathlib.Path) -> None:
        data = {
            "purpose": self.purpose,
            "policy": dataclasses.asdict(self.policy),
            "tasks": list(self.tasks),
            "asked": dict(self.asked),
            "config": self.config.model_dump(mode="python"),
        }
        partial = path.with_name(path.name + ".partial")
        partial.write_text(strict_yaml.dump(data), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: pathlib.Path) -> "Setup":
        """Raises ConfigError for a file of another kind, or of a version with other keys."""
        try:
            data = strict_yaml.parse(path.read_text(encoding="utf-8"))
            config = validate(data["config"], Config)
            asked = data.get("asked", {})  # not in files of earlier versions
            return cls(data["purpose"], config, Identity(**data["policy"]), tuple(data["tasks"]), asked)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} cannot be read by this version ({error})") from error


def setup_file(path: pathlib.Path) -> pathlib.Path:
    """Beside an evaluation's X.json or X.jsonl."""
    return path.with_suffix(".setup.yaml")
