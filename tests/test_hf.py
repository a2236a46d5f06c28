"""Hugging Face folders: round trips, errors, what an export holds, and parameters born on their shards."""

import dataclasses
import json
import os
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stand_in import forced_devices
from tiny_models import make_model, make_qwen3

from models import checkpoint_folder, hf, names


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, options in {
        "tied": {"tied": True},
        "untied": {"tied": False, "attention_bias": True},
        "sharded": {"tied": False, "max_shard_size": "100KB"},
    }.items():
        make_qwen3(root / name, **options)
    return root


@pytest.fixture(params=["tied", "untied", "sharded"])
def folder(request, folders):
    return folders / request.param


def tensors_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rewrite(folder, target, change):
    """A copy of a single-file folder whose tensors `change` has edited."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


FAMILIES = ["qwen3", "qwen2", "llama", "qwen3_5_text", "qwen3_5"]


def stored(folder):
    """dtype, shape and bytes of every tensor of a folder."""
    with checkpoint_folder.Reader(folder) as reader:
        return {n: (e, bytes(reader.data(n))) for n, e in reader.entries.items()}


class TestRoundTrip:
    def test_tensors_come_back_as_they_were(self, folder):
        model, params = hf.load(folder)
        ours, theirs = dict(hf.to_hf(model, params)), tensors_of(folder)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].dtype == np.float32 and np.array_equal(ours[name], theirs[name]), name

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("model_type", FAMILIES)
    def test_a_folder_comes_back_bit_for_bit(self, tmp_path, model_type, dtype):
        source = make_model(tmp_path / "source", model_type, tied=dtype == "float32", dtype=dtype)
        model, params = hf.load(source)
        out = hf.save(model, params, tmp_path / "out")
        assert stored(out) == stored(source)
        for file in source.iterdir():
            if file.suffix == ".json":
                assert json.loads((out / file.name).read_text()) == json.loads(file.read_text()), file.name

    def test_each_tensor_keeps_its_own_dtype(self, folders, tmp_path):
        def mix(tensors):
            tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype("f2")
            norm = tensors["model.norm.weight"]
            tensors["model.norm.weight"] = norm.astype(jnp.bfloat16)

        source = rewrite(folders / "tied", tmp_path / "source", mix)
        model, params = hf.load(source)
        assert stored(hf.save(model, params, tmp_path / "out")) == stored(source)

    def test_a_stored_copy_of_a_tied_head_is_kept_up(self, folders, tmp_path):
        def duplicate(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

        model, params = hf.load(rewrite(folders / "tied", tmp_path / "double", duplicate))
        assert "lm_head" not in params
        out = tensors_of(hf.save(model, jax.tree.map(lambda x: x + 1, params), tmp_path / "out"))
        assert np.array_equal(out["lm_head.weight"], out["model.embed_tokens.weight"])
        assert out["lm_head.weight"][0, 0] == params["embed_tokens"]["embedding"][0, 0] + 1

    def test_a_tied_model_has_no_head(self, folders):
        model, params = hf.load(folders / "tied")
        assert "lm_head.weight" not in dict(hf.to_hf(model, params))
        assert np.array_equal(model.head(params), params["embed_tokens"]["embedding"].T)

    def test_names_come_layer_by_layer(self, folders):
        model, params = hf.load(folders / "tied")
        order = [name for name, _ in hf.to_hf(model, params)]
        assert order[0] == "model.embed_tokens.weight" and order[-1] == "model.norm.weight"
        layers = [name.split(".")[2] for name in order[1:-1]]
        assert layers == sorted(layers) and set(layers) == {"0", "1"}

    def test_parameters_are_stacked_float32_masters(self, folders):
        _, params = hf.load(folders / "tied", dtype="bfloat16")
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        assert params["layers"]["self_attn"]["q_proj"]["kernel"].shape == (2, 64, 128)

    def test_transformers_loads_what_save_writes(self, folder, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, params = hf.load(folder)
        params = jax.tree.map(lambda x: x * 1.01, params)
        out = hf.save(model, params, tmp_path / "out")
        loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        theirs = dict(loaded.named_parameters())
        ours = dict(hf.to_hf(model, params))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert np.array_equal(theirs[name].detach().float().numpy(), value), name
        assert AutoTokenizer.from_pretrained(out).chat_template
        assert loaded.generation_config.eos_token_id == [258, 256]  # the list, not one of them

    def test_save_keeps_config_and_companions(self, folders, tmp_path):
        source = rewrite(folders / "tied", tmp_path / "source", lambda t: None)
        raw = json.loads((source / "config.json").read_text()) | {"own_key": {"a": 1}, "attention_dropout": 0.0}
        (source / "config.json").write_text(json.dumps(raw))
        for name in ("LICENSE", "README.md", "pytorch_model.bin", "chat_template.jinja"):
            (source / name).write_text(name)
        model, params = hf.load(source)
        out = hf.save(model, params, tmp_path / "out")
        assert json.loads((out / "config.json").read_text()) == raw
        kept = {f.name for f in source.iterdir()} - {"pytorch_model.bin"}
        assert {f.name for f in out.iterdir()} == kept

    def test_bfloat16_folder(self, folders, tmp_path):
        model, params = hf.load(folders / "tied")
        half = hf.save(model, params, tmp_path / "half", dtype="bfloat16")
        assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
        again, loaded = hf.load(half)
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, rounded))
        assert tensors_of(hf.save(again, loaded, tmp_path / "again"))["model.norm.weight"].dtype == jnp.bfloat16

    def test_large_models_are_split(self, folders, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint_folder, "SHARD_BYTES", 100_000)
        model, params = hf.load(folders / "untied")
        out = hf.save(model, params, tmp_path / "out")
        files = sorted(out.glob("*.safetensors"))
        assert len(files) > 1 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == tensors_of(out).keys()
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors_of(out).values())
        _, loaded = hf.load(out)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """As published: bfloat16 but for a few float32 tensors, in shards, with a multi-token head and a vision tower."""
    root = tmp_path_factory.mktemp("multimodal")
    options = dict(tied=False, dtype="bfloat16", max_shard_size="150KB", num_hidden_layers=4)
    folder = make_model(root / "folder", "qwen3_5", **options)
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file) | {
        "mtp.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3).astype(jnp.bfloat16),
        "mtp.layers.0.mlp.up_proj.weight": np.full((2, 2), 200, np.uint8),  # whatever its dtype
    }
    tensors |= {n: t.astype(np.float32) for n, t in tensors.items() if n.endswith("A_log")}
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((folder / checkpoint_folder.INDEX).read_text())
    index["weight_map"] |= {name: file.name for name in tensors}
    (folder / checkpoint_folder.INDEX).write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    return folder


class TestMultimodal:
    def test_text_is_trained_and_the_rest_comes_back_byte_for_byte(self, multimodal, tmp_path):
        model, params = hf.load(multimodal)
        assert model.model_type == "qwen3_5" and model.config.num_hidden_layers == 4
        out = hf.save(model, jax.tree.map(lambda x: x * 1.5 + 0.1, params), tmp_path / "out")
        before, after = stored(multimodal), stored(out)
        assert after.keys() == before.keys()
        trained = dict(hf.to_hf(model, params))
        for name in before:
            assert before[name][0] == after[name][0], name  # dtype and shape, of each tensor its own
            assert (before[name] != after[name]) is (name in trained), name
        rest = before.keys() - trained.keys()
        assert {n.split(".")[1] for n in rest if n.startswith("model.")} == {"visual"} and "mtp.fc.weight" in rest
        assert json.loads((out / "config.json").read_text()) == json.loads((multimodal / "config.json").read_text())
        assert (out / "preprocessor_config.json").read_text() == '{"size": 3}'

    @pytest.mark.parametrize("tied", [False, True])
    def test_it_loads_wherever_the_original_did(self, tmp_path, tied):
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        source = make_model(tmp_path / "source", "qwen3_5", tied=tied, num_hidden_layers=4)
        model, params = hf.load(source)
        out = hf.save(model, jax.tree.map(lambda x: x * 1.1, params), tmp_path / "out")
        tokens = np.arange(12, dtype=np.int32)[None]
        ours = model.hidden(*hf.load(out)[1:], tokens, tokens, np.ones_like(tokens)) @ model.head(hf.load(out)[1])
        for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
            whole, report = kind.from_pretrained(out, output_loading_info=True)
            assert not report["missing_keys"] and not report["mismatched_keys"]
            if kind is AutoModelForImageTextToText:
                assert not report["unexpected_keys"]
            with torch.no_grad():
                theirs = whole(torch.tensor(tokens).long()).logits.numpy()
            np.testing.assert_allclose(ours, theirs, atol=1e-3)

    def test_a_text_model_cut_out_of_a_multimodal_one_keeps_its_names(self, tmp_path):
        """transformers writes such a folder with the multimodal names under the text model's type."""
        from transformers import AutoModelForCausalLM

        source = make_model(tmp_path / "source", "qwen3_5", num_hidden_layers=4)
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "text")
        model, params = hf.load(tmp_path / "text")
        assert model.model_type == "qwen3_5_text" and model.stem == "model.language_model"
        assert stored(hf.save(model, params, tmp_path / "out")) == stored(tmp_path / "text")

    def test_a_renamed_text_tensor_is_an_error(self, multimodal, tmp_path):
        import shutil

        broken = shutil.copytree(multimodal, tmp_path / "broken")
        file = sorted(broken.glob("*.safetensors"))[0]
        tensors = load_file(file)
        name = next(n for n in tensors if n.endswith("A_log"))
        tensors[name.replace("A_log", "A_lag")] = tensors.pop(name)
        save_file(tensors, file)
        with pytest.raises(ValueError, match=rf"missing {name} \[4\]; unexpected {name[:-3]}lag \[4\]"):
            hf.load(broken)

    def test_another_dtype_is_of_the_text_only(self, multimodal, tmp_path):
        model, params = hf.load(multimodal)
        after = stored(hf.save(model, params, tmp_path / "out", dtype="float32"))
        before, trained = stored(multimodal), dict(hf.to_hf(model, params))
        assert {after[n][0].dtype for n in trained} == {"F32"}
        assert all(before[n] == after[n] for n in before.keys() - trained.keys())
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["dtype"] == config["text_config"].get("dtype", "float32") == "float32"


class TestSaveSafely:
    def test_an_existing_model_is_replaced_whole(self, folders, tmp_path):
        model, params = hf.load(folders / "tied")
        out = hf.save(model, params, tmp_path / "out")
        (out / "stale.txt").write_text("old")
        hf.save(model, params, out)
        assert not (out / "stale.txt").exists() and list(tmp_path.iterdir()) == [out]

    def test_a_failed_save_leaves_the_old_model(self, folders, tmp_path, monkeypatch):
        model, params = hf.load(folders / "tied")
        out = hf.save(model, params, tmp_path / "out")
        before = {f.name: f.read_bytes() for f in out.iterdir()}

        def fail(*args, **kwargs):
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint_folder.Writer, "write", fail)
        with pytest.raises(OSError, match="disk full"):
            hf.save(model, params, out)
        assert {f.name: f.read_bytes() for f in out.iterdir()} == before and list(tmp_path.iterdir()) == [out]

    def test_another_folder_is_not_overwritten(self, folders, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        model, params = hf.load(folders / "tied")
        with pytest.raises(ValueError, match="exists and is not a model folder"):
            hf.save(model, params, tmp_path)

    def test_saving_over_the_source(self, folders, tmp_path):
        source = rewrite(folders / "tied", tmp_path / "source", lambda t: None)
        model, params = hf.load(source)
        hf.save(model, jax.tree.map(lambda x: x + 1, params), source)
        assert np.array_equal(hf.load(source)[1]["norm"]["scale"], params["norm"]["scale"] + 1)
        assert (source / "tokenizer.json").is_file()


class TestLoadErrors:
    def test_every_difference_is_listed(self, folders, tmp_path):
        def damage(tensors):
            tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()

        with pytest.raises(ValueError) as error:
            hf.load(rewrite(folders / "tied", tmp_path / "bad", damage))
        for part in (
            "missing model.layers.0.mlp.up_proj.weight [128, 64]",
            "unexpected model.layers.0.mlp.extra.weight [128, 64]",
            "model.norm.weight is [63], expected [64]",
        ):
            assert part in str(error.value)

    def test_a_tied_head_with_other_values_is_an_error(self, folders, tmp_path):
        def duplicate(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

        with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight, although"):
            hf.load(rewrite(folders / "tied", tmp_path / "double", duplicate))

    def test_buffers_of_old_folders_pass_through(self, folders, tmp_path):
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        source = rewrite(folders / "tied", tmp_path / "old", lambda t: t.update({name: np.arange(4, dtype="f4")}))
        model, params = hf.load(source)
        assert stored(hf.save(model, params, tmp_path / "out")) == stored(source)

    def test_weights_that_are_no_floats_are_named(self, folders, tmp_path):
        def quantize(tensors):
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

        with pytest.raises(ValueError, match="model.norm.weight is stored as I8, which is none of F32, BF16, F16"):
            hf.load(rewrite(folders / "tied", tmp_path / "bad", quantize))

    def test_quantized_folders_are_refused(self, folders, tmp_path):
        source = rewrite(folders / "tied", tmp_path / "bad", lambda t: None)
        raw = json.loads((source / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
        (source / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match="quantization_config"):
            hf.load(source)

    def test_missing_things_are_named(self, folders, tmp_path):
        with pytest.raises(ValueError, match="nowhere does not exist"):
            hf.load(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="has no config.json"):
            hf.load(tmp_path)
        (tmp_path / "config.json").write_bytes((folders / "tied" / "config.json").read_bytes())
        with pytest.raises(ValueError, match=r"has no \*.safetensors weights"):
            hf.load(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"cut")
        with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
            hf.load(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match="config.json is not valid JSON"):
            hf.load(tmp_path)

    def test_a_missing_shard_is_named(self, folders, tmp_path):
        for file in (folders / "sharded").iterdir():
            if not file.name.startswith("model-00002"):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(ValueError, match="files that are not there: model-00002"):
            hf.load(tmp_path)

    def test_unsupported_families_and_settings_are_named(self, folders, tmp_path):
        raw = json.loads((folders / "tied" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "mamba"}))
        with pytest.raises(ValueError, match="model type 'mamba' is not supported; supported are .*qwen3"):
            hf.load(tmp_path)
        (tmp_path / "config.json").write_text(
            json.dumps(raw | {"rope_parameters": {"rope_type": "longrope", "factor": 2}})
        )
        with pytest.raises(ValueError, match="rope type 'longrope' is not supported"):
            hf.load(tmp_path)


class TestMemory:
    def test_one_layer_at_a_time(self, tmp_path):
        """What the host holds beside the parameters themselves, which on CPU are its own."""
        sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=16, vocab_size=64)
        source = make_qwen3(tmp_path / "source", tied=True, tokenizer=False, eos_token_id=1, pad_token_id=0, **sizes)
        total = (source / "model.safetensors").stat().st_size
        largest = 4 * 256 * 512
        assert total > 50 * largest
        model, params = hf.load(source)  # compiles, and leaves what stays

        def peak(run):
            tracemalloc.start()
            run()
            highest = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return highest

        assert peak(lambda: hf.load(source)) < 5 * largest
        assert peak(lambda: hf.save(model, params, tmp_path / "out")) < 5 * largest


class TestInit:
    def test_from_a_folder_without_weights(self, folders, tmp_path):
        for file in (folders / "tied").iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        model, params = hf.init(tmp_path, jax.random.key(0))
        again, same = hf.init(tmp_path, jax.random.key(0))
        other = hf.init(tmp_path, jax.random.key(1))[1]
        assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
        kernel = np.asarray(params["layers"]["mlp"]["up_proj"]["kernel"])
        assert not np.array_equal(kernel, other["layers"]["mlp"]["up_proj"]["kernel"])
        assert not np.array_equal(kernel[0], kernel[1])  # layers differ
        out = hf.save(model, params, tmp_path.with_name("out"))
        assert (out / "tokenizer.json").is_file()
        assert jax.tree.all(jax.tree.map(np.array_equal, hf.load(out)[1], params))

    def test_from_a_config(self, folders, tmp_path):
        config = dataclasses.replace(hf.describe(folders / "tied").config, hidden_size=32)
        model, params = hf.init(config, jax.random.key(0), scan_layers=False)
        assert model.source is None and not model.execution.scan_layers
        out = hf.save(model, params, tmp_path / "out")
        assert hf.describe(out).config == config
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32


class TestSharding:
    def test_table_of_rules(self, folders):
        mesh = jax.sharding.AbstractMesh((1, 4, 2), ("data", "fsdp", "tensor"))
        specs = {t.path: tuple(t.spec(mesh)) for t in hf.describe(folders / "untied").tensors}
        assert specs["embed_tokens", "embedding"] == ("tensor", "fsdp")
        assert specs["layers", "self_attn", "q_proj", "kernel"] == (None, "fsdp", "tensor")
        assert specs["layers", "self_attn", "q_proj", "bias"] == (None, "tensor")
        assert specs["layers", "mlp", "down_proj", "kernel"] == (None, "tensor", "fsdp")
        assert specs["layers", "input_layernorm", "scale"] == (None, None)
        uneven = names.Tensor(("a",), "a", (6, 3), ("embed", "mlp"))
        assert tuple(uneven.spec(mesh)) == (None, None)

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["dense", pytest.param("hybrid", marks=pytest.mark.exhaustive)])
    def test_eight_devices(self, folders, tmp_path, family):
        """Shards, logits, gradients, saved tensors and log-probabilities equal one device's."""
        folder, script = folders / "untied", EIGHT_DEVICES
        if family == "hybrid":
            kinds = ["linear_attention", "full_attention"]
            folder = make_model(tmp_path / "hybrid", "qwen3_5_text", tied=False, num_hidden_layers=2, layer_types=kinds)
            script = script.replace('["self_attn"]["q_proj"]', '["layer_0"]["linear_attn"]["in_proj_qkv"]')
            script = script.replace("(2, 32, 64)", "(1, 32, 80)")
        script = script.replace("FOLDER", repr(str(folder)))
        environment = {"XLA_FLAGS": forced_devices(8), "PYTHONPATH": "."}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | environment, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Involuntary full rematerialization" not in done.stderr


EIGHT_DEVICES = """
import jax, numpy as np
from models import checkpoint_folder, hf
from rti_jax.logprobs import Scorer, token_logprobs

largest = []
read = checkpoint_folder.Reader.read
def watched(self, name, index):
    part = read(self, name, index)
    largest.append(part.size)
    return part
checkpoint_folder.Reader.read = watched
stacks, set_row = set(), hf._set_row
def watched_row(stack, part, row):
    stacks.add((stack.shape, len(stack.devices())))
    return set_row(stack, part, row)
hf._set_row = watched_row

auto = (jax.sharding.AxisType.Auto,) * 3
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=auto)
model, params = hf.load(FOLDER, mesh=mesh)
assert max(largest) == 272 * 64 // 4, max(largest)  # no read is larger than a shard
kernel = params["layers"]["self_attn"]["q_proj"]["kernel"]
assert kernel.addressable_shards[0].data.shape == (2, 32, 64), kernel.sharding
shards = {(x.addressable_shards[0].data.shape, 1) for x in jax.tree.leaves(params["layers"])}
assert stacks == shards, (stacks, shards)  # layers are filled where they stay, nothing larger is on a device

single, whole = hf.load(FOLDER)
assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), params, whole))
for (name, a), (other, b) in zip(hf.to_hf(model, params), hf.to_hf(single, whole), strict=True):
    assert name == other and np.array_equal(a, b)

tokens = np.random.default_rng(0).integers(0, 272, (4, 40)).astype(np.int32)
positions, ones = np.broadcast_to(np.arange(40, dtype=np.int32), tokens.shape), np.ones_like(tokens)
def loss(model):
    def total(p):
        hidden = model.hidden(p, tokens, positions, ones)
        return token_logprobs(hidden, model.head(p), tokens, ones, 0.7, chunk=16, mesh=model.mesh)[0].mean()
    return jax.jit(jax.value_and_grad(total), out_shardings=(None, model.shardings()))
a, grads = loss(model)(params)
b, expected = loss(single)(whole)
np.testing.assert_allclose(a, b, rtol=1e-5)
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grads, expected)

rows = [(tokens[0, :5], tokens[0, 5:n]) for n in (6, 20, 40)]
many, one = Scorer(model, mesh, buckets=(64,)), Scorer(single, buckets=(64,))
for x, y in zip(many.score(params, rows), one.score(whole, rows), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)

created = hf.init(model.config, jax.random.key(0), mesh=mesh)[1]
assert created["layers"]["self_attn"]["q_proj"]["kernel"].sharding.is_equivalent_to(kernel.sharding, 3)
"""
