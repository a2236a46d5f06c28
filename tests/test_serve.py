"""`rti serve`: the command line that a config gives vLLM's server, and a real one."""

import asyncio
import pathlib

import numpy as np
import pytest
from test_engine import config, request
from tiny_models import ReferenceModel, make_qwen3

from models import hf
from rti_jax import serve, vllm_settings, weight_sync
from rti_jax.engine import make_engine


def test_arguments_become_flags():
    args = {"model": "m", "dtype": "float32", "enable_prefix_caching": True, "enable_chunked_prefill": False}
    args |= {"weight_transfer_config": {"backend": "b"}, "max_model_len": 9, "quantization": None}
    args["middleware"] = ["a", "b"]
    flags = serve.command(pathlib.Path("m"), args, "0.0.0.0", 8001)
    assert flags[:6] == ["--model", "m", "--host", "0.0.0.0", "--port", "8001"] and "--enable-scale-out" in flags
    assert flags[flags.index("--dtype") :] == [
        *("--dtype", "float32", "--enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--weight-transfer-config", '{"backend": "b"}', "--max-model-len", "9", "--middleware", "a", "b"),
    ]


def test_a_servers_gpus_are_its_own_and_it_has_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    args = vllm_settings.server_arguments(tmp_path, config(), on_cpu=False)
    assert "gpu_memory_utilization" not in args and "skip_tokenizer_init" not in args
    assert args["logprobs_mode"] == "processed_logprobs" and args["max_model_len"] == 512
    given = config(args={"gpu_memory_utilization": 0.8})
    assert vllm_settings.server_arguments(tmp_path, given, on_cpu=False)["gpu_memory_utilization"] == 0.8


@pytest.mark.slow
def test_a_real_server_equals_transformers_before_and_after_an_update(tmp_path):
    folder, other = make_qwen3(tmp_path / "tied"), make_qwen3(tmp_path / "other", seed=5)
    requests = [request(i, 150, temperature=(1.0, 0.6)[i % 2]) for i in range(10)]

    def sample(engine, *requests):
        async def together():
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 300)

        return asyncio.run(together())

    engine = make_engine(folder, config(kind="server", start=1))
    try:
        for version, path in enumerate((folder, other)):
            if version:
                assert asyncio.run(weight_sync.sync(engine, *hf.load(path), version)) == version
            results, reference = sample(engine, *requests), ReferenceModel(path)
            for r, result in zip(requests, results, strict=True):
                assert (len(result.ids), result.policy_version) == (24, version)
                expected = reference.logprobs(r.prompt_ids, result.ids, r.temperature)
                np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            (stopped,) = sample(engine, request(0, 150, stop_token_ids=(results[0].ids[6],)))
            n = results[0].ids.index(results[0].ids[6]) + 1
            assert (stopped.ids, stopped.finish_reason) == (results[0].ids[:n], "stop")
        # A new trainer takes the weights back to the first ones, from the server's own folder.
        server = engine._pool._servers[0]
        again = make_engine(folder, config(kind="server", urls=[server.url]))
        assert again.version == 0
        results, reference = sample(again, *requests), ReferenceModel(folder)
        for r, result in zip(requests, results, strict=True):
            expected = reference.logprobs(r.prompt_ids, result.ids, r.temperature)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
        asyncio.run(again.close())
    finally:
        asyncio.run(engine.close())
