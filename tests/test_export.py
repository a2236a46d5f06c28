"""Exports of checkpoints, through the command, without vLLM and without PyTorch's model code."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import make_qwen3
from typer.testing import CliRunner

from models import hf
from rti_jax import checkpoint, cli, learner
from rti_jax.config import Config, ModelConfig, OptimizerConfig, save_resolved
from rti_jax.runtime import make_mesh

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with checkpoints of steps 2 and 4; all parameters are the source's plus the step."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    source = make_qwen3(folder.parent / "source")
    config = Config(name="x", runs_dir=str(folder.parent), model=ModelConfig(path=str(source)))
    save_resolved(config, folder / "config.yaml")
    mesh = make_mesh(config.mesh)
    _, params = hf.load(source, mesh=mesh)
    optimizer = learner.make_optimizer(OptimizerConfig(), params, 10)
    state = learner.init_state(params, optimizer, mesh)
    for step in (2, 4):
        moved = state._replace(params=jax.tree.map(lambda x, step=step: x + step, params))
        checkpoint.save(folder / "checkpoints", step, moved, {})
    return folder


def export(*arguments):
    return CliRunner().invoke(cli.app, ["export", *map(str, arguments)])


@pytest.mark.parametrize(("arguments", "step"), [([], 4), (["--step", "2"], 2)])
def test_parameters_are_the_checkpoints_and_the_folder_is_complete(run, tmp_path, arguments, step):
    done = export(run, *arguments, "--output", tmp_path / "out")
    assert done.exit_code == 0 and done.output == f"wrote {tmp_path / 'out'}: the policy after step {step}\n"
    source = run.parent / "source"
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name] + np.float32(step), err_msg=name)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"


def test_the_default_place_is_in_the_run(run):
    assert export(run).exit_code == 0 and (run / "export" / "model.safetensors").is_file()


def test_bfloat16(run, tmp_path):
    assert export(run, "--output", tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


class TestErrors:
    def line(self, *arguments):
        done = export(*arguments)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
        return done.stderr

    def test_a_step_that_is_not_there_names_those_that_are(self, run, tmp_path):
        assert "there are 4, 2" in self.line(run, "--step", "3", "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_an_unreadable_checkpoint(self, run, tmp_path):
        import shutil

        broken = tmp_path / "broken"
        shutil.copytree(run, broken)
        largest = max(
            (p for p in (broken / "checkpoints" / "4").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
        )
        largest.write_bytes(largest.read_bytes()[:-7])
        message = self.line(broken, "--step", "4", "--output", tmp_path / "out")
        assert largest.name in message and "bytes" in message and "there are 2" in message

    def test_no_checkpoint_at_all(self, run, tmp_path):
        (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
        assert "there is none" in self.line(tmp_path)

    def test_no_run(self, tmp_path):
        assert "is no run folder (it has no config.yaml)" in self.line(tmp_path)

    def test_the_source_folder_is_gone(self, tmp_path):
        (tmp_path / "config.yaml").write_text("model: {path: /nowhere}\n")
        assert "model.path=/nowhere" in self.line(tmp_path)

    def test_a_folder_that_is_something_else_is_not_overwritten(self, run, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("do not lose me")
        self.line(run, "--output", tmp_path / "out")
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]

    def test_dtype(self, run):
        assert "expected float32 or bfloat16" in self.line(run, "--dtype", "float16")


@pytest.mark.slow
def test_without_vllm_and_torch(run, tmp_path):
    for name in ("vllm", "torch"):  # packages of these names that cannot be imported
        (tmp_path / "block" / name).mkdir(parents=True)
        (tmp_path / "block" / name / "__init__.py").write_text("raise ModuleNotFoundError(name=__name__)\n")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path / "block")}
    command = [sys.executable, "-m", "rti_jax.cli", "export", str(run), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
