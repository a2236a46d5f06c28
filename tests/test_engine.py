"""The vLLM engine against transformers, and its promises: exact seeds, stop ids, limits, and a clean end."""

import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from tiny_models import BYTES, VOCAB_SIZE, ReferenceModel, make_qwen3

from models import hf
from rti_jax import engine as engine_lib
from rti_jax import vllm_settings, weight_sync
from rti_jax.config import Config, ConfigError
from rti_jax.engine import GenerateRequest, make_engine
from rti_jax.engine_errors import ContextLengthError, EngineDiedError, EngineError
from rti_jax.loop_thread import LoopThread

CONTEXT = 512
END = BYTES + 2  # <|im_end|>


def config(**engine) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": "float32"},
            "sampling": {"max_context": CONTEXT},
            "rollout": {"concurrency": 128},
            "engine": engine,
        }
    )


def request(i: int, length: int = 20, **changes) -> GenerateRequest:
    prompt = tuple(np.random.default_rng(i).integers(0, VOCAB_SIZE, length).tolist())
    defaults = GenerateRequest(prompt, max_tokens=24, temperature=1.0, seed=1000 + i, stop_token_ids=())
    return dataclasses.replace(defaults, **changes)


def sample(engine, *requests: GenerateRequest):
    async def together():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(asyncio.wait_for(together(), 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module")
def engine(folder):
    engine = make_engine(folder, config(restarts=1))
    yield engine
    asyncio.run(engine.close())


@pytest.mark.slow
class TestSampling:
    def test_logprobs_are_transformers_at_the_sampling_temperature(self, engine, folder):
        requests = [request(i, 1 + 3 * i, temperature=(1.0, 0.6)[i % 2]) for i in range(120)]
        results = sample(engine, *requests)
        reference = ReferenceModel(folder)
        for r, result in zip(requests, results, strict=True):
            expected = reference.logprobs(r.prompt_ids, result.ids, r.temperature)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            assert (len(result.ids), result.finish_reason, result.policy_version) == (24, "length", 0)
        # What values at temperature 1 would give instead: the tolerance above would see it.
        r, result = requests[1], results[1]
        assert np.abs(reference.logprobs(r.prompt_ids, result.ids, 1.0) - result.logprobs).max() > 0.1

    def test_temperature_zero_is_greedy(self, engine, folder):
        (result,) = sample(engine, r := request(7, temperature=0.0))
        logits = ReferenceModel(folder).logits((*r.prompt_ids, *result.ids))[len(r.prompt_ids) - 1 : -1]
        assert result.ids == tuple(logits.argmax(-1).tolist())
        np.testing.assert_allclose(result.logprobs, logits.log_softmax(-1).max(-1).values.numpy(), atol=1e-4)

    def test_a_seed_gives_the_same_tokens_alone_batched_and_reordered(self, engine):
        requests = [request(i, 40 + i) for i in range(100)]
        batched = sample(engine, *requests)
        assert sample(engine, *reversed(requests))[::-1] == batched
        assert [sample(engine, r)[0] for r in requests[::20]] == batched[::20]
        (other,) = sample(engine, dataclasses.replace(requests[0], seed=5))
        assert other.ids != batched[0].ids

    def test_more_prompt_tokens_than_a_step_can_hold(self, engine):
        requests = [request(i, 400) for i in range(120)]
        batched = sample(engine, *requests)  # 48,000 tokens in flight, 16,384 in a step
        assert sample(engine, requests[-1])[0] == batched[-1]

    def test_ends_at_any_stop_id_and_keeps_it(self, engine):
        (whole,) = sample(engine, request(3))
        middle, later = whole.ids[5], whole.ids[10]
        (result,) = sample(engine, request(3, stop_token_ids=(later, middle)))
        n = whole.ids.index(middle) + 1
        assert result.finish_reason == "stop"
        assert (result.ids, result.logprobs) == (whole.ids[:n], whole.logprobs[:n])

    def test_only_the_requests_stop_ids_count(self, engine):
        # generation_config.json of this model names END; a request that does not goes on after it.
        results = sample(engine, *[request(i, max_tokens=100) for i in range(50)])
        assert any(END in result.ids[:-1] for result in results)
        assert all(result.finish_reason == "length" for result in results)

    def test_the_context_limit_clips_then_refuses(self, engine):
        result, last = sample(engine, request(0, CONTEXT - 4), request(0, CONTEXT - 1))
        assert (len(result.ids), result.finish_reason) == (4, "length")
        assert len(last.ids) == 1
        with pytest.raises(ContextLengthError, match="prompt of 512 tokens leaves no room in a context of 512"):
            sample(engine, request(0, CONTEXT))

    def test_an_id_outside_the_vocabulary_is_refused_and_nothing_else_suffers(self, engine):
        with pytest.raises(EngineError, match="ids outside the vocabulary of 272"):
            sample(engine, request(0, prompt_ids=(1, 10_000)))
        assert len(sample(engine, request(0))[0].ids) == 24

    def test_a_cancelled_request_is_gone(self, engine):
        async def cancel():
            task = asyncio.create_task(engine.generate(request(0, max_tokens=400)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        deadline = time.monotonic() + 60
        while engine._vllm.llm.get_num_unfinished_requests():
            assert time.monotonic() < deadline
            time.sleep(0.01)


class TestStart:
    def test_a_missing_folder_is_named(self):
        with pytest.raises(ConfigError, match="model.path=/nowhere is not a Hugging Face folder"):
            make_engine("/nowhere", config())

    def test_vllm_missing_says_how_to_install_it(self, folder, monkeypatch):
        monkeypatch.setattr(engine_lib.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            ConfigError, match=r"vLLM is not installed: run `make install`.*pip install 'rti-jax\[cpu\]'"
        ):
            make_engine(folder, config())

    def test_a_transfer_that_the_kind_cannot_have_is_refused(self):
        for kind, transfer in (("vllm", "nccl"), ("server", "ipc")):
            with pytest.raises(ValueError, match=f"engine.weight_transfer={transfer} is for engine.kind="):
                config(kind=kind, weight_transfer=transfer, urls=["http://a"])
        assert config(kind="server", weight_transfer="nccl", urls=["http://a"]).engine.weight_transfer == "nccl"

    def test_arguments_follow_the_config_and_the_users_win(self, folder):
        args = vllm_settings.arguments(folder, config(args={"max_num_seqs": 3, "seed": 5}), on_cpu=True)
        assert (args["max_model_len"], args["max_num_seqs"], args["seed"], args["dtype"]) == (512, 3, 5, "float32")
        assert args["enable_chunked_prefill"] is False
        assert args["kv_cache_memory_bytes"] == 2 * (128 * 512) * (
            2 * 2 * 2 * 32 * 4
        )  # K and V, 2 layers, 2 x 32, fp32
        args = vllm_settings.arguments(folder, config(memory_fraction=0.3), on_cpu=False)
        assert args["gpu_memory_utilization"] == 0.3
        assert "enforce_eager" not in args and "language_model_only" not in args

    def test_a_hybrid_keeps_no_prefixes_on_cpu_and_has_room_for_its_states(self, tmp_path):
        kinds = ["linear_attention", "full_attention"]
        text = dict(num_hidden_layers=2, layer_types=kinds, num_key_value_heads=2, head_dim=32, num_attention_heads=4)
        text |= dict(linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
        (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
        args = vllm_settings.arguments(tmp_path, config(), on_cpu=True)
        assert args["enable_prefix_caching"] is False  # vLLM would refuse to start
        assert args["language_model_only"] is True  # nor would it without a tokenizer for its image processor
        assert args["kv_cache_memory_bytes"] == 2 * 128 * (512 * (2 * 1 * 2 * 32 * 4) + 2 * 2 * 4 * 128 * 128 * 4)
        assert vllm_settings.arguments(tmp_path, config(), on_cpu=False)["enable_prefix_caching"] is True

    def test_the_context_is_never_above_the_models(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
        assert vllm_settings.arguments(tmp_path, config(), on_cpu=False)["max_model_len"] == 128

    @pytest.mark.slow
    def test_an_unknown_argument_is_named_with_the_nearest(self, folder):
        with pytest.raises(ConfigError, match="engine.args.max_num_seq: .*nearest: max_num_seqs"):
            make_engine(folder, config(args={"max_num_seq": 3}))
        assert "TORCH_COMPILE_DISABLE" not in os.environ


SCRIPT = """
import asyncio, os, signal, sys, time
sys.path.insert(0, {tests!r})
from test_engine import config, multiprocessing, request, sample
from rti_jax.engine import make_engine

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with "&"
    if {stage!r} == "starting":
        print("starting", flush=True)
    with make_engine({folder!r}, config()) as engine:
        try:  # before the line that the test waits for: its signal may come at once
            print("engine", *[p.pid for p in multiprocessing.active_children()], flush=True)
            time.sleep(120)
        except KeyboardInterrupt:
            print("sampled", len(sample(engine, request(0))[0].ids), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def trainer_script(folder, tmp_path, stage):
    """A trainer in a process group of its own, as a terminal gives it; nothing of it is left afterwards."""
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT.format(tests=str(pathlib.Path(__file__).parent), folder=str(folder), stage=stage))
    with (tmp_path / "errors").open("w") as errors:
        trainer = subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        )
    try:
        yield trainer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


def await_line(trainer, first: str) -> list[str]:
    """The words after `first` of the line that starts with it; lines of libraries before it are skipped."""
    seen = []
    for line in trainer.stdout:
        seen.append(line)
        if line.split()[:1] == [first]:
            return line.split()[1:]
    raise AssertionError(f"no line {first!r} but {seen}")


@pytest.mark.slow
class TestEnd:
    def test_ctrl_c_leaves_the_engine_to_the_trainer_and_a_killed_trainer_leaves_no_engine(self, folder, tmp_path):
        with trainer_script(folder, tmp_path, "running") as trainer:
            assert len(await_line(trainer, "engine")) == 1
            os.killpg(trainer.pid, signal.SIGINT)
            assert await_line(trainer, "sampled") == ["24"]
            assert trainer.wait(300) == -signal.SIGKILL
            wait_until_gone(trainer.pid)

    def test_vllms_reader_of_outputs_never_takes_the_end_for_a_death(self):
        loop, deaths = LoopThread(), []

        async def start():
            died = asyncio.get_running_loop().create_future()

            async def read():
                try:
                    await died
                except RuntimeError as error:
                    deaths.append(error)

            return died, asyncio.create_task(read())

        died, reader = loop.call(start())
        loop.call(asyncio.sleep(0))  # it waits for outputs

        def shutdown(timeout):
            died.get_loop().call_soon_threadsafe(lambda: died.done() or died.set_exception(RuntimeError()))

        vllm = engine_lib._VLLM()
        vllm.llm = types.SimpleNamespace(output_handler=reader, shutdown=shutdown)
        vllm.end()
        loop.call(asyncio.wait([reader]))
        loop.stop()
        assert reader.cancelled() and not deaths

    def test_ctrl_c_while_starting_leaves_nothing(self, folder, tmp_path):
        with trainer_script(folder, tmp_path, "starting") as trainer:
            await_line(trainer, "starting")
            deadline = time.monotonic() + 300
            while len(processes(trainer.pid)) < 2:
                assert time.monotonic() < deadline and trainer.poll() is None
                time.sleep(0.05)
            time.sleep(2)  # the engine's process is importing
            os.killpg(trainer.pid, signal.SIGINT)
            assert trainer.wait(300) != 0
            wait_until_gone(trainer.pid)

    def test_a_dead_engine_is_started_again_with_the_weights_of_now(self, engine, folder, tmp_path):
        """Last but one of the module: the shared engine has no restart left."""
        other = make_qwen3(tmp_path / "other", seed=5)
        assert asyncio.run(weight_sync.sync(engine, *hf.load(other), 5)) == 5
        requests = [request(i, max_tokens=300) for i in range(8)]
        wanted = sample(engine, *requests)
        assert len(asyncio.run(engine.checksums())) > 10
        engine.pop_metrics()

        async def die():
            running = [asyncio.create_task(engine.generate(r)) for r in requests]
            await engine.generate(request(99, max_tokens=1))  # its answer: the others are being sampled
            for process in engine._vllm.processes:
                process.kill()
            return await asyncio.gather(*running)

        assert asyncio.run(asyncio.wait_for(die(), 500)) == wanted
        assert {r.policy_version for r in wanted} == {5}
        metrics = engine.pop_metrics()
        assert metrics["engine/restarts"] == 1 and metrics["engine/retried_requests"] >= 1

    def test_an_engine_that_dies_too_often_says_so_and_close_ends_everything(self, engine):
        """Last of the module: it ends the shared engine."""

        async def die():
            running = asyncio.create_task(engine.generate(request(0, max_tokens=480)))
            await asyncio.sleep(0.05)
            for process in engine._vllm.processes:
                process.kill()
            with pytest.raises(EngineDiedError, match="process died .*; start the engine again"):
                await running
            with pytest.raises(EngineDiedError, match="process died"):
                await engine.generate(request(1))
            await engine.close()
            await engine.close()
            with pytest.raises(EngineDiedError, match="closed"):
                await engine.generate(request(1))

        asyncio.run(asyncio.wait_for(die(), 300))
        assert not [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]


def processes(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(group: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left := processes(group):
        assert time.monotonic() < deadline, f"processes {left} outlived their trainer"
        time.sleep(0.1)
