"""`rti plan`: formulas against compilers and hand counts, what fits and what does not, and what is printed."""

import json
import os
import pathlib
from importlib.machinery import PathFinder

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from models import hf
from rti_jax import ahead, chips, cli, flops, logprobs, memory, plan, published, traffic
from rti_jax.config import load_config
from rti_jax.logprobs import token_logprobs

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# As transformers counts them: Qwen3-8B, and the text model of Qwen3.5-9B.
PARAMETERS = {"qwen3-8b": 8_190_735_360, "qwen3.5-9b": 8_953_803_264}


def described(raw, **execution):
    config = hf.family(raw["model_type"]).Config.from_hf(raw)
    return hf.LanguageModel(config, raw["model_type"], None, hf.Execution(dtype="bfloat16", **execution))


def full_size(name, length=32768, overrides=()):
    """(model, config) of a published model, one row of `length` tokens on each of eight devices."""
    keys = [f"batch.buckets=[{length}]", f"sampling.max_context={length}", "mesh.fsdp=8", *overrides]
    config = load_config(CONFIGS / "navigation_qwen3_8b.yaml", keys)
    return plan.describe(config, name)[0], config


def rti(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


class TestFlops:
    """One chunk of tokens, so that no loop of attention, head or recurrence hides operations from XLA's count."""

    ROWS, LENGTH = 2, 64

    def counted(self, model):
        """XLA's count of forward pass, and of forward and backward."""
        ids = jax.ShapeDtypeStruct((self.ROWS, self.LENGTH), jnp.int32)
        params = jax.eval_shape(lambda: hf.init(model.config, jax.random.key(0))[1])

        def loss(params, tokens, positions, segments):
            hidden = model.hidden(params, tokens, positions, segments)
            return token_logprobs(hidden, model.head(params), tokens, segments)[0].sum()

        return [jax.jit(f).lower(params, ids, ids, ids).cost_analysis()["flops"] for f in (loss, jax.grad(loss))]

    @pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
    @pytest.mark.parametrize("raw", [DENSE, HYBRID], ids=["dense", "hybrid"])
    def test_agree_with_xlas_count_of_an_unrolled_model(self, raw, remat, monkeypatch):
        monkeypatch.setattr(logprobs, "KEPT_BYTES", 0)
        model = described(raw, attention="blockwise", remat=remat, scan_layers=False)
        counted = flops.forward(model, self.ROWS * self.LENGTH, self.ROWS * self.LENGTH**2)  # one block: no causal skip
        forward, update = self.counted(model)
        assert 0.96 < counted.forward / forward < 1.0, "norms, rotation and softmax are what is left out"
        assert 0.96 < counted.update(remat) / update < 1.0

    @pytest.mark.parametrize("raw", [DENSE, HYBRID], ids=["dense", "hybrid"])
    def test_what_attention_costs_again_is_what_xla_counts_more(self, raw):
        ways = ("full", "attention")
        models = {remat: described(raw, attention="blockwise", remat=remat, scan_layers=False) for remat in ways}
        counted = flops.forward(models["full"], self.ROWS * self.LENGTH, self.ROWS * self.LENGTH**2)
        full, attention = (self.counted(models[remat])[1] for remat in ways)
        assert counted.update("full") - counted.update("attention") == pytest.approx(full - attention, rel=0.1)

    def test_cudnns_attention_is_always_computed_again(self):
        counted = flops.Flops(matrices=100.0, attention=10.0, recurrence=0.0, closing=30.0, head=0.0)
        assert counted.update("attention", "cudnn") == counted.update("full") == 300 + 35 + 80
        assert counted.update("attention") == 300 + 35 + 70
        assert counted.update("dots", "cudnn") == 300 + 35 + 10 and counted.update("dots") == 300 + 35

    def test_xlas_count_of_a_scanned_model_misses_layers(self):
        one, many = (described({**DENSE, "num_hidden_layers": n}, attention="blockwise") for n in (1, 3))
        assert self.counted(one)[0] == pytest.approx(self.counted(many)[0], rel=0.02)

    def test_of_qwen3_8b_are_six_for_each_parameter_and_token(self):
        model, _ = full_size("qwen3-8b")
        short = flops.forward(model, 1.0, 1.0)
        multiplied = memory.count(model) - 151936 * 4096  # the embedding is looked up
        assert short.model == pytest.approx(6 * multiplied, rel=2e-4)
        long = flops.forward(model, 32768, flops.causal_pairs(32768))
        assert long.attention == pytest.approx(4 * 36 * 4096 * 32768**2 / 2, rel=1e-4)


class TestMemory:
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_published_shapes_have_the_published_number_of_parameters(self, name):
        assert memory.count(full_size(name)[0]) == PARAMETERS[name]

    def test_state_is_the_sum_of_its_shards(self):
        model, config = full_size("qwen3-8b")
        parts = plan.estimate(model, config, chips.CHIPS["h20"]).parts
        whole = 4 * PARAMETERS["qwen3-8b"]
        assert parts["parameters"] == pytest.approx(whole / 8, rel=1e-3)  # norms are whole on every device
        assert parts["gradients"] == 3 * parts["parameters"]
        assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=1e-6)
        assert parts["reference"] == 0 and parts["activations"] == 36 * 32768 * 4096 * 2

    @pytest.mark.parametrize(
        ("override", "part", "factor"),
        [
            ("rti.enabled=false", "gradients", 2 / 3),
            ("optimizer.name=muon", "optimizer", 0.576),  # one moment for matrices, two for embedding, head and norms
            ("model.dtype=float32", "activations", 2),
            ("batch.rows_per_microbatch=16", "activations", 2),
            ("mesh.fsdp=4", "parameters", 2),
            ("engine.memory_fraction=0.8", "engine_weights", 1),
            ("engine.args={tensor_parallel_size: 8}", "engine_weights", 1 / 8),
        ],
    )
    def test_parts_follow_the_config(self, override, part, factor):
        model, before = full_size("qwen3-8b")
        _, after = full_size("qwen3-8b", overrides=[override])
        if override.startswith("model"):
            model = plan.describe(after, "qwen3-8b")[0]
            before_parts = plan.estimate(plan.describe(before, "qwen3-8b")[0], before, chips.CHIPS["h20"]).parts
        else:
            before_parts = plan.estimate(model, before, chips.CHIPS["h20"]).parts
        after_parts = plan.estimate(model, after, chips.CHIPS["h20"]).parts
        assert after_parts[part] / before_parts[part] == pytest.approx(factor, rel=0.01)

    def test_attentions_output_is_kept_on_a_tpu_and_not_on_a_gpu(self):
        """Output in bfloat16 and a float32 number for each head and token; `auto` is cuDNN's on a GPU."""

        def activations(remat, chip):
            model, config = full_size("qwen3-8b", overrides=[f"model.remat={remat}"])
            return plan.estimate(model, config, chips.CHIPS[chip]).parts["activations"]

        output = 36 * 32768 * 32 * (2 * 128 + 4)
        assert activations("attention", "h20") == activations("full", "h20") == activations("full", "v5p")
        assert activations("attention", "v5p") == activations("full", "v5p") + output
        assert activations("dots", "v5p") == activations("dots", "h20") + output

    @pytest.mark.parametrize("remat", ["none", "full"])
    def test_devices_that_share_rows_keep_their_part(self, remat):
        overrides = [f"model.remat={remat}", "mesh.fsdp=8"]
        _, config = full_size("qwen3-8b", overrides=overrides)
        _, shared = full_size("qwen3-8b", overrides=[*overrides[:1], "mesh.fsdp=2", "mesh.context=4"])
        model = plan.describe(config, "qwen3-8b")[0]
        chip = chips.CHIPS["h20"]
        # eight rows on two groups of four devices: each takes part in four rows, with a quarter of their tokens
        whole, parts = (plan.estimate(model, c, chip).parts for c in (config, shared))
        if remat == "full":
            assert parts["activations"] == whole["activations"]
        else:  # and keeps the keys and values of whole rows
            more = parts["activations"] - whole["activations"]
            assert more == 3 * 36 * 32768 * 2 * 8 * 128 * 2
        _, one = full_size(
            "qwen3-8b", overrides=[*overrides[:1], "mesh.fsdp=2", "mesh.context=4", "batch.rows_per_microbatch=2"]
        )
        quarter = plan.estimate(model, one, chip)
        assert quarter.parts["activations"] == parts["activations"] / 4 and quarter.rows == 1
        assert quarter.parts["workspace"] < whole["workspace"]

    def test_offloaded_moments_are_the_hosts(self):
        chip = chips.CHIPS["h20"]
        model, before = full_size("qwen3-8b")
        _, after = full_size("qwen3-8b", overrides=["optimizer.offload=true"])
        kept, offloaded = (plan.estimate(model, c, chip) for c in (before, after))
        assert kept.host == {"optimizer": 0, "activations": 0}
        assert offloaded.host["optimizer"] == kept.parts["optimizer"] > 8e9
        assert offloaded.parts["optimizer"] == 0 and offloaded.bytes == kept.bytes - kept.parts["optimizer"]
        # on one device, a micro-batch of short rows leaves too little room for them while they are applied
        small = ["optimizer.offload=true", "rti.enabled=false", "batch.buckets=[1024]", "batch.rows_per_microbatch=1"]
        alone = plan.estimate(model, full_size("qwen3-8b", overrides=[*small, "mesh.fsdp=1"])[1], chip)
        passing = ("parameters", "compute_weights", "activations", "workspace")  # once more: its gradients
        room = sum(alone.parts[name] for name in passing)
        assert (
            alone.parts["optimizer"] == pytest.approx(alone.host["optimizer"] - room) and alone.parts["optimizer"] > 0
        )

    def test_other_models_take_their_room(self):
        model, config = full_size("qwen3-8b", overrides=["rti.enabled=false"])
        opd = ["rti.enabled=false", "loss.baseline=opd", "loss.teacher.path=models/Qwen3-8B"]
        _, distilled = full_size("qwen3-8b", overrides=opd)
        before, after = (plan.estimate(model, c, chips.CHIPS["h20"]).parts for c in (config, distilled))
        assert before["teacher"] == before["frozen_engines"] == 0 and after["teacher"] == after["parameters"]
        shapeless = full_size("qwen3-8b", overrides=[*opd[:2], "loss.teacher.path=models/other"])[1]
        said = plan.plan(model, shapeless, chips.CHIPS["h20"], 0.4, 1000)
        assert any("loss.teacher.path=models/other: no config.json" in note for note in said["notes"])
        roles = ["rti.roles.corrector.model=a", "rti.roles.verifier.model=a", "rti.roles.validator.model=b"]
        _, strong = full_size("qwen3-8b", overrides=roles)
        chip = chips.CHIPS["h20"]
        assert plan.estimate(model, strong, chip).parts["frozen_engines"] == pytest.approx(2 * 0.2 * chip.memory)

    def test_formula_is_within_a_twentieth_of_what_tpus_compiler_said(self):
        """Recorded with libtpu 0.0.42 (docs/plan.md): the test below compiles again where libtpu is installed."""
        for (name, length), peak in COMPILED.items():
            model, config = full_size(name, length)
            parts = plan.estimate(model, config, chips.CHIPS["v5p"]).parts
            assert plan.update_bytes(parts) == pytest.approx(peak * 2**30, rel=0.05), (name, length)


# Peak of `accumulate`, GiB, on v5p 2x2x2 with one row of so many tokens on each device.
COMPILED = {("qwen3-8b", 32768): 30.03}


class TestFits:
    @pytest.mark.parametrize(
        "name", [f"{e}_{m}" for e in ("tau2_retail", "navigation") for m in ("qwen3_8b", "qwen3_5_9b")]
    )
    def test_full_size_configs_on_eight_h20(self, name):
        done = rti(CONFIGS / f"{name}.yaml", "--json")
        result = json.loads(done.output)
        assert done.exit_code == 0 and result["fits"] and result["devices"] == 8 and result["changes"] == []
        assert result["bytes_per_device"] == pytest.approx(sum(result["parts"].values()), abs=20)
        assert result["bytes_per_device"] <= result["bytes_available"] == 96e9
        assert result["tokens_per_step"] == 8 * result["episode_tokens"] * load_groups(name)
        assert result["flops_per_step"] > result["model_flops_per_step"] > 6 * 8e9 * result["tokens_per_step"]
        assert set(result["seconds_per_step"]) == {"h20", "h100", "h200", "v5p", "v6e"}

    @pytest.mark.parametrize("name", ["tau2_retail_qwen3_8b", "navigation_qwen3_8b"])
    def test_not_on_one(self, name):
        done = rti(CONFIGS / f"{name}.yaml", "--devices", 1)
        assert done.exit_code == 1 and "DOES NOT FIT" in done.output and "--devices 8 (mesh.fsdp=8)" in done.output

    def test_what_it_says_to_change_makes_it_fit(self):
        path, wide = CONFIGS / "tau2_retail_qwen3_8b.yaml", "batch.rows_per_microbatch=16"
        before = rti(path, wide, "--json")
        changes = json.loads(before.output)["changes"]
        assert before.exit_code == 1 and any(c.startswith("batch.rows_per_microbatch=8 ") for c in changes)
        for change in (c.split(" ")[0] for c in changes if c.startswith(("batch.rows", "engine.m", "optimizer"))):
            assert rti(path, wide, change).exit_code == 0, change

    @pytest.mark.parametrize("proposed", [True, False], ids=["with_rti", "grpo"])
    def test_sampling_in_turn_is_proposed_where_that_saves_memory(self, proposed):
        path, fraction = CONFIGS / "tau2_retail_qwen3_8b.yaml", 0.5 if proposed else 0.6
        beside = ["rollout.staleness=1", f"rti.enabled={proposed}".lower(), f"engine.memory_fraction={fraction}"]
        before = json.loads(rti(path, "--json", *beside).output)
        assert not before["fits"] and bool(before["parts"]["held"]) is proposed
        assert any(c.startswith("rollout.staleness=0 ") for c in before["changes"]) is proposed
        if proposed:
            after = rti(path, "--json", *beside, "rollout.staleness=0")
            assert after.exit_code == 0 and "rollout.staleness=0 (92.3 GB)" in before["changes"]
            assert json.loads(after.output)["bytes_per_device"] == pytest.approx(92.3e9, rel=0.001)

    def test_an_engine_without_room_for_a_sequence_does_not(self):
        done = rti(CONFIGS / "tau2_retail_qwen3_8b.yaml", "engine.memory_fraction=0.18", "--json")
        result = json.loads(done.output)
        assert done.exit_code == 1 and result["bytes_per_device"] < result["bytes_available"]
        assert result["engine_cache_tokens"] < 32768

    def test_servers_take_nothing_of_the_learners_devices(self):
        done = rti(CONFIGS / "navigation_qwen3_8b.yaml", "engine.kind=server", "engine.urls=[http://a]", "--json")
        result = json.loads(done.output)
        assert not {p for p in result["parts"] if p.startswith("engine")} and result["engine_cache_tokens"] is None
        assert result["seconds_per_step"]["h20"]["rollout"] is None

    def test_notes_say_how_to_share_a_gpu_and_to_use_all(self):
        path = CONFIGS / "navigation_qwen3_8b.yaml"
        alone, share = json.loads(rti(path, "--json").output)["notes"]
        assert "runs on 1 of 8 devices" in alone and share.endswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.57")
        spread = rti(path, "--json", "--chip", "v5p", "engine.args={tensor_parallel_size: 8}")
        assert json.loads(spread.output)["notes"] == []


class TestStep:
    def test_time_is_operations_over_what_the_chips_do(self):
        result = json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--json", "--utilization", 0.5).output)
        expected = result["flops_per_step"] / (8 * 148e12 * 0.5)
        assert result["seconds_per_step"]["h20"]["update"] == pytest.approx(expected)

    def test_tokens_follow_the_stated_length(self):
        result = json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--json", "--episode-tokens", 1000).output)
        assert result["tokens_per_step"] == 32 * 8 * 1000

    def test_several_minibatches_and_a_reference_each_cost_a_forward_pass(self):
        base, mini, both = (
            json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--json", *extra).output)["flops_per_step"]
            for extra in ([], ["optimizer.minibatches=2"], ["optimizer.minibatches=2", "loss.kl_beta=0.1"])
        )
        assert mini - base == pytest.approx(both - mini) and mini > 1.2 * base

    def test_communication_of_one_device_is_nothing_and_of_eight_above_the_least(self):
        one, eight = (
            json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--json", "--devices", n).output) for n in (1, 8)
        )
        assert one["communication_bytes_per_step"] == {"bytes": 0, "ideal": 0}
        least = 7 / 8 * PARAMETERS["qwen3-8b"] * (2 + 2 + 4) * eight["microbatch"]["per_step"]
        assert eight["communication_bytes_per_step"]["ideal"] == pytest.approx(least)
        assert 1 < eight["communication_bytes_per_step"]["bytes"] / least < 1.1

    @pytest.mark.parametrize(("remat", "sums"), [("none", 4), ("dots", 4), ("attention", 5), ("full", 5)])
    def test_tensor_parallel_sums_are_made_again_where_layers_are(self, remat, sums):
        model = described(DENSE, remat=remat)
        mesh = {"data": 1, "fsdp": 1, "tensor": 2, "context": 1}
        sent = traffic.per_microbatch(model, mesh, 64)
        assert sent["ideal"] == sums * DENSE["num_hidden_layers"] * 64 * DENSE["hidden_size"] * 2

    def test_devices_that_share_rows_send_keys_and_values(self):
        alone, shared = (
            json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--json", "--devices", 16, *keys).output)
            for keys in (["mesh.data=2"], ["mesh.context=2"])
        )
        # replicas and sharers of rows sum their gradients alike; gathered twice, gradients scattered once, by half
        more = shared["communication_bytes_per_step"]["ideal"] - alone["communication_bytes_per_step"]["ideal"]
        row_tokens = shared["microbatch"]["rows_per_device"] * shared["microbatch"]["row_length"]
        weights = 2 * 7 / 8 * PARAMETERS["qwen3-8b"] * (2 + 2 + 4) / 2 + 2 * PARAMETERS["qwen3-8b"] / 8 * 4 / 2
        keys = 3 / 2 * 36 * 2 * 8 * 128 * row_tokens * 2
        assert shared["communication_bytes_per_step"]["ideal"] == pytest.approx(
            shared["microbatch"]["per_step"] * (weights + keys), rel=1e-3
        )
        assert more != 0 and shared["mesh"]["context"] == 2

    def test_offload_is_counted_on_the_link_to_the_host(self):
        path = CONFIGS / "navigation_qwen3_8b.yaml"
        none, moments, inputs = (
            json.loads(rti(path, "--json", *keys).output)
            for keys in ([], ["optimizer.offload=true", "optimizer.minibatches=2"], ["model.remat=offload"])
        )
        assert none["host_transfer_bytes_per_step"] == 0 == sum(none["host_bytes_per_device"].values())
        moved = moments["host_transfer_bytes_per_step"]
        assert moved == pytest.approx(4 * moments["host_bytes_per_device"]["optimizer"]) and moved > 0
        assert moments["host_transfer_seconds"] == pytest.approx(moved / 64e9)
        shape = inputs["microbatch"]
        kept = 36 * 4096 * 2 * shape["rows_per_device"] * shape["row_length"]
        assert inputs["host_bytes_per_device"]["activations"] == kept
        assert inputs["host_transfer_bytes_per_step"] == 2 * kept * shape["per_step"]
        said = rti(path, "optimizer.offload=true").output
        assert "in its host's memory" in said and "of its link to the host" in said


class TestInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--chip", "b200"], "--chip b200: choose one of h20, h100, h200, v5p, v6e"),
            (["--model", "qwen"], "--model qwen: choose one of qwen3-8b, qwen3.5-9b"),
            (["--devices", "6", "mesh.tensor=4"], "--devices 6 is not a multiple of mesh data=1 tensor=4"),
            (["--utilization", "40"], "--utilization 40.0: expected a share of the peak"),
            (["--episode-tokens", "99999"], "--episode-tokens 99999: expected 1 to 16384"),
            (["model.path=nowhere/mine"], "model.path=nowhere/mine: no config.json there"),
            (["--compile"], "--compile: H20's compiler needs the device"),
            (
                ["--compile", "--chip", "v5p", "--devices", "3"],
                "--compile: TPU v5p comes in slices of 4, 8, 16, 32, 64 devices, not 3",
            ),
        ],
    )
    def test_mistakes_are_one_line(self, arguments, said):
        done = rti(CONFIGS / "navigation_qwen3_8b.yaml", *arguments)
        assert done.exit_code == 2 and done.stderr.startswith(f"error: {said}"), done.output
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a_folder_of_its_name"])
    def test_compile_without_its_compiler_says_what_to_install(self, monkeypatch, tmp_path, folder):
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        if folder:  # as `pip install --target libtpu` makes one: on the path it is a package without contents
            (tmp_path / "libtpu").mkdir()
        monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda n: PathFinder.find_spec(n, [str(tmp_path)]))
        done = rti(CONFIGS / "navigation_qwen3_8b.yaml", "--compile", "--chip", "v5p")
        assert done.exit_code == 2 and "pip install libtpu" in done.stderr

    def test_what_the_compiler_refuses_does_not_fit(self, monkeypatch):
        said = {"accumulate": {"refused": "RESOURCE_EXHAUSTED: too much"}}
        monkeypatch.setattr(ahead, "peak", lambda *_: said)
        done = rti(CONFIGS / "navigation_qwen3_8b.yaml", "--compile", "--chip", "v5p")
        assert done.exit_code == 1 and "TPU's compiler, accumulate: RESOURCE_EXHAUSTED: too much" in done.output

    def test_a_folder_needs_its_config_json_alone(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(published.PUBLISHED["qwen3-8b"]))
        mine = json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", f"model.path={tmp_path}", "--json").output)
        named = json.loads(rti(CONFIGS / "navigation_qwen3_8b.yaml", "--model", "qwen3-8b", "--json").output)
        assert mine.pop("model") == f"{tmp_path}/config.json" and named.pop("model") == "the published qwen3-8b"
        assert mine == named

    def test_neither_vllm_nor_torch_is_loaded(self):
        import subprocess
        import sys

        code = (
            "import sys; from rti_jax import plan, config;"
            "plan.main(config.load_config('configs/navigation_qwen3_8b.yaml'));"
            "sys.exit(', '.join({'vllm', 'torch'} & set(sys.modules)) or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def load_groups(name):
    return load_config(CONFIGS / f"{name}.yaml").rollout.groups_per_step


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TPU_LIBRARY_PATH"), reason="needs libtpu: TPU_LIBRARY_PATH")
class TestCompiler:
    def test_the_formula_is_within_a_tenth_of_the_peak(self):
        model, config = full_size("qwen3-8b")
        chip = chips.CHIPS["v5p"]
        said = ahead.peak(model, config, chip, 8, 32768)["accumulate"]
        assert plan.update_bytes(plan.estimate(model, config, chip).parts) == pytest.approx(said["peak"], rel=0.1)
