"""`rti` with everything real but models and vLLM: config, rollouts, roles, batches, the loop and the run folder.

As a script it is the command: `python tests/fake_run.py train CONFIG ...`; in a test `patch` puts it into this process.
The policy looks up codes (tests.fakes.Lookup); in about a quarter of its episodes it answers with the right one.
"""

import asyncio
import pathlib
import sys
import types

import numpy as np

from rti_jax import batching, cli, train
from tests.fakes import FakeEngine, call, tiny_chat

ROOT = pathlib.Path(__file__).parents[1]
YAML = f"""
name: fake
steps: 3
model: {{path: {ROOT}/models/navigation-mini}}
env: {{name: "tests.fakes:Lookup", max_turns: 2}}
rollout: {{groups_per_step: 4, group_size: 2, retries: 0}}
sampling: {{max_tokens: 200, max_context: 4000, thinking: false}}
eval: {{trials: 2, limit: 1}}
rti: {{prompts: compact}}
batch: {{buckets: [4096]}}
"""


def answer(request):
    """Of the policy in all its parts."""
    if request.role == "policy":
        return call("answer", code="X4711" if request.seed % 4 == 0 else "?")
    if request.role == "corrector":
        return call("look", name="Ada")
    verdict = "invalid" if request.role == "validator" else "accept"
    return f'{{"verdict": "{verdict}", "reason": "look first"}}'


class Learner:
    """Learns nothing; its checkpoints are empty folders."""

    def __init__(self, config, policy, run, tasks, hosts):
        self.config, self.policy, self.state = config, policy, types.SimpleNamespace(params=None)
        self.identity, self.extra = {}, {}
        self.step = self.version = max((int(p.name) for p in run.checkpoints.iterdir()), default=0)

    def score(self, rows):
        return [-0.01 * (1 + np.arange(len(response))) for _, response in rows]

    def pack(self, groups, numbers, total):
        return [batching.build(groups, self.config)]

    def update(self, packed):
        self.version = self.step + 1
        made = {"optimizer/updates": 1.0, "optimizer/grad_norm": 0.5, "policy/entropy": 0.1, "mismatch/abs": 0.0}
        return {**packed[0].metrics, **made}


class Engine(FakeEngine):
    """Was started again once in each step."""

    def pop_metrics(self):
        return {"engine/restarts": 1.0}


class Checkpoints:
    def __init__(self, directory, keep, background=False):
        self.directory = directory

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self):
        pass

    def save(self, step, state, extra):
        (self.directory / str(step)).mkdir(exist_ok=True)


async def sync(engine, model, params, version):
    await asyncio.sleep(0)
    engine.version = version


def export(folder, learner):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")


def patch(setattr, reply=answer):
    """Puts the stand-ins in the place of what is heavy; `setattr` as pytest's monkeypatch has it."""
    chat = tiny_chat()
    engine = lambda *_: Engine(chat, reply)  # noqa: E731
    stand_ins = {"Learner": Learner, "Checkpoints": Checkpoints, "make_engine": engine}
    stand_ins["load_policy"] = lambda config: types.SimpleNamespace(chat=chat, model=None, params=None)
    for name, stand_in in stand_ins.items():
        setattr(train, name, stand_in)
    setattr(train.weight_sync, "sync", sync)
    setattr(train.summary, "export", export)


if __name__ == "__main__":
    patch(setattr)
    sys.argv[0] = "rti"
    cli.main()
