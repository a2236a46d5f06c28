"""Whole runs as a user sees them: what a terminal shows, what a budget ends, and that no key is anywhere."""

import json
import os
import pathlib
import pty
import re
import socket
import subprocess
import sys

import fake_run
import pytest

from rti_jax import config as config_lib
from rti_jax import train
from tests.json_server import JsonServer, says

ROOT = pathlib.Path(__file__).parents[1]
KEY, PASSWORD = "key-of-the-endpoint-0815", "wonder-land"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fake.yaml"
    path.write_text(f"runs_dir: {tmp_path}/runs\n{fake_run.YAML}")
    return path


def lines(tmp_path, name="fake"):
    return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def echo():
    """An endpoint that says the key that it was given in whatever it answers; it refuses the verifier once."""
    refused = []

    def answer(path, body, key):
        if not body:
            return 200, {"data": [{"id": "m"}]}
        verifies = '"strict"' in json.dumps(body)
        if verifies and not refused:
            refused.append(True)
            return 400, {"error": {"message": f"{key} ({KEY}) is no key for {PASSWORD}"}}
        verdict = {"verdict": "accept" if verifies else "invalid", "reason": f"{key} was given"}
        return 200, says(json.dumps(verdict))

    with JsonServer(answer) as server:
        yield f"{server.address}/v1"


def at_a_terminal(command, **environment):
    """(exit code, all that a terminal of 120 columns was sent)."""
    ours, theirs = pty.openpty()
    settings = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "RTI_NO_LAUNCHER": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    sent = b""
    try:
        while more := os.read(ours, 65536):
            sent += more
    except OSError:  # how Linux ends a terminal whose process has gone
        pass
    finally:
        os.close(ours)
    return process.wait(60), sent.decode()


@pytest.mark.slow
def test_a_run_at_a_terminal_shows_itself_and_no_key(config, tmp_path, echo):
    roles = [f"rti.roles.validator.endpoint=http://{echo}", f"rti.roles.verifier.endpoint=http://ada:{PASSWORD}@{echo}"]
    command = [sys.executable, "tests/fake_run.py", "train", str(config), *roles, "rti.roles.verifier.model=strict"]
    code, text = at_a_terminal(command, OPENAI_API_KEY=KEY)
    assert code == 0, text
    # Nobody sees the key or the password, though they were in each verdict and each error.
    files = [p for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    everything = {str(p): p.read_bytes().decode(errors="replace") for p in files} | {"terminal": text}
    assert [name for name, held in everything.items() if KEY in held or PASSWORD in held] == []
    said = "".join(p.read_text() for p in (tmp_path / "runs" / "fake" / "trajectories").iterdir())
    assert "Bearer *** was given" in said and "is no key for ***" in said
    # The picture is drawn again and again in its place, step lines above it.
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "\x1b[1A" in text and text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "ETA" in plain and "step 3/3  success" in plain
    last = plain[plain.rindex("3/3") : plain.index("3 steps are done")]
    assert re.search(r"success [01]\.\d{3} -> [01]\.\d{3} after intervention   [\d,]+ tokens/s", last)
    recorded = lines(tmp_path)
    calls = {role: sum(line[f"{group}/{role}_calls"] for line in recorded) for group, role in LEDGER}
    assert calls["validator"] and calls["corrector"]
    for role, count in calls.items():
        assert re.search(rf"{role} +{count:,.0f} +[\d,]+ +[\d,]+", last), role
    broken = sum(line["rti/attempts_in_error"] for line in recorded)
    assert broken == 1 and f"errors so far: interventions {broken:.0f}" in last


LEDGER = [("rollout", "policy"), ("rti", "validator"), ("rti", "corrector"), ("rti", "verifier")]


class TestBudget:
    @pytest.fixture(autouse=True)
    def here(self, monkeypatch):
        fake_run.patch(monkeypatch.setattr)

    def run(self, config, capsys, *overrides):
        assert train.main(config_lib.load_config(config, list(overrides))) == 0
        return capsys.readouterr().out

    def test_a_run_ends_when_its_tokens_are_spent_and_goes_on_when_it_gets_more(self, config, tmp_path, capsys):
        assert "3 steps are done" in self.run(config, capsys, "name=whole", "checkpoint.every=9")
        tokens = [line["run/sampled_tokens"] for line in lines(tmp_path, "whole")]
        first, second, _ = tokens
        # In the middle of the second step.
        limit = f"stop.tokens={(first + second) // 2:.0f}"
        said = self.run(config, capsys, limit, "checkpoint.every=9")
        assert "2 steps are done" in said and f"{limit} ({second:.0f} tokens were sampled) ended this run" in " ".join(
            said.split()
        )
        run = tmp_path / "runs" / "fake"
        assert [line["step"] for line in lines(tmp_path)] == [1, 2]
        assert (run / "checkpoints" / "2").is_dir() and (run / "export" / "config.json").is_file()
        assert [p.name for p in sorted((run / "evals").glob("*.json"))] == ["step_000000.json", "step_000002.json"]
        # Asked again it plays nothing.
        (run / "metrics.jsonl").chmod(0o444)
        before = (run / "metrics.jsonl").stat().st_mtime_ns
        assert self.run(config, capsys, limit, "checkpoint.every=9") == said
        assert (run / "metrics.jsonl").stat().st_mtime_ns == before
        (run / "metrics.jsonl").chmod(0o644)
        # With more it goes on, and is the run that was never stopped.
        said = self.run(config, capsys, "stop.tokens=null")
        assert "3 steps are done" in said and "This run is complete" in said
        timed = ("time/", "_seconds")
        drop = lambda line: {k: v for k, v in line.items() if not any(t in k for t in timed)}  # noqa: E731
        assert [drop(line) for line in lines(tmp_path)] == [drop(line) for line in lines(tmp_path, "whole")]

    def test_a_run_that_was_killed_at_its_end_ends_without_another_step(self, config, tmp_path, capsys, monkeypatch):
        """The last step is saved, but neither evaluated nor exported."""

        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(train.summary, "export", killed)
            with pytest.raises(KeyboardInterrupt):
                train.main(config_lib.load_config(config, ["stop.tokens=1"]))
        said = self.run(config, capsys, "stop.tokens=1")
        assert "1 steps are done" in said and [line["step"] for line in lines(tmp_path)] == [1]

    def test_one_that_got_more_and_was_killed_at_its_new_end_is_not_finished(self, config, capsys, monkeypatch):
        """What it had exported before is not its policy."""

        def killed(*_):
            raise KeyboardInterrupt

        self.run(config, capsys, "stop.tokens=1")
        with monkeypatch.context() as broken:
            broken.setattr(train.summary, "export", killed)
            with pytest.raises(KeyboardInterrupt):
                train.main(config_lib.load_config(config))
        exported = []
        monkeypatch.setattr(train.summary, "export", lambda folder, learner: exported.append(learner.step))
        assert "3 steps are done" in self.run(config, capsys) and exported == [3]

    def test_an_evaluation_that_was_interrupted_is_made_when_the_run_goes_on(self, config, tmp_path, monkeypatch):
        """That of step 1, whose checkpoint is there."""
        given = config_lib.load_config(config, ["eval.every=1", "checkpoint.every=1"])
        write = train.runs.write_json

        def killed(path, data):
            if path.name == "step_000001.json":
                raise KeyboardInterrupt
            write(path, data)

        with monkeypatch.context() as broken:
            broken.setattr(train.runs, "write_json", killed)
            with pytest.raises(KeyboardInterrupt):
                train.main(given)
        assert train.main(given) == 0
        made = sorted((tmp_path / "runs" / "fake" / "evals").glob("step_*.json"))
        assert [path.stem for path in made] == [f"step_{n:06d}" for n in range(4)]

    def test_hours_end_a_run_too(self, config, tmp_path, capsys):
        said = self.run(config, capsys, "stop.hours=1e-9")
        assert "stop.hours=1e-09" in said and [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.exhaustive
def test_two_hosts_end_at_the_same_step_with_the_totals_of_both(config, tmp_path):
    def run(name, *overrides):
        command = [sys.executable, "tests/fake_run.py", "train", str(config), f"name={name}", *overrides]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    hosts = [f"hosts.coordinator={address}", "hosts.processes=2", "hosts.stall_timeout=300", "stop.tokens=1000"]
    both = [run("both", *hosts, f"hosts.process_id={i}") for i in range(2)]
    said = [host.communicate(timeout=500) for host in both]
    assert [host.returncode for host in both] == [0, 0], said
    assert b"ended this run before its 3 steps were done" in said[0][0] and b"ended this run" not in said[1][0]
    alone = run("alone", "stop.tokens=1000")
    assert alone.communicate(timeout=500) and alone.returncode == 0
    for one, two in zip(lines(tmp_path, "alone"), lines(tmp_path, "both"), strict=True):
        for name in ("run/sampled_tokens", "rollout/policy_calls", "rti/validator_calls", "rollout/tool_calls"):
            assert one[name] == two[name] > 0, name
        assert one["engine/restarts"] == 1 and two["engine/restarts"] == 2


def test_alarms_are_said_once_and_recorded(config, tmp_path, capsys, monkeypatch):
    fake_run.patch(monkeypatch.setattr, lambda request: "I do not know.")
    overrides = ["alarms.no_tool_calls=2", "alarms.constant_reward=3", "alarms.never_accepted=null", "steps=4"]
    train.main(config_lib.load_config(config, overrides))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning:" in line]
    assert len(warnings) == 2 and "no tool calls: in 2 steps in a row" in warnings[0]
    assert "constant reward: in 3 steps in a row" in warnings[1]
    found = [(line["alarms/no_tool_calls"], line["alarms/constant_reward"]) for line in lines(tmp_path)]
    assert found == [(0, 0), (1, 0), (1, 1), (1, 1)]
    assert all(line["rollout/tool_calls"] == 0 for line in lines(tmp_path))
