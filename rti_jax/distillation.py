"""On-policy distillation (OPD): a teacher's log-probabilities of what the student has sampled.

The student plays, and every token it wrote has the advantage log pi_teacher - log pi_student (advantages.py); rewards
are measured and not trained on. The teacher sees the ids that the student saw, so both have one vocabulary.
"""

from collections.abc import Callable

import numpy as np

from rti_jax.config import Config, ConfigError
from rti_jax.frozen import check_vocabulary
from rti_jax.frozen_servers import FrozenServers
from rti_jax.learner import make_logprobs_step
from rti_jax.runtime import Policy, load_policy
from rti_jax.types import TrainBatch

Teacher = Callable[[TrainBatch], np.ndarray]  # micro-batch -> log pi_teacher of its tokens, [B, T]


def make_teacher(config: Config, policy: Policy) -> Teacher:
    """The teacher of `loss.teacher`.

    Raises:
      ConfigError: another vocabulary, no such folder, or a temperature that a server does not give.
    """
    if config.loss.teacher.path:
        return folder_teacher(config, policy)
    return server_teacher(config, policy)


def temperature(config: Config) -> float:
    """Of the teacher's distribution."""
    own = config.loss.teacher.temperature
    return config.sampling.temperature if own is None else own


def folder_teacher(config: Config, policy: Policy) -> Teacher:
    """A checkpoint as a second set of parameters on the mesh, by the forward pass that scores the student.

    At the same temperature, a teacher that is the student runs the very same program on the very same numbers, so that
    the advantages are exactly 0.
    """
    path = config.loss.teacher.path
    check_vocabulary(policy.chat, path, "loss.teacher.path")
    own = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": path}),
            "sampling": config.sampling.model_copy(update={"temperature": temperature(config)}),
        }
    )
    teacher = load_policy(own)
    logprobs = make_logprobs_step(teacher.model, own, policy.mesh)
    return lambda batch: logprobs(teacher.params, batch)


def server_teacher(config: Config, policy: Policy) -> Teacher:
    """vLLM servers: the log-probabilities of a prompt, which vLLM gives at temperature 1."""
    if temperature(config) != 1.0:
        raise ConfigError(
            f"loss.teacher.urls: a server scores prompts at temperature 1, not {temperature(config):g}; set "
            "loss.teacher.temperature=1 (the target is then the teacher at 1), or name a folder, loss.teacher.path"
        )
    servers = FrozenServers(config.loss.teacher.urls, policy.chat.tokenizer, config.rollout.concurrency)

    def logprobs(batch: TrainBatch) -> np.ndarray:
        places, rows = segments(batch)
        values = np.zeros(batch.tokens.shape, np.float32)
        for (b, part), scored in zip(places, servers.score(rows), strict=True):
            values[b, part] = scored
        return values

    return logprobs


def segments(batch: TrainBatch) -> tuple[list[tuple[int, slice]], list[tuple[int, ...]]]:
    """Where each segment with trained tokens stands in a packed batch, as (row, slice), and its ids."""
    places = []
    for b, row in enumerate(np.asarray(batch.segment_ids)):
        for segment in range(1, int(row.max(initial=0)) + 1):
            at = np.flatnonzero(row == segment)
            part = slice(int(at[0]), int(at[-1]) + 1)
            if batch.loss_mask[b, part].any():
                places.append((b, part))
    return places, [tuple(map(int, batch.tokens[b, part])) for b, part in places]


def statistics(batches: list[TrainBatch], teacher_logprobs: list[np.ndarray]) -> dict[str, float]:
    """Means over the trained tokens of an update: the estimate of the reverse KL, and the teacher's log-probability."""
    tokens = max(1, sum(int(b.loss_mask.sum()) for b in batches))
    gap = sum(float(b.advantages[b.loss_mask].sum(dtype=np.float64)) for b in batches)
    taught = sum(float(t[b.loss_mask].sum(dtype=np.float64)) for b, t in zip(batches, teacher_logprobs, strict=True))
    return {"teacher/reverse_kl": -gap / tokens, "teacher/logprob": taught / tokens}
