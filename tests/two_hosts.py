"""One of two processes that share a learner; prints JSON.

python tests/two_hosts.py PORT INDEX FOLDER
"""

import asyncio
import json
import pathlib
import sys

import jax
import numpy as np
from stand_in import StandIn, init_params, make_config, make_groups, mesh

from rti_jax import batching, checkpoint, learner
from rti_jax.config import ConfigError, HostsConfig
from rti_jax.hosts import join
from rti_jax.joint_scoring import JointScorer
from rti_jax.logprobs import Scorer

OPTIONS = {"batch": {"buckets": [16, 32], "rows_per_microbatch": 2}, "optimizer": {"lr": 1e-2, "minibatches": 2}}


def parts(hosts, groups, numbers, config, on):
    """This host's packed batches, agreed with the other."""
    own = [
        batching.build(part, config, row_multiple=learner.row_multiple(on, hosts.count), hosts=hosts.count)
        for part in batching.split_groups(groups, config.optimizer.minibatches, numbers, 8)
    ]
    outlines = zip(*hosts.exchange([p.outline for p in own]), strict=True)
    return [batching.agree(p, o, config) for p, o in zip(own, outlines, strict=True)]


def train(hosts, groups, numbers, config, on, folder):
    """Metrics of two updates; a checkpoint is saved and restored between them."""
    model, params = StandIn(), init_params(on)
    optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
    state = learner.init_state(params, optimizer, on)
    logprobs = learner.make_logprobs_step(model, config, on)
    packed = parts(hosts, groups, numbers, config, on)
    batches = [
        [batching.with_behavior(b, logprobs(params, b) + 0.1 * np.sin(b.tokens)) for b in p.microbatches]
        for p in packed
    ]
    update = learner.make_update_step(model, config, on, optimizer, norms_by_source=True)
    history = []
    for i, part in enumerate(packed):
        state, metrics = update(state, batches[i], part.corrected)
        history.append(part.metrics | metrics)
        if folder:
            checkpoint.save(folder, i + 1, state, {})
            step = hosts.from_first(lambda: checkpoint.newest(folder))
            state = checkpoint.restore(folder, state, step).state
    return state, history, [[b.tokens.shape for b in p.microbatches] for p in packed]


async def ask(score, calls, index):
    """An episode that has its corrections scored one by one."""
    return [(await score([((1, 2 + i), (3 + index, 4, 5 + i))]))[0].tolist() for i in range(calls)]


async def alternate(score, calls, index):
    return await asyncio.gather(*(ask(score, c, index) for c in calls))


def see_late(fault):
    """As a shared file system may show a folder: at the first look, what was there before."""
    seen = set()
    return lambda folder: fault(folder) if folder in seen else seen.add(folder)


def refused():
    raise ConfigError("only process 0 knows")


def main(port, index, folder):
    with join(HostsConfig(coordinator=f"127.0.0.1:{port}", processes=2, process_id=index)) as hosts:
        on, config, groups = mesh(), make_config(**OPTIONS), make_groups(count=8)
        if index:
            checkpoint.fault = see_late(checkpoint.fault)
        numbers = [0, 1, 2, 4, 6] if index == 0 else [3, 5, 7]
        state, history, shapes = train(hosts, [groups[i] for i in numbers], numbers, config, on, folder)
        scorer = Scorer(StandIn(), on, 0.8, [16])
        joint = JointScorer(hosts, lambda rows: scorer.score(state.params, rows), patience=0.05 if index else None)
        scores = asyncio.run(joint.during(alternate(joint, [3, 1] if index == 0 else [2], index)))
        large = hosts.collect(np.arange(700_000) + index)  # 5.6 MB: several pieces
        try:
            hosts.from_first(refused)
        except ConfigError as error:
            refusal = str(error)
        kernel = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec()))(
            state.params["layers"]["mixer"]["kernel"]
        )
        return {
            "devices": jax.device_count(),
            "shard": list(state.params["layers"]["mixer"]["kernel"].addressable_shards[0].data.shape),
            "history": history,
            "shapes": shapes,
            "kernel": np.ravel(kernel).tolist(),
            "scores": scores,
            "share": list(hosts.share(5)),
            "exchanged": hosts.exchange(index * 10),
            "collected": [int(part[0]) for part in large],
            "refusal": refusal,
        }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))))
