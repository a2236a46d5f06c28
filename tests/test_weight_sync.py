"""Weights reach vLLM whole and exact: against transformers, and against an engine that starts from the same weights."""

import asyncio
import concurrent.futures
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_engine import config, request, sample
from tiny_models import ReferenceModel, make_qwen3

from models import hf
from rti_jax import weight_sync
from rti_jax.engine import make_engine
from rti_jax.engine_errors import EngineDiedError, EngineError, StaleVersionError, WeightMismatchError

SHAPES = {"model.embed_tokens.weight": (3, 2), "model.norm.weight": (2,)}
TENSORS = {
    "model.norm.weight": np.array([1.0, -2.0], np.float32),  # not in the order of SHAPES
    "model.embed_tokens.weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
}


def left_overs(folder=weight_sync.SHARED_MEMORY):
    return list(pathlib.Path(folder).glob(f"{weight_sync.PREFIX}*"))


class TestPayload:
    def test_holds_the_tensors_by_name_and_is_removed(self, tmp_path):
        with weight_sync.payload(TENSORS.items(), SHAPES, "float32", str(tmp_path)) as path:
            read = load_file(path)
            np.testing.assert_array_equal(read["model.embed_tokens.weight"], [[0, 3], [1, 4], [2, 5]])
            np.testing.assert_array_equal(read["model.norm.weight"], [1, -2])
        assert not left_overs(tmp_path)

    def test_bfloat16_rounds_to_nearest_even(self, tmp_path):
        values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7], np.float32)  # two ties and an exact one
        with weight_sync.payload([("w", values)], {"w": (3,)}, "bfloat16", str(tmp_path)) as path:
            read = load_file(path)["w"]
        assert read.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read.astype(np.float32), [1, 1 + 2**-6, -1 - 2**-7])

    def test_every_difference_is_named_before_anything_is_sent(self, tmp_path):
        wrong = [("model.embed_tokens.weight", np.zeros((2, 3), np.float32)), ("model.norm.scale", np.zeros(2))]
        message = (
            "missing model.norm.weight; unexpected model.norm.scale; "
            r"model.embed_tokens.weight has shape \(2, 3\), not \(3, 2\)"
        )
        with (
            pytest.raises(WeightMismatchError, match=message),
            weight_sync.payload(wrong, SHAPES, "float32", str(tmp_path)),
        ):
            raise AssertionError("entered")
        assert not left_overs(tmp_path)

    def test_a_killed_trainers_file_is_removed_a_living_ones_is_not(self, tmp_path):
        dead = tmp_path / f"{weight_sync.PREFIX}dead.safetensors"
        dead.write_bytes(b"")
        with weight_sync.payload(TENSORS.items(), SHAPES, "float32", str(tmp_path)) as living:
            os.utime(dead, (0, 0))
            os.utime(living, (0, 0))
            with weight_sync.payload(TENSORS.items(), SHAPES, "float32", str(tmp_path)):
                assert living.exists()
                assert not dead.exists()

    def test_versions_only_go_up(self):
        weight_sync.check_version(41, 40)
        for version in (40, 0):
            with pytest.raises(StaleVersionError, match=f"version {version} offered, but the engine .* serves 40"):
                weight_sync.check_version(version, 40)

    @pytest.mark.parametrize("tied", [True, False])
    def test_expected_names_are_the_folders(self, tmp_path, tied):
        folder = make_qwen3(tmp_path, tied=tied, tokenizer=False, max_shard_size="100KB")
        shapes = weight_sync.expected_shapes(folder)
        assert len(list(folder.glob("*.safetensors"))) > 1
        assert ("lm_head.weight" in shapes) is (not tied)
        assert len(shapes) == 2 * 11 + 2 + (not tied)
        assert shapes["model.layers.1.self_attn.q_proj.weight"] == (128, 64)
        assert weight_sync.aliases(shapes) == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})

    def test_a_folder_without_weights_is_named(self, tmp_path):
        with pytest.raises(EngineError, match=f"{tmp_path}"):
            weight_sync.expected_shapes(tmp_path)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request, tmp_path_factory):
    """Two folders of different weights, and an engine started from each."""
    root = tmp_path_factory.mktemp("models")
    folders = [make_qwen3(root / str(seed), tied=request.param, seed=seed) for seed in (1, 2)]
    handover = root / "handover"
    handover.mkdir()
    settings = config(restarts=0, weight_transfer="file", weights_dir=str(handover))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # engines may start in threads
        engines = list(pool.map(lambda folder: make_engine(folder, settings), folders))
    yield folders, engines, handover
    for engine in engines:
        asyncio.run(engine.close())
    assert not left_overs(handover)


REQUESTS = [request(i, 150, max_tokens=32) for i in range(12)]  # longer than a block of the prefix cache


@pytest.mark.slow
def test_an_updated_engine_is_a_fresh_one(pair):
    """Order matters: each step starts from the state that the one before left."""
    (first, second), (engine, fresh), handover = pair
    before = sample(engine, *REQUESTS)  # fills the prefix cache with the old weights' keys and values
    wanted = sample(fresh, *REQUESTS)
    assert all(a.ids != b.ids for a, b in zip(before, wanted, strict=True))
    model, params = hf.load(second)

    # A tensor under another name: refused, named, and the engine samples as before.
    renamed = ((n.replace("k_norm", "key_norm"), t) for n, t in hf.to_hf(model, params))
    with pytest.raises(
        WeightMismatchError, match="missing model.layers.0.self_attn.k_norm.weight; .*0.self_attn.key_norm"
    ):
        asyncio.run(engine.update_weights(renamed, 1))
    assert (sample(engine, *REQUESTS), engine.version) == (before, 0)

    # The update, with requests in flight: they end on the old weights, those that come later are all new.
    async def update_while_sampling():
        running = [asyncio.create_task(engine.generate(r)) for r in REQUESTS]
        await engine.generate(request(99, 150, max_tokens=1))  # its answer: the others are being sampled
        confirmed = await weight_sync.sync(engine, model, params, 3)
        return confirmed, await asyncio.gather(*running)

    confirmed, results = asyncio.run(update_while_sampling())
    assert (confirmed, engine.version) == (3, 3)
    for result, old, new in zip(results, before, wanted, strict=True):
        assert (result.ids, result.logprobs) == {0: (old.ids, old.logprobs), 3: (new.ids, new.logprobs)}[
            result.policy_version
        ]
    assert results[0].policy_version == 0
    updated = sample(engine, *REQUESTS)
    assert [(r.ids, r.logprobs, r.policy_version) for r in updated] == [(r.ids, r.logprobs, 3) for r in wanted]
    reference = ReferenceModel(second)
    for r, result in zip(REQUESTS, updated, strict=True):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(r.prompt_ids, result.ids), atol=1e-4)
    assert len(left_overs(handover)) == 1  # kept, for an engine that must be started again

    # Versions go up only.
    with pytest.raises(StaleVersionError, match="version 3 offered"):
        asyncio.run(weight_sync.sync(engine, model, params, 3))

    # And back again, on both engines.
    old_model, old_params = hf.load(first)
    for e in (engine, fresh):
        asyncio.run(weight_sync.sync(e, old_model, old_params, 4))
        assert [(r.ids, r.logprobs) for r in sample(e, *REQUESTS)] == [(r.ids, r.logprobs) for r in before]
    assert asyncio.run(engine.checksums()) == asyncio.run(fresh.checksums())
    assert len(left_overs(handover)) == 2


@pytest.mark.slow
def test_an_update_that_fails_half_way_ends_the_engines_service(pair, monkeypatch):
    """Last of the module: it breaks an engine."""
    (first, _), (engine, _), _ = pair
    model, params = hf.load(first)
    monkeypatch.setattr(weight_sync, "aliases", lambda expected: ["not a mapping"])
    with pytest.raises(EngineDiedError, match="update to weights version 9 failed .*; start the engine again"):
        asyncio.run(weight_sync.sync(engine, model, params, 9))
    with pytest.raises(EngineDiedError, match="start the engine again"):
        sample(engine, REQUESTS[0])
