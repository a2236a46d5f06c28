"""The main job end to end, through the command line, with vLLM and the shipped policy."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file
from stand_in import forced_devices

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
SMALL = ["rollout.groups_per_step=4", "rollout.group_size=4", "eval.limit=2", "eval.trials=2", "checkpoint.every=1"]
POLICY = ROOT / "models" / "navigation-mini"


def rti(*arguments, **environment):
    """Runs the command; returns the finished process with its text."""
    command = [sys.executable, "-m", "rti_jax.cli", *map(str, arguments)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)


def train(folder, name, *overrides, **environment):
    done = rti("train", CONFIG, f"runs_dir={folder}", f"name={name}", *SMALL, *overrides, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of three steps, and the same stopped after two and continued."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "whole", "steps=3")
    train(folder, "resumed", "steps=2")
    again = train(folder, "resumed", "steps=3")
    assert "going on from the checkpoint after step 2" in again.stdout + again.stderr
    return folder


@pytest.mark.slow
def test_a_run_leaves_its_folder_complete(runs):
    run = runs / "whole"
    for name in ("config.yaml", "metrics.jsonl", "checkpoints", "export/config.json", "report.html", "tensorboard"):
        assert (run / name).exists(), name
    assert sorted(p.name for p in (run / "trajectories").iterdir()) == [f"step_00000{i}.jsonl" for i in (1, 2, 3)]
    assert sorted(p.name for p in (run / "evals").glob("*.json")) == ["step_000000.json", "step_000003.json"]
    steps = lines(run)
    assert [line["step"] for line in steps] == [1, 2, 3]
    trained = [line for line in steps if line["optimizer/updates"]]
    assert trained, "no group had a gradient: the policy or the intervention is broken"
    assert all(np.isfinite(line["loss/total"]) for line in trained)
    assert sum(line["rti/replaced"] for line in steps) >= 1


@pytest.mark.slow
def test_engine_and_learner_agree_before_and_after_every_update(runs):
    for line in lines(runs / "whole"):
        assert line["mismatch/after_max"] < 1e-4
        if line["optimizer/updates"]:
            assert line["mismatch/max"] < 1e-4


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights_and_metrics(runs):
    whole, resumed = (load_file(runs / name / "export" / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)
    timed = ("time/", "_seconds", "compile/")  # of the process
    for a, b in zip(lines(runs / "whole"), lines(runs / "resumed"), strict=True):
        drop = lambda line: {k: v for k, v in line.items() if not any(t in k for t in timed)}  # noqa: E731
        assert drop(a) == drop(b)


@pytest.mark.exhaustive
def test_a_killed_run_samples_and_learns_what_an_unbroken_one_does(tmp_path):
    """Six steps, and three, kill -9 in the rollouts of the fourth, and the rest: with vLLM, bit for bit."""
    train(tmp_path, "six", "steps=6")
    command = [sys.executable, "-m", "rti_jax.cli", "train", str(CONFIG), f"runs_dir={tmp_path}", "name=killed", *SMALL]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "steps=6"], cwd=ROOT, env=env, **quiet)
    marker, deadline = tmp_path / "killed" / "checkpoints" / "3" / "COMMITTED.json", time.monotonic() + 500
    try:
        while process.poll() is None and not marker.is_file() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.wait(100) == -9 and marker.is_file()
    train(tmp_path, "killed", "steps=6")
    for step in range(1, 7):
        file = pathlib.Path("trajectories") / f"step_{step:06d}.jsonl"
        assert (tmp_path / "six" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes(), file
    whole, killed = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("six", "killed"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], killed[name], err_msg=name)


@pytest.mark.exhaustive
def test_eight_devices_have_the_same_first_loss(runs):
    train(runs, "eight", "steps=1", XLA_FLAGS=forced_devices(8))
    one, eight = lines(runs / "whole")[0], lines(runs / "eight")[0]
    np.testing.assert_allclose(eight["optimizer/grad_norm"], one["optimizer/grad_norm"], rtol=1e-5)
    # About -1e-4 is left of terms of size one; float32 scores in the weights w leave 1e-8 of those terms.
    np.testing.assert_allclose(eight["loss/total"], one["loss/total"], rtol=1e-5, atol=1e-8)


@pytest.mark.exhaustive
def test_sampling_beside_the_update_is_one_version_behind(tmp_path):
    train(tmp_path, "beside", "steps=3", "rollout.staleness=1", "eval.limit=1", "eval.trials=1")
    run = tmp_path / "beside"
    steps, versions = lines(run), []
    for n, line in enumerate(steps, 1):
        played = [json.loads(text) for text in (run / "trajectories" / f"step_{n:06d}.jsonl").open()]
        versions.append({turn["policy_version"] for trajectory in played for turn in trajectory["turns"]})
        assert np.isfinite(line["loss/total"]) and line["optimizer/updates"] == 1  # else no new version
        assert line["mismatch/after_max"] < 1e-4
    assert versions == [{0}, {0}, {1}]
    assert [line["rollout/staleness"] for line in steps] == [0, 1, 1]
    assert sum(line["rti/replaced"] for line in steps) >= 1
    # the engine's log-probabilities, of the weights of now in the first step and of those before in the others
    first, *others = (abs(line["policy/ratio"] - 1) for line in steps)
    assert first < 1e-4 and all(1e-6 < gap < 0.5 for gap in others)
    assert all(line["overlap/hidden_seconds"] > 0 for line in steps[:-1])


@pytest.fixture(scope="module")
def two(runs):
    """The same run by two processes with an engine each, stopped after one step and continued."""
    for steps in (1, 2):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        hosts = [f"hosts.coordinator={address}", "hosts.processes=2", "hosts.stall_timeout=450"]
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(train, runs, "two", f"steps={steps}", *hosts, f"hosts.process_id={i}") for i in range(2)
            ]
            first, second = (job.result() for job in jobs)
        assert f"{steps} steps are done" in first.stdout
        assert "steps are done" not in second.stdout  # JAX's collectives have their own line there
    assert "going on from the checkpoint after step 1" in first.stdout
    return runs / "two"


@pytest.mark.exhaustive
def test_two_hosts_sample_and_learn_what_one_does(runs, two):
    for step in (1, 2):
        files = [run / "trajectories" / f"step_00000{step}.jsonl" for run in (runs / "whole", two)]
        one, both = ([json.loads(line) for line in file.open()] for file in files)
        ids = lambda played: [(line["id"], [t["response_ids"] for t in line["turns"]]) for line in played]  # noqa: E731
        assert ids(one) == ids(both)
    for one, both in zip(lines(runs / "whole"), lines(two), strict=False):
        assert one.keys() == both.keys() and both["mismatch/after_max"] < 1e-4
        np.testing.assert_allclose(both["loss/total"], one["loss/total"], rtol=1e-5, atol=1e-8)  # as on eight devices
        np.testing.assert_allclose(both["optimizer/grad_norm"], one["optimizer/grad_norm"], rtol=1e-5)
        for name in ("batch/trained_tokens", "rollout/pre_success", "rti/replaced", "rti/corrector_calls"):
            assert one[name] == both[name], name
    assert [line["step"] for line in lines(two)] == [1, 2]


@pytest.mark.exhaustive
def test_two_hosts_leave_one_run_folder(two):
    assert sorted(p.name for p in (two / "evals").glob("*.json")) == [f"step_00000{i}.json" for i in (0, 1, 2)]
    evaluation = json.loads((two / "evals" / "step_000002.json").read_text())
    assert [t["n"] for t in evaluation["tasks"]] == [2] * 4  # two tasks of each kind, two trials, from both hosts
    assert (two / "export" / "model.safetensors").is_file() and (two / "report.html").is_file()
    assert sorted(p.name for p in (two / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.exhaustive
def test_a_checkpoint_is_evaluated_as_it_was_in_the_run(runs, tmp_path):
    """The weights of the newest checkpoint, the run's config and seeds: the same episodes, byte for byte."""
    done = rti("eval", runs / "whole", "--output", tmp_path / "a.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found, expected = (json.loads(p.read_text()) for p in (tmp_path / "a.json", runs / "whole/evals/step_000003.json"))
    assert {k: found[k] for k in expected} == expected
    assert (tmp_path / "a.jsonl").read_bytes() == (runs / "whole/evals/step_000003.jsonl").read_bytes()


@pytest.mark.exhaustive
def test_a_terminated_evaluation_ends_as_an_unbroken_one(tmp_path):
    def command(name):
        keys = ("--output", str(tmp_path / f"{name}.json"), "eval.limit=8", "rollout.concurrency=4")
        return [sys.executable, "-m", "rti_jax.cli", "eval", str(CONFIG), f"model.path={POLICY}", *keys]

    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    subprocess.run(command("whole"), cwd=ROOT, env=env, check=True, capture_output=True, timeout=500)
    process = subprocess.Popen(
        command("parts"), cwd=ROOT, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    episodes = tmp_path / "parts.jsonl"
    try:
        while process.poll() is None and not (episodes.is_file() and episodes.read_bytes().count(b"\n") >= 5):
            time.sleep(0.02)
    finally:
        process.terminate()
    assert process.wait(100) in (143, 0)  # 0 if the rest was there before the signal
    subprocess.run(command("parts"), cwd=ROOT, env=env, check=True, capture_output=True, timeout=500)
    for end in ("json", "jsonl"):
        assert (tmp_path / f"parts.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()


@pytest.mark.slow
def test_every_tensor_of_the_export_was_trained_and_the_folder_is_complete(runs):
    export, source = runs / "whole" / "export", POLICY
    before, after = load_file(source / "model.safetensors"), load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert (before[name] != after[name]).any(), name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (export / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.slow
def test_a_finished_run_says_so_and_how_to_start_anew(runs):
    done = train(runs, "whole", "steps=3")
    assert "3 steps are done" in done.stdout
    assert "name=another" in done.stdout


@pytest.mark.slow
def test_fewer_steps_than_were_made_are_refused(runs):
    done = rti("train", CONFIG, f"runs_dir={runs}", "name=whole", *SMALL, "steps=2")
    assert done.returncode == 2
    assert "checkpoint of step 3" in done.stderr


@pytest.mark.slow
def test_a_changed_algorithm_is_refused_with_the_difference(runs):
    done = rti("train", CONFIG, f"runs_dir={runs}", "name=whole", *SMALL, "steps=4", "gate.delta=3")
    assert done.returncode == 2
    assert "gate.delta: 5" in done.stderr
    assert "Traceback" not in done.stderr


def test_minibatches_add_counts_keep_maxima_and_average_the_rest():
    from rti_jax.training_state import combined

    parts = [{"groups/flat": 1.0, "mismatch/max": 0.1, "loss/total": 1.0, "policy/tokens": 3.0}, {"groups/flat": 2.0}]
    parts[1] |= {"mismatch/max": 0.3, "loss/total": 2.0, "policy/tokens": 4.0}
    assert combined(parts) == {"groups/flat": 3.0, "mismatch/max": 0.3, "loss/total": 1.5, "policy/tokens": 7.0}
    weights = [{"reweight/min_edited": 0.9, "reweight/max_edited": 1.1}, {"reweight/min_edited": 0.8}]
    assert combined(weights) == {"reweight/min_edited": 0.8, "reweight/max_edited": 1.1}


@pytest.mark.parametrize(
    "override",
    [
        "sampling.max_context=4096",
        "env.split=trian",
        "rollout.mix={esy: 1}",
        "rti.prompts=compat",
        "eval.split=train",
        "loss={baseline: luffy, teacher: {rollouts: nowhere.jsonl}}",
    ],
)
def test_what_would_stop_a_run_is_found_before_vllm_starts(override):
    from rti_jax import config as config_lib
    from rti_jax.run_tasks import RunTasks

    with pytest.raises(config_lib.ConfigError):
        RunTasks.load(config_lib.load_config(CONFIG, [override]))


def test_a_missing_model_folder_is_one_line(tmp_path):
    done = rti("train", CONFIG, f"runs_dir={tmp_path}", "model.path=/nowhere")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "/nowhere" in done.stderr
