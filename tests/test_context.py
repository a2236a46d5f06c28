"""The models on eight devices, also where these share rows (mesh axis context): what one device gives."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from context_meshes import MESHES
from stand_in import forced_devices

from models import names
from rti_jax import placement
from rti_jax.config import ConfigError, load_config

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def eight():
    """What context_meshes.py finds on eight devices."""
    # half of the time would go into optimizing programs that run once
    quick = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
    flags = {"XLA_FLAGS": f"{forced_devices(8)} {quick}", "JAX_PLATFORMS": "cpu"}
    search = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "context_meshes.py")],
        env={**os.environ, **flags, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Involuntary full rematerialization" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
class TestEightDevices:
    @pytest.mark.parametrize(
        ("model", "name"), [*(("dense", name) for name in MESHES), ("hybrid", "fsdp x tensor x context")]
    )
    def test_loss_and_gradient_are_those_of_one_device(self, eight, model, name):
        # a part that saw its own keys alone, or a target lost at its end, would move both by percents
        assert max(eight[model][name].values()) < 1e-10

    def test_the_learners_update_is_that_of_one_device(self, eight):
        # of one device's gradient itself, rounding in float32 moves 1e-6
        assert max(eight["update"]["fsdp x context"].values()) < 1e-5

    def test_scores_are_those_of_one_device(self, eight):
        assert eight["scores"]["largest"] > 1 and eight["scores"]["apart"] < 1e-5 * eight["scores"]["largest"]

    def test_splash_attention_of_shared_rows(self, eight):
        assert eight["splash"] < 1e-5

    def test_each_device_has_its_part_of_the_activations(self, eight):
        assert eight["hidden"] == [2, 8, 16]  # of [4, 32, 16]: two parts of the rows, four of their tokens


class TestPlacement:
    MESH = jax.sharding.AbstractMesh((2, 2, 1, 4), ("data", "fsdp", "tensor", "context"))

    @pytest.mark.parametrize(("shape", "expected"), [((8, 32), (("data", "fsdp"), ("context",))), ((6, 30), ((), ()))])
    def test_the_learner_and_the_models_split_activations_alike(self, shape, expected):
        assert placement.activation_axes(self.MESH, shape) == expected
        assert (
            tuple(names.mesh_axes(self.MESH, a, n) for a, n in zip(("rows", "tokens"), shape, strict=True)) == expected
        )

    def test_a_bucket_that_cannot_be_split_is_one_error(self):
        path = HERE.parent / "configs" / "quickstart.yaml"
        with pytest.raises(ConfigError, match=r"batch.buckets holds \[1022\].*mesh.context=4") as error:
            load_config(path, ["mesh.context=4", "batch.buckets=[512,1022]"])
        assert "\n" not in str(error.value)
        assert load_config(path, ["mesh.context=4", "batch.buckets=[512,1024]"]).mesh.context == 4
