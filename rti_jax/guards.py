"""What ends a run that goes on but no longer learns: updates that are never finite, steps whose groups all break."""

import collections
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rti_jax.batching import PackedBatch
from rti_jax.config import StopConfig
from rti_jax.disk import writing
from rti_jax.types import Status

BROKEN = tuple(status.value for status in Status if not status.valid)
logger = logging.getLogger(__name__)


class RunStopped(Exception):
    """The run was ended by a guard; one line that says what to look at."""


class Guards:
    """Looks at each step's metrics.

    Args:
      folder: the run folder, where the batch of a first update that is not finite is written.
      host: number of this process, each of which writes its rows of such a batch.
    """

    def __init__(self, config: StopConfig, folder: pathlib.Path, host: int = 0):
        self._config, self._folder, self._host = config, folder, host
        self._nonfinite = self._empty = 0  # steps in a row
        self._reasons: collections.Counter[str] = collections.Counter()  # what broke episodes in the empty ones

    @property
    def state(self) -> dict[str, Any]:
        """What has to outlive an interruption, as JSON values."""
        return {"nonfinite": self._nonfinite, "empty": self._empty, "reasons": dict(self._reasons)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`; an empty one is that of a new run."""
        self._nonfinite, self._empty = state.get("nonfinite", 0), state.get("empty", 0)
        self._reasons = collections.Counter(state.get("reasons", {}))

    def check(self, step: int, metrics: Mapping[str, float], packed: Sequence[PackedBatch]) -> None:
        """Raises RunStopped after `stop.nonfinite_steps` or `stop.dropped_steps` such steps in a row."""
        if metrics.get("optimizer/updates"):
            self._nonfinite = self._nonfinite + 1 if metrics.get("optimizer/skipped") else 0
        if self._nonfinite == 1 and metrics.get("optimizer/skipped"):
            own = f"_host_{self._host}" if self._host else ""
            path = dump(packed, self._folder / f"nonfinite_step_{step:06d}{own}.npz")
            logger.warning("the gradient of step %d is not finite and was left out; its batch is in %s", step, path)
        if self._nonfinite >= self._config.nonfinite_steps:
            raise RunStopped(
                f"the gradients of {self._nonfinite} steps in a row were not finite (stop.nonfinite_steps): lower "
                f"optimizer.lr or look at {self._folder}/nonfinite_step_*.npz; checkpoints hold the last finite weights"
            )
        dropped = metrics.get("groups/dropped", 0.0)
        if not (dropped and dropped >= metrics.get("rollout/groups", np.inf)):
            self._empty, self._reasons = 0, collections.Counter()
            return
        self._empty += 1
        self._reasons.update({name: int(metrics.get(f"rollout/{name}") or 0) for name in BROKEN})
        if self._empty >= self._config.dropped_steps:
            counted = ", ".join(f"{name} {n}" for name, n in self._reasons.most_common() if n)
            raise RunStopped(
                f"in {self._empty} steps in a row every group had fewer than two valid episodes (stop.dropped_steps): "
                f"{counted or 'no reason counted'}; trajectories/ says what broke them"
            )


def dump(packed: Sequence[PackedBatch], path: pathlib.Path) -> pathlib.Path:
    """Writes every array of a batch, named `mini-batch/micro-batch/field`."""
    arrays = {
        f"{i}/{j}/{name}": value
        for i, part in enumerate(packed)
        for j, batch in enumerate(part.microbatches)
        for name, value in batch._asdict().items()
    }
    with writing(path), open(path, "wb") as file:
        np.savez_compressed(file, **arrays)
    return path
