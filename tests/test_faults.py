"""A run that is killed, interrupted or out of disk goes on as if nothing had been; docs/faults.md lists all faults."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from stand_in import make_config, make_groups

from rti_jax import batching, checkpoint, disk, guards, learner, metrics, resume, runs, train, weight_sync
from rti_jax.checkpoint import Checkpoints
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import EngineError
from rti_jax.guards import RunStopped
from tests import scripted_run

ROOT = pathlib.Path(__file__).parents[1]
OF_THE_PROCESS = ("time/", "_seconds", "compile/")


@contextlib.contextmanager
def no_file_above(size):
    """Every write beyond so many bytes of a file fails, by the system: as on a full disk, and needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def small(value):
    """A state that no compression makes small."""
    noise = np.random.default_rng(value).normal(size=(300, 100)).astype(np.float32)
    return learner.TrainState({"w": jnp.asarray(noise)}, (), jnp.int32(value))


class TestDiskFull:
    """One line that names the folder and what is free there; what was whole stays whole."""

    @pytest.mark.parametrize("background", [False, True])
    def test_checkpoint(self, tmp_path, caplog, background):
        checkpoint.save(tmp_path, 1, small(1), {})
        with no_file_above(50_000), pytest.raises(disk.DiskFullError) as error:
            with Checkpoints(tmp_path, background=background) as checkpoints:
                checkpoints.save(2, small(2), {})
        said, free = str(error.value), shutil.disk_usage(tmp_path).free
        assert "\n" not in said and str(tmp_path) in said and "bytes free" in said and free > 0
        assert "raised an exception" not in caplog.text, "Orbax says it once more, with a stack"
        assert checkpoint.restore(tmp_path, small(0)).step == 1
        checkpoint.save(tmp_path, 2, small(2), {})
        restored = checkpoint.restore(tmp_path, small(0))
        np.testing.assert_array_equal(restored.state.params["w"], small(2).params["w"])

    def test_writes_that_end_after_the_one_that_failed_print_nothing(self, tmp_path, monkeypatch):
        seen, late = [], RuntimeError("Event loop is closed")
        monkeypatch.setattr(sys, "unraisablehook", seen.append)
        for step in (1, 2):
            checkpoint.save(tmp_path, step, small(step), {})
        others = [types.SimpleNamespace(exc_value=e, object=o) for e, o in ((late, "a loop"), (ValueError("x"), None))]
        for found in (types.SimpleNamespace(exc_value=late, object=None), *others):
            sys.unraisablehook(found)
        assert seen == others

    def test_a_failed_save_in_the_background_is_not_kept_for_the_next_one(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "_write", full)
        checkpoints = Checkpoints(tmp_path, background=True)
        checkpoints.save(1, small(1), {})
        checkpoints._thread.join()
        with pytest.raises(disk.DiskFullError, match=str(tmp_path)):
            checkpoints.check()
        checkpoints.check()  # raised once

    def test_metrics(self, tmp_path):
        with no_file_above(2000), pytest.raises(disk.DiskFullError, match=rf"write metrics.jsonl in {tmp_path} "):
            with metrics.Recorder(tmp_path, 100) as recorder:
                for step in range(1, 101):
                    recorder.write(step, {"loss/total": 0.5, "rollout/turns": 1.25})
        whole = [line["step"] for line in metrics.read_metrics(tmp_path / "metrics.jsonl")]
        assert whole == list(range(1, len(whole) + 1)) and 1 < len(whole) < 100
        with metrics.Recorder(tmp_path, 100, step=len(whole) - 1) as recorder:
            recorder.write(len(whole), {"loss/total": 0.5})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == whole

    def test_tensorboard(self, tmp_path):
        with metrics.Recorder(tmp_path, 100) as recorder, no_file_above(2000), pytest.raises(disk.DiskFullError):
            for step in range(1, 10):
                recorder.roles(step, {f"roles/{i}": 0.5 for i in range(20)})

    def test_trajectories_and_evaluations(self, tmp_path):
        path = tmp_path / "step.jsonl"
        runs.write_lines(path, [{"a": 1}])
        with no_file_above(2000), pytest.raises(disk.DiskFullError, match=rf"write step.jsonl in {tmp_path} "):
            runs.write_lines(path, ({"a": "x" * 100} for _ in range(1000)))
        with no_file_above(2000), pytest.raises(disk.DiskFullError, match=rf"write e.json in {tmp_path} "):
            runs.write_json(tmp_path / "e.json", ["x" * 5000])
        assert path.read_text() == '{"a": 1}\n' and [p.name for p in tmp_path.iterdir()] == ["step.jsonl"]

    def test_weights_for_the_engine(self, tmp_path):
        weights = [("w", np.ones((100, 100), np.float32))]
        with no_file_above(2000), pytest.raises(disk.DiskFullError, match=str(tmp_path)):
            with weight_sync.payload(weights, {"w": (100, 100)}, "float32", str(tmp_path)):
                pytest.fail("the engine would load half of it")
        assert list(tmp_path.iterdir()) == []

    def test_the_batch_of_a_gradient_that_is_not_finite(self, tmp_path):
        with no_file_above(100), pytest.raises(disk.DiskFullError, match=str(tmp_path)):
            guards.dump([batching.build(make_groups(), make_config())], tmp_path / "nonfinite.npz")

    def test_another_error_is_itself(self, tmp_path):
        with pytest.raises(PermissionError), disk.writing(tmp_path):
            raise PermissionError(13, "Permission denied")

    @pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="mounts a file system")
    def test_a_disk_that_is_really_full(self, tmp_path):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], check=False).returncode:
            pytest.skip("mounting is not permitted here")
        try:
            folder = tmp_path / "checkpoints"
            checkpoint.save(folder, 1, small(1), {})
            (tmp_path / "filler").write_bytes(bytes(shutil.disk_usage(tmp_path).free - 65_536))
            with pytest.raises(disk.DiskFullError, match=r"\([\d,]+ bytes free there"):
                checkpoint.save(folder, 2, small(2), {})
            assert checkpoint.restore(folder, small(0)).step == 1
            with (
                pytest.raises(disk.DiskFullError),
                weight_sync.payload(
                    [("w", np.ones((200, 200), np.float32))], {"w": (200, 200)}, "float32", str(tmp_path)
                ),
            ):
                pytest.fail("the engine would load half of it")
            (tmp_path / "filler").unlink()
            checkpoint.save(folder, 2, small(2), {})
            assert checkpoint.restore(folder, small(0)).step == 2
        finally:
            subprocess.run(["umount", tmp_path], check=True)


class TestIdentity:
    """What a config only names may be something else when a run goes on."""

    OLD = {"trained": ["a", "b"], "held_out": ["t"], "files": {"model.path": "1", "rti.prompts": "2"}}

    @pytest.mark.parametrize(
        ("new", "words"),
        [
            ({"trained": ["a", "b", "c"]}, "2 -> 3, with c$"),
            ({"trained": ["b", "c", "d"]}, "2 -> 3, without a, with c and 1 more$"),
            ({"trained": ["b", "a"]}, "2 -> 2, in another order$"),
            ({"files": {"model.path": "3"}}, "model.path: what it names has other contents$"),
        ],
    )
    def test_what_changes_the_algorithm_is_refused(self, tmp_path, new, words):
        with pytest.raises(ConfigError, match=words):
            resume.check(self.OLD, self.OLD | new, tmp_path)

    def test_what_is_only_measured_is_said(self, tmp_path):
        assert resume.check(self.OLD, self.OLD, tmp_path) == []
        (line,) = resume.check(self.OLD, self.OLD | {"held_out": ["t", "u"]}, tmp_path)
        assert "eval.tasks" in line and "1 -> 2, with u" in line

    def test_a_checkpoint_of_an_earlier_version_says_nothing(self, tmp_path):
        assert resume.check({"seed": 0}, self.OLD, tmp_path) == []

    def test_the_files_are_those_that_the_config_names(self, tmp_path):
        model, prompts = tmp_path / "model", tmp_path / "prompts"
        for folder, name in ((model, "config.json"), (prompts, "validator.j2")):
            folder.mkdir()
            (folder / name).write_text("1")
        given = {"model": {"path": str(model)}, "rti": {"prompts": str(prompts)}}
        first = resume.identity(Config.model_validate(given), None)
        assert first["files"].keys() == {"model.path", "rti.prompts"} and json.dumps(first)
        (prompts / "validator.j2").write_text("2")
        second = resume.identity(Config.model_validate(given), None)
        assert first["files"]["model.path"] == second["files"]["model.path"]
        with pytest.raises(ConfigError, match="rti.prompts"):
            resume.check(first, second, tmp_path)

    def test_no_secret_of_the_config_is_in_a_checkpoint(self):
        headers = {"env": {"name": "mcp", "headers": {"Authorization": "Bearer abcdefgh12345"}}, "seed": 3}
        said = resume.identity(Config.model_validate(headers), None)
        assert "abcdefgh12345" not in json.dumps(said) and said["config"]["env"]["name"] == "mcp" and said["seed"] == 3


def content(run):
    """All that a run leaves and that is a function of its config, as bytes by name."""
    files = [*(run / "trajectories").iterdir(), *(run / "evals").iterdir(), *(run / "export").iterdir()]
    found = {str(p.relative_to(run)): p.read_bytes() for p in files}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        kept = {k: v for k, v in json.loads(line).items() if not any(name in k for name in OF_THE_PROCESS)}
        assert found.setdefault(f"metrics of step {kept['step']}", json.dumps(kept)) == json.dumps(kept)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six steps that nothing interrupts, in `whole`."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_engine", scripted_run.Scripted)
        assert train.main(scripted_run.make_config(folder, "whole")) == 0
    found = content(folder / "whole")
    lines = [json.loads(found[f"metrics of step {n}"]) for n in range(1, 7)]
    assert sum(line["optimizer/updates"] for line in lines) >= 3 and sum(line["rti/attempts"] for line in lines) >= 1
    return folder


def killed(folder, name, fault, step, *overrides):
    """A run in a process of its own, which kills itself."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.scripted_run", str(folder), name, fault, str(step), *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def at_step(step, act):
    """An engine that does something once, in the rollouts of a step."""

    def make(path, config):
        engine, count = scripted_run.Scripted(path, config), iter(range(10**9))
        engine.asked = lambda request: scripted_run.recorded(config) == step - 1 and next(count) == 2 and act()
        return engine

    return make


def signalled(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.slow
def test_a_run_that_is_hit_by_everything_ends_as_one_that_is_not(folder, monkeypatch, capsys):
    run = folder / "hit"
    killed(folder, "hit", "rollout", 3)
    assert checkpoint.newest(run / "checkpoints") in (1, 2)  # the last one was perhaps being written
    killed(folder, "hit", "commit", 3)
    assert checkpoint.newest(run / "checkpoints") == 2

    rare = scripted_run.make_config(folder, "hit", "checkpoint.every=1000")
    monkeypatch.setattr(train, "make_engine", at_step(4, signalled(signal.SIGTERM)))
    assert train.main(rare) == 128 + signal.SIGTERM
    assert "going on from the checkpoint after step 2" in capsys.readouterr().out
    assert checkpoint.newest(run / "checkpoints") == 3

    monkeypatch.setattr(train, "make_engine", scripted_run.Scripted)
    with monkeypatch.context() as patch:
        patch.setattr(train.runs, "write_groups", full_at(run / "trajectories" / "step_000005.jsonl"))
        with pytest.raises(disk.DiskFullError):
            train.main(rare)
    # Step 5 was learned and not recorded: it is made again, from the last checkpoint.
    assert checkpoint.newest(run / "checkpoints") == 3

    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600 * next(backwards))
    backwards = iter(range(10**9))  # an hour back at every look
    assert train.main(scripted_run.make_config(folder, "hit", "checkpoint.minutes=1e-9", "checkpoint.every=1000")) == 0
    monkeypatch.undo()
    assert checkpoint.steps(run / "checkpoints") == [6, 5]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert all(v >= 0 for k, v in json.loads(line).items() if k.startswith("time/"))

    whole, hit = content(folder / "whole"), content(run)
    assert whole.keys() == hit.keys()
    for name in whole:
        assert whole[name] == hit[name], name


def full_at(path):
    """`runs.write_groups` on a disk that is full when it comes to one file."""
    write = runs.write_groups

    def attempt(file, groups, advantages):
        with no_file_above(10) if file == path else contextlib.nullcontext():
            write(file, groups, advantages)

    return attempt


@pytest.mark.slow
def test_an_outage_is_waited_for_and_then_said_with_its_reasons(folder, monkeypatch):
    shutil.copytree(folder / "whole", folder / "outage")

    def refuse():
        raise EngineError("no answer")

    def make(path, config):
        engine = scripted_run.Scripted(path, config)
        engine.asked = lambda request: calls.append(request) or (len(calls) > 40 and refuse())
        return engine

    calls = []
    monkeypatch.setattr(train, "make_engine", make)
    longer = scripted_run.make_config(folder, "outage", "steps=20", "stop.dropped_steps=3", "rti.enabled=true")
    with pytest.raises(RunStopped, match=r"in 3 steps in a row .*: environment_error \d+; "):
        train.main(longer)
    lines = metrics.read_metrics(folder / "outage" / "metrics.jsonl")
    assert [line["groups/dropped"] for line in lines[-3:]] == [2, 2, 2]
    assert all(line["rollout/environment_error"] == 4 and not line["optimizer/updates"] for line in lines[-2:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "step"), [("rollout", 1), ("state", 1), ("commit", 1), ("state", 4), ("rollout", 6)])
def test_killed_at_other_moments(folder, monkeypatch, fault, step):
    name = f"killed_{fault}_{step}"
    killed(folder, name, fault, step)
    monkeypatch.setattr(train, "make_engine", scripted_run.Scripted)
    assert train.main(scripted_run.make_config(folder, name)) == 0
    assert content(folder / "whole") == content(folder / name)


@pytest.mark.exhaustive
def test_ctrl_c_saves_the_last_whole_step(folder, monkeypatch):
    rare = scripted_run.make_config(folder, "ctrl_c", "checkpoint.every=1000")
    monkeypatch.setattr(train, "make_engine", at_step(4, signalled(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        train.main(rare)
    assert checkpoint.newest(folder / "ctrl_c" / "checkpoints") == 3
    monkeypatch.setattr(train, "make_engine", scripted_run.Scripted)
    assert train.main(rare) == 0
    assert content(folder / "whole") == content(folder / "ctrl_c")


@pytest.mark.exhaustive
def test_other_tasks_are_refused_when_a_run_goes_on(folder, monkeypatch, tmp_path, capsys):
    ids = tmp_path / "ids.txt"
    ids.write_text("train/0\ntrain/1\n")
    monkeypatch.setattr(train, "make_engine", scripted_run.Scripted)
    given = [f"rollout.tasks={ids}", "rollout.mix={}"]
    assert train.main(scripted_run.make_config(folder, "ids", "steps=1", *given)) == 0
    ids.write_text("train/0\ntrain/2\n")
    with pytest.raises(ConfigError, match="without train/1, with train/2"):
        train.main(scripted_run.make_config(folder, "ids", "steps=2", *given))
