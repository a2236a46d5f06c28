"""Weights & Biases and Trackio beside metrics.jsonl (`logging.sinks`): optional, and never what ends a run.

The id of a run there is kept in the run folder, so that a run that goes on is one run there too. What is wrong when a
run is begun (a package that is missing, no login) is an error before vLLM starts; later it is a warning.
"""

import importlib.util
import json
import logging
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rti_jax import redaction, runs
from rti_jax.config import Config, ConfigError, LoggingConfig

IDS = "trackers.json"  # in the run folder: name of the sink -> id of the run there
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """One run at one service."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class WandbRun:
    """A run of Weights & Biases; its files, those of offline mode included, are in the run folder."""

    def __init__(self, config: Config, folder: pathlib.Path, run_id: str, described: dict[str, Any]):
        import requests.utils  # a requirement of wandb's
        import wandb

        own, settings = config.logging, wandb.setup().settings
        mode = own.mode if own.mode == "offline" else settings.mode  # $WANDB_MODE, else online
        login = settings.api_key or settings.identity_token_file or requests.utils.get_netrc_auth(settings.base_url)
        if mode == "online" and not login:  # at a terminal it would ask, and wait
            raise ConfigError("it has no API key: `wandb login`, or WANDB_API_KEY")
        self._run = wandb.init(
            project=own.project,
            entity=own.entity or None,
            group=own.group or None,
            tags=own.tags,
            name=config.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=described,
            # The terminal's text, the command line and a git remote may hold secrets: they stay here.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_meta=True),
        )
        # A step that is made again after a crash is logged again, which its own counter of steps would drop.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self) -> None:
        self._run.finish()


class TrackioRun:
    """A run of Trackio: in its folder on this machine ($TRACKIO_DIR), in a Space or on a server of its own."""

    def __init__(self, config: Config, folder: pathlib.Path, run_id: str, described: dict[str, Any]):
        import trackio

        own = config.logging
        remote = {"server_url" if "://" in own.space else "space_id": own.space} if own.space else {}
        self._run = trackio.init(
            project=own.project,
            name=f"{config.name}-{run_id}",
            group=own.group or None,
            config=described | ({"tags": own.tags} if own.tags else {}),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **(remote if own.mode == "online" else {}),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[..., Sink]] = {"wandb": WandbRun, "trackio": TrackioRun}


def check(config: LoggingConfig) -> None:
    """Raises ConfigError if the package of a sink is not installed."""
    for name in config.sinks:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb makes, is no package
            raise ConfigError(f"logging.sinks: {name} is not installed: pip install {name}")


class Trackers:
    """All sinks of a run. What they raise is warned of once for each, until it works again.

    Args:
      folder: the run folder.

    Raises:
      ConfigError: a sink does not start, and the run has none there yet.
    """

    def __init__(self, config: Config, folder: pathlib.Path):
        check(config.logging)
        self._sinks: dict[str, Sink] = {}
        self._failing: set[str] = set()
        try:
            self._start(config, folder)
        except BaseException:
            self.finish()  # those that did start
            raise

    def _start(self, config: Config, folder: pathlib.Path) -> None:
        path = folder / IDS
        ids = json.loads(path.read_text()) if path.is_file() else {}
        described = redaction.described(config.model_dump(mode="json"))
        for name in dict.fromkeys(config.logging.sinks):
            begun, run_id = name in ids, ids.get(name) or secrets.token_hex(4)
            try:
                self._sinks[name] = KINDS[name](config, folder, run_id, described)
            except Exception as error:  # whatever a service's client raises
                says = " ".join(f"{error}".split()) or type(error).__name__
                if not begun:
                    raise ConfigError(
                        f"logging.sinks: {name} did not start ({says}); logging.mode=offline keeps it on this machine"
                    ) from error
                logger.warning("%s did not start (%s): the run goes on without it", name, says)
            ids[name] = run_id
            folder.mkdir(parents=True, exist_ok=True)
            runs.write_json(path, ids)  # also if the next one does not start: the run is begun there

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Sends the values that are numbers."""
        numbers = {k: v for k, v in values.items() if v is not None and k != "step"}
        for name, sink in self._sinks.items():
            self._try(name, lambda sink=sink: sink.log(step, numbers))

    def finish(self) -> None:
        for name, sink in self._sinks.items():
            self._try(name, sink.finish)

    def _try(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # of the network, say: metrics.jsonl has the numbers
            if name not in self._failing:
                says = " ".join(f"{type(error).__name__}: {error}".split())
                logger.warning("%s failed (%s); the run goes on, and metrics.jsonl has all of it", name, says)
            self._failing.add(name)
        else:
            self._failing.discard(name)
