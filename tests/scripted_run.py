"""A whole training run without vLLM: a tiny random policy, an engine whose samples are a function of seed, prompt and
weights, and the lookup environment of fakes.py.

As a script it is a run that dies: `python tests/scripted_run.py RUNS_DIR NAME FAULT STEP [key=value ...]` kills itself
in the rollouts of a step (`rollout`), when that step's checkpoint has its arrays (`state`), or before it counts
(`commit`).
"""

import asyncio
import hashlib
import os
import pathlib
import signal
import sys

from rti_jax import checkpoint, train
from rti_jax import config as config_lib
from rti_jax.chat import Chat
from rti_jax.engine import GenerateRequest, GenerateResult
from tests.fakes import call
from tests.tiny_models import make_qwen3

POLICY = (call("look", name="Ada"), call("answer", code="X4711"), call("answer", code="wrong"), "I do not know.")
JUDGE = ('{"verdict": "valid"}', '{"verdict": "invalid", "reason": "look first"}', "hm", '{"verdict": "accept"}')


class Scripted:
    """An engine: the same seed, prompt and weights give the same answer, other weights another."""

    def __init__(self, path: str, config: config_lib.Config):
        self.chat = Chat.from_folder(path, thinking=False)
        self.version, self.weights, self.metrics = 0, b"", {}
        self.asked = lambda request: None  # told of each request, and may fail in its place

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(0)
        self.asked(request)
        drawn = hashlib.blake2b(repr((request.seed, request.prompt_ids, self.weights)).encode()).digest()
        texts = JUDGE if request.role in ("validator", "verifier") else POLICY
        ids = self.chat.encode_text(texts[drawn[0] % len(texts)])[: request.max_tokens]
        reason = "stop" if ids[-1] in request.stop_token_ids else "length"
        return GenerateResult(ids, tuple(-0.01 * (1 + drawn[1] % 7) for _ in ids), reason, self.version)

    async def update_weights(self, weights, version: int) -> int:
        digest = hashlib.blake2b()
        for name, array in weights:
            digest.update(name.encode() + array.tobytes())
        self.weights, self.version = digest.digest(), version
        return version

    async def sleep(self):
        pass

    wake_up = close = sleep

    def pop_metrics(self):
        return dict(self.metrics)


def make_config(runs_dir, name: str, *overrides: str) -> config_lib.Config:
    """Six short steps; the policy's folder is made beside the runs."""
    model = pathlib.Path(runs_dir) / "model"
    if not (model / "config.json").is_file():
        make_qwen3(model, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
        prompts = pathlib.Path(runs_dir) / "prompts"  # short ones: a token is a byte here
        prompts.mkdir()
        for role in ("validator", "corrector", "verifier"):
            (prompts / f"{role}.j2").write_text("{{ evidence }} {{ proposed }}")
    given = {
        "name": name,
        "runs_dir": str(runs_dir),
        "steps": 6,
        "model": {"path": str(model), "dtype": "float32", "scan_layers": False, "remat": "none"},
        "env": {"name": "tests.fakes:Lookup", "max_turns": 2},
        "rollout": {"groups_per_step": 2, "group_size": 2, "retries": 0},
        "sampling": {"max_tokens": 100, "max_context": 1536, "thinking": False},
        "rti": {"prompts": str(pathlib.Path(runs_dir) / "prompts")},
        "gate": {"delta": float("inf")},
        "optimizer": {"lr": 1e-3},
        "batch": {"buckets": [1536], "rows_per_microbatch": 1},
        "eval": {"limit": 1, "trials": 2},
        "checkpoint": {"every": 1},
    }
    for override in overrides:
        config_lib.apply_override(given, override)
    return config_lib.validate(given, config_lib.Config)


def recorded(config: config_lib.Config) -> int:
    """Steps of a run that are done; the engine's version is behind where a step had no gradient."""
    path = pathlib.Path(config.runs_dir) / config.name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(runs_dir: str, name: str, fault: str, step: int, *overrides: str) -> None:
    def make_engine(path, config):
        engine = Scripted(path, config)
        if fault == "rollout":
            count = iter(range(10**9))
            engine.asked = lambda request: recorded(config) == step - 1 and next(count) == 3 and die()
        return engine

    if fault == "state":
        real = checkpoint.ocp.AsyncCheckpointer.wait_until_finished

        def wait(self):
            real(self)  # all of the state is there, nothing says so
            if (pathlib.Path(runs_dir) / name / "checkpoints" / str(step)).is_dir():
                die()

        checkpoint.ocp.AsyncCheckpointer.wait_until_finished = wait
    if fault == "commit":
        write = checkpoint._write
        checkpoint._write = lambda path, text: (
            die() if path.name == checkpoint.MARKER and path.parent.name == str(step) else write(path, text)
        )
    train.make_engine = make_engine
    sys.exit(train.main(make_config(runs_dir, name, *overrides)))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), *sys.argv[5:])
