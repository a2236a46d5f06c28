"""Every family from a user's folder and back: `rti score` without PyTorch, one update, `rti export`, transformers."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stand_in import make_config, make_groups
from tiny_models import ReferenceModel, make_model
from typer.testing import CliRunner

from models import checkpoint_folder, hf
from rti_jax import batching, checkpoint, cli, learner
from rti_jax.config import ModelConfig, save_resolved
from rti_jax.runtime import make_mesh

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SHARDS = {"max_shard_size": "150KB"}
CASES = {
    "qwen2-tied-shards": ("qwen2", dict(tied=True, **SHARDS)),
    "qwen2-untied-yarn": ("qwen2", dict(tied=False, rope_parameters=YARN)),
    "qwen3-tied-yarn-shards": ("qwen3", dict(tied=True, rope_parameters=YARN, **SHARDS)),
    "qwen3-untied": ("qwen3", dict(tied=False)),
    "llama-tied": ("llama", dict(tied=True)),
    "llama-untied-yarn-shards": ("llama", dict(tied=False, rope_parameters=YARN, **SHARDS)),
    "qwen3_5_text-tied-yarn": ("qwen3_5_text", dict(tied=True, rope_parameters=YARN | {"partial_rotary_factor": 0.5})),
    "qwen3_5_text-untied-shards": ("qwen3_5_text", dict(tied=False, **SHARDS)),
    "qwen3_5-tied-shards": ("qwen3_5", dict(tied=True, **SHARDS)),
    "qwen3_5-untied": ("qwen3_5", dict(tied=False)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for name, (model_type, options) in CASES.items():
        more = {"num_hidden_layers": 4} if "qwen3_5" in model_type else {}
        make_model(root / name, model_type, **options, **more)
        assert (len(list((root / name).glob("*.safetensors"))) > 1) is ("shards" in name)
    return root


SCORE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm") or name.startswith("transformers.models"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from rti_jax.cli import app
for folder in sys.argv[2:]:
    rows = ["--input", sys.argv[1], "--output", folder + ".jsonl"]
    app(["score", folder, *rows], standalone_mode=False)
"""


def test_score_agrees_with_transformers_without_its_code(folders, tmp_path):
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 272, 5 + n).tolist(), rng.integers(0, 272, n).tolist()) for n in (1, 20, 90)]
    lines = [json.dumps({"prompt_ids": a, "response_ids": b}) for a, b in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    arguments = [str(tmp_path / "rows.jsonl"), *(str(folders / name) for name in CASES)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-c", SCORE, *arguments], capture_output=True, text=True, env=environment, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in CASES:
        reference = ReferenceModel(folders / name)
        results = [json.loads(line) for line in (folders / f"{name}.jsonl").read_text().splitlines()]
        for (prompt, response), result in zip(rows, results, strict=True):
            expected = reference.logprobs(prompt, response)
            assert np.abs(expected).max() > 5 or len(response) == 1
            np.testing.assert_allclose(result["logprobs"], expected, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", [n for n in CASES if n.split("-")[0] != "qwen3_5"] + ["qwen3_5-tied-shards"])
def test_one_update_is_exported_as_the_folder_with_new_weights(folders, tmp_path, name):
    source, run = folders / name, tmp_path / "run"
    config = make_config(model={"path": str(source)}, name="run", runs_dir=str(tmp_path))
    mesh = make_mesh(config.mesh)
    model, params = hf.load(source, mesh=mesh, scan_layers=False)
    optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
    batches = batching.build(make_groups(), config, row_multiple=learner.row_multiple(mesh)).microbatches
    batches = [batching.with_behavior(b, np.full(b.tokens.shape, -3.0, np.float32)) for b in batches]
    update = learner.make_update_step(model, config, mesh, optimizer, on_policy=True)
    state, metrics = update(learner.init_state(params, optimizer, mesh), batches)
    assert metrics["optimizer/grad_norm"] > 0 and not metrics["optimizer/skipped"]
    run.mkdir()
    save_resolved(config.model_copy(update={"model": ModelConfig(path=str(source))}), run / "config.yaml")
    checkpoint.save(run / "checkpoints", 1, state, {})

    done = CliRunner().invoke(cli.app, ["export", str(run), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    learned = dict(hf.to_hf(model, state.params))
    with checkpoint_folder.Reader(source) as before, checkpoint_folder.Reader(tmp_path / "out") as after:
        assert before.entries == after.entries
        for tensor, entry in after.entries.items():
            data = np.array(after.data(tensor))
            assert np.array_equal(data, before.data(tensor)) is (tensor not in learned), tensor
            if tensor in learned:
                assert np.array_equal(data.view(np.float32).reshape(entry.shape), learned[tensor]), tensor
    tokens = np.random.default_rng(1).integers(0, 272, (1, 40)).astype(np.int32)
    positions = np.arange(40, dtype=np.int32)[None]
    ours = jax.jit(lambda p: model.hidden(p, tokens, positions, np.ones_like(tokens)) @ model.head(p))(state.params)
    theirs = ReferenceModel(tmp_path / "out").logits(tokens[0]).numpy()
    np.testing.assert_allclose(ours[0], theirs, atol=5e-5 * np.abs(theirs).max())
    moved = ReferenceModel(source).logits(tokens[0]).numpy()
    assert np.abs(moved - theirs).max() > 0.05


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_5-untied"])
def test_a_renamed_tensor_is_one_error(folders, tmp_path, name):
    import shutil

    broken = shutil.copytree(folders / name, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    old = next(n for n in tensors if n.endswith("layers.0.mlp.up_proj.weight"))
    new = old.replace("up_proj", "upward")
    tensors[new] = tensors.pop(old)
    save_file(tensors, broken / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}')
    rows = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(cli.app, ["score", str(broken), *rows])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert f"missing {old}" in done.stderr and f"unexpected {new}" in done.stderr
