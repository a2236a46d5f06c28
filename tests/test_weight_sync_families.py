"""Weights of every family reach vLLM: an updated engine samples what a fresh one does that starts from our export.

vLLM's Qwen3.5 imports torchvision, which on some CPU machines is not there or does not fit its torch. RTI_TORCHVISION
may name a folder that holds one; two operators that such a build lacks are declared for it in every process.
"""

import asyncio
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_engine import config, request, sample
from tiny_models import ReferenceModel, make_model

from models import hf
from rti_jax import weight_sync
from rti_jax.engine import make_engine

ROOT = pathlib.Path(__file__).parents[1]
REQUESTS = [request(i, 150, max_tokens=16) for i in range(4)]
# Heads that the CPU engine has kernels for, and few layers: bfloat16 is all it computes this family in.
QWEN3_5 = dict(
    num_hidden_layers=4,
    head_dim=64,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    hidden_size=128,
    std=0.1,
)

OPERATORS = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def check(root: pathlib.Path, model_type: str, tied: bool, dtype: str = "float32", **options) -> None:
    """An engine of other weights, updated, against a fresh engine and transformers."""
    first, second = (make_model(root / f"{s}", model_type, tied=tied, seed=s, dtype=dtype, **options) for s in (1, 2))
    model, params = hf.load(second)
    params = jax.tree.map(lambda x: x * 1.05, params)
    export = hf.save(model, params, root / "export")
    settings = config().model_copy(update={"model": config().model.model_copy(update={"dtype": dtype})})
    with make_engine(first, settings) as engine:
        before = sample(engine, *REQUESTS)
        assert asyncio.run(weight_sync.sync(engine, model, params, 1)) == 1
        updated = sample(engine, *REQUESTS)
    with make_engine(export, settings) as fresh:
        wanted = sample(fresh, *REQUESTS)
    assert [(r.ids, r.logprobs) for r in updated] == [(r.ids, r.logprobs) for r in wanted]
    assert all(a.ids != b.ids for a, b in zip(before, updated, strict=True))
    reference, old = ReferenceModel(export), ReferenceModel(first)
    for r, result in zip(REQUESTS, updated, strict=True):
        expected = reference.logprobs(r.prompt_ids, result.ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4 if dtype == "float32" else 0.15)
        assert np.abs(old.logprobs(r.prompt_ids, result.ids) - expected).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        pytest.param("llama", False, marks=pytest.mark.exhaustive),
        pytest.param("llama", True, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", False, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", True, marks=pytest.mark.exhaustive),
    ],
)
def test_dense(tmp_path, model_type, tied):
    check(tmp_path, model_type, tied, hidden_size=128)  # heads of 32 where the config has no head_dim: 16 ends vLLM


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5"])
def test_qwen3_5(tmp_path, model_type, tied):
    folder = os.environ.get("RTI_TORCHVISION")
    if not folder and importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM's Qwen3.5 needs torchvision: RTI_TORCHVISION names no folder with one")
    (tmp_path / "sitecustomize.py").write_text(OPERATORS if folder else "")
    code = f"""
import pathlib
from test_weight_sync_families import QWEN3_5, check
if __name__ == "__main__":
    check(pathlib.Path({str(tmp_path)!r}), {model_type!r}, {tied}, "bfloat16", **QWEN3_5)
"""
    (tmp_path / "run.py").write_text(code)
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tests"), folder, os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(tmp_path / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
