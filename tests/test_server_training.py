"""A run over two real vLLM servers that the trainer starts, one of which is killed in the middle of a step.

As a script it is that run: `python tests/test_server_training.py RUNS_DIR`.
"""

import asyncio
import collections
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
STEPS, GROUPS, SIZE = 4, 4, 4
LIMIT = 500  # seconds that no quiet machine needs


@pytest.mark.exhaustive
def test_a_run_outlives_a_killed_server(tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    run = tmp_path / "servers"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert all(s["optimizer/updates"] for s in steps[: STEPS - 1])
    # It was killed with requests in flight, in a step after the first update; each of them was asked once more.
    assert said["in_flight"] >= 1
    assert sum(s["engine/retried_requests"] for s in steps) >= 1
    assert sum(s["engine/failures"] for s in steps) == 1 and sum(s["engine/restarts"] for s in steps) == 1
    # It came back before the last step, and served that.
    assert [s["engine/servers_alive"] for s in steps][-1] == 2
    assert said["asked_after_restart"] >= 1
    # The weights that it came back with are those of then, and so were all others.
    assert all(s["mismatch/after_max"] < 1e-4 and s["mismatch/max"] < 1e-4 for s in steps)
    for step in range(1, STEPS + 1):
        lines = [
            json.loads(line) for line in (run / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
        ]
        members = collections.Counter(line["id"] for line in lines if not line.get("interventions"))
        sampled = {name: n for name, n in members.items() if name.startswith("train/")}
        assert {f"train/{step - 1}/{g}/{m}" for g in range(GROUPS) for m in range(SIZE)} <= sampled.keys()
        assert all(line["status"] in ("success", "failure", "truncated") for line in lines), (
            "none was lost to the fault"
        )
        versions = {turn["policy_version"] for line in lines for turn in line["turns"]}
        assert versions == {step - 1}
    # Nothing is left.
    for pid in said["pids"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def main(runs_dir: str) -> None:
    """Trains; kills the first server while it works after the first update, and waits for it before the last step."""
    from rti_jax import config as config_lib
    from rti_jax import train
    from rti_jax.engine import make_engine

    overrides = [f"runs_dir={runs_dir}", "name=servers", f"steps={STEPS}", "eval.limit=1", "eval.trials=1"]
    overrides += [f"rollout.groups_per_step={GROUPS}", f"rollout.group_size={SIZE}", "checkpoint.every=100"]
    config = config_lib.load_config(CONFIG, [*overrides, "engine.kind=server", "engine.start=2"])
    started, said = [], {"pids": []}

    def start(path, config):
        started.append(make_engine(path, config))
        said["pids"] = [s.process.pid for s in started[0]._pool._servers]
        return started[0]

    def kill():
        deadline = time.monotonic() + LIMIT
        while not started or started[0].version < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server = started[0]._pool._servers[0]
        while not said.get("in_flight"):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
            if server.running:
                os.kill(server.process.pid, signal.SIGSTOP)  # what it has now stays unanswered
                said["in_flight"] = settled(lambda: server.running)
                os.kill(server.process.pid, signal.SIGKILL if said["in_flight"] else signal.SIGCONT)

    def settled(value):
        """A number once it has not changed for a second: the answers that were on their way have arrived."""
        last, since = value(), time.monotonic()
        while time.monotonic() - since < 1:
            time.sleep(0.01)
            if value() != last:
                last, since = value(), time.monotonic()
        return last

    one_step = train.Trainer.step

    async def step(self):
        if self.learner.step == STEPS - 1:
            server = self.engine._pool._servers[0]
            async with asyncio.timeout(LIMIT):
                while not server.alive:
                    await asyncio.sleep(0.05)
            said["pids"].append(server.process.pid)
            ask, said["asked_after_restart"] = server.sample, 0

            async def counted(*arguments):
                said["asked_after_restart"] += 1
                return await ask(*arguments)

            server.sample = counted
        await one_step(self)

    train.make_engine, train.Trainer.step = start, step
    threading.Thread(target=kill, daemon=True).start()
    code = train.main(config)
    print(json.dumps(said))
    sys.exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1])
