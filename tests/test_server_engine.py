"""vLLM servers as one engine: fake ones for what can go wrong, real ones for what must be equal."""

import asyncio
import contextlib
import dataclasses
import json
import socket

import pytest
from fake_server import TOKENS, FakeServer, answer
from test_engine import config, request
from tiny_models import make_qwen3

from models import hf
from rti_jax import server as server_lib
from rti_jax import server_engine
from rti_jax.config import ConfigError
from rti_jax.engine import make_engine
from rti_jax.engine_errors import EngineDiedError, EngineError, GarbageError, ServerError, StaleVersionError

LIMIT = 120  # seconds that no test needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
def fakes():
    servers = [FakeServer(), FakeServer()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_engine, "BACKOFF_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(server_engine, "PATIENCE", 1000.0)  # looks are frequent here, answers on a busy machine are not


@contextlib.contextmanager
def connected(folder, servers, **engine):
    defaults = {"probe_seconds": 0.05, "restart_timeout": 30.0}
    urls = [f"{s.url}/v1" for s in servers]
    engine = make_engine(folder, config(kind="server", urls=urls, **(defaults | engine)))
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def tensors(folder):
    return hf.to_hf(*hf.load(folder))


def update(engine, folder, version):
    return asyncio.run(asyncio.wait_for(engine.update_weights(tensors(folder), version), LIMIT))


async def until(condition):
    """Waits for what another thread brings about."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.005)


def together(*coroutines):
    async def gathered():
        return await asyncio.wait_for(asyncio.gather(*coroutines), LIMIT)

    return asyncio.run(gathered())


def sample(engine, *requests):
    return together(*[engine.generate(r) for r in requests])


def alive(engine):
    return sum(s.alive for s in engine._pool._servers)


class TestBalance:
    def test_sends_ids_and_settings_and_shares_the_requests(self, folder, fakes):
        with connected(folder, fakes) as engine:
            r = request(0, 508, temperature=0.6, stop_token_ids=(258, 256))
            for fake in fakes:
                fake.open.clear()

            async def four():
                running = [asyncio.create_task(engine.generate(r)) for _ in range(4)]
                await until(lambda: all(fake.running == 2 for fake in fakes))
                for fake in fakes:
                    fake.open.set()
                return await asyncio.gather(*running)

            (results,) = together(four())
            assert {(r.logprobs, r.finish_reason, r.policy_version) for r in results} == {((-0.5, -1.0), "length", 0)}
        assert [len(fake.samples) for fake in fakes] == [2, 2]
        sent = fakes[0].samples[0]
        assert sent["token_ids"] == list(r.prompt_ids)
        assert sent["sampling_params"] == {
            "max_tokens": 4, "temperature": 0.6, "seed": 1000, "stop_token_ids": [258, 256], "ignore_eos": True,
            "logprobs": 0, "detokenize": False, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip

    def test_the_turns_of_an_episode_stay_where_its_prefix_is(self, folder, fakes):
        prompts = [request(i, 200).prompt_ids for i in range(6)]
        with connected(folder, fakes) as engine:
            for _ in range(3):  # three turns of six episodes
                prompts = [
                    (*p, *r.ids, *range(70))
                    for p, r in zip(prompts, sample(engine, *[request(0, prompt_ids=p) for p in prompts]), strict=True)
                ]
            metrics = engine.pop_metrics()
        homes = [{tuple(body["token_ids"][:64]) for body in fake.samples} for fake in fakes]
        assert not homes[0] & homes[1] and len(homes[0]) == len(homes[1]) == 3
        assert 0.5 < metrics["engine/prefix_share"] < 0.9

    def test_a_prefix_does_not_outweigh_a_long_queue(self, folder, fakes):
        shared = request(1, 128)
        with connected(folder, fakes) as engine:
            sample(engine, shared)
            for fake in fakes:
                fake.open.clear()

            async def many():
                running = [asyncio.create_task(engine.generate(shared)) for _ in range(20)]
                await until(lambda: sum(fake.running for fake in fakes) == 20)
                assert min(fake.running for fake in fakes) >= 5
                for fake in fakes:
                    fake.open.set()
                await asyncio.gather(*running)

            together(many())

    def test_a_server_gets_no_more_than_it_runs_at_once(self, folder, fakes):
        fakes[0].limit = 2

        async def twelve(engine, fake, at_once):
            fake.open.clear()
            running = [asyncio.create_task(engine.generate(request(i))) for i in range(12)]
            await until(lambda: fake.running == at_once and len(engine._pool._queue) == 12 - at_once)
            fake.open.set()
            await asyncio.gather(*running)
            assert (fake.most, len(fake.samples)) == (at_once, 12)
            assert engine.pop_metrics()["engine/queued_seconds"] > 0

        with connected(folder, fakes[:1]) as engine:
            together(twelve(engine, fakes[0], 2))
        with connected(folder, fakes[1:], max_in_flight=3) as engine:
            together(twelve(engine, fakes[1], 3))

    def test_a_cancelled_request_leaves_no_trace(self, folder, fakes):
        fakes[0].limit = 1
        fakes[0].open.clear()
        with connected(folder, fakes[:1]) as engine:

            async def cancel():
                running, waiting = (asyncio.create_task(engine.generate(request(i))) for i in range(2))
                await until(lambda: fakes[0].running == 1 and engine._pool._queue)
                waiting.cancel()
                running.cancel()
                await asyncio.gather(running, waiting, return_exceptions=True)
                fakes[0].open.set()
                return await engine.generate(request(2))

            (result,) = together(cancel())
            assert len(result.ids) == 2
            assert [(s.running, s.work) for s in engine._pool._servers] == [(0, 0)]


class TestFaults:
    def test_a_killed_servers_requests_are_answered_by_another(self, folder, fakes):
        fakes[0].open.clear()
        with connected(folder, fakes) as engine:

            async def kill():
                running = [asyncio.create_task(engine.generate(request(i))) for i in range(8)]
                await until(lambda: fakes[0].running == 4)
                fakes[0].kill()
                return await asyncio.gather(*running)

            (results,) = together(kill())
            assert len(results) == 8 and len(fakes[1].samples) == 8
            metrics = engine.pop_metrics()
            assert metrics["engine/retried_requests"] == 4 and metrics["engine/failures"] == 1
            assert (metrics["engine/servers"], metrics["engine/servers_alive"]) == (2, 1)
            again = [body["sampling_params"]["seed"] for fake in fakes for body in fake.samples]
            assert sorted(set(again)) == sorted(1000 + i for i in range(8)) and len(again) == 12

    def test_a_server_that_comes_back_gets_the_weights_of_now_first(self, folder, fakes):
        with connected(folder, fakes) as engine:
            update(engine, folder, 3)
            fakes[0].kill()
            asyncio.run(until(lambda: alive(engine) == 1))
            assert sample(engine, request(0))[0].policy_version == 3
            fakes[0].revive()
            fakes[0].calls.clear()
            asyncio.run(until(lambda: alive(engine) == 2))
            paths = [path for path, _ in fakes[0].calls if path in ("/update_weights", TOKENS)]
            assert paths == ["/update_weights", TOKENS]  # then the trial
            assert fakes[0].version == fakes[1].version and fakes[0].version.endswith("-3")
            assert {r.ids[0] for r in sample(engine, *[request(i) for i in range(8)])} == {3}
            assert fakes[0].samples and fakes[1].samples

    def test_a_server_that_was_restarted_unseen_is_found_out_by_its_answer(self, folder, fakes):
        with connected(folder, fakes, probe_seconds=1000.0) as engine:
            update(engine, folder, 3)
            fakes[0].version = "default"  # as a supervisor's restart would leave it
            results = sample(engine, *[request(i) for i in range(8)])
            assert {(r.ids[0], r.policy_version) for r in results} == {(3, 3)}
            assert engine.pop_metrics()["engine/retried_requests"] >= 1
            asyncio.run(until(lambda: alive(engine) == 2))
            assert fakes[0].version.endswith("-3")

    def test_an_answer_of_two_versions_is_none(self, folder, fakes):
        spans = [{"version": "default", "start": 0, "end": 1}, {"version": "x-1", "start": 1, "end": 2}]
        content = [{"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -1.0}]
        fakes[0].overrides[TOKENS] = answer(token_ids=[1, 2], logprobs={"content": content}, weight_versions=spans)
        with pytest.raises(EngineDiedError, match="serves weights version default, x-1, not"):
            with connected(folder, fakes[:1]):
                pass

    def test_a_hanging_server_is_left(self, folder, fakes):
        fakes[0].open.clear()
        with connected(folder, fakes) as engine:
            engine._pool.config = engine._pool.config.model_copy(update={"request_timeout": 1.0})
            results = sample(engine, *[request(i) for i in range(4)])
            assert len(results) == 4
            metrics = engine.pop_metrics()
            assert metrics["engine/hung"] >= 1 and metrics["engine/retried_requests"] >= 2

    def test_a_server_that_does_not_answer_a_look_is_left(self, folder, fakes):
        with connected(folder, fakes) as engine:
            fakes[0].overrides["/health"] = (503, {})
            asyncio.run(until(lambda: alive(engine) == 1))
            fakes[0].overrides.clear()
            asyncio.run(until(lambda: alive(engine) == 2))

    @pytest.mark.parametrize(
        "garbage",
        ["<html>proxy</html>", {}, {"choices": []}, [1], (500, "oops"), answer(token_ids=[1])],
        ids=["html", "empty", "no choice", "list", "500", "half"],
    )
    def test_garbage_is_asked_elsewhere(self, folder, fakes, garbage):
        with connected(folder, fakes) as engine:
            fakes[0].overrides[TOKENS] = garbage
            results = sample(engine, *[request(i) for i in range(6)])
            assert [len(r.ids) for r in results] == [2] * 6
            assert len(fakes[1].samples) == 6
            metrics = engine.pop_metrics()
            assert metrics["engine/retried_requests"] >= 1
            assert bool(metrics["engine/garbage"]) is not (garbage == (500, "oops"))

    def test_a_busy_server_is_asked_again(self, folder, fakes, monkeypatch):
        with connected(folder, fakes[:1]) as engine:
            fakes[0].overrides[TOKENS] = (429, {"error": "too many"})

            async def later():
                running = asyncio.create_task(engine.generate(request(0)))
                await until(lambda: fakes[0].samples)
                fakes[0].overrides.clear()
                return await running

            (result,) = together(later())
            metrics = engine.pop_metrics()
            assert len(result.ids) == 2
            assert (metrics["engine/busy"], metrics["engine/failures"], metrics["engine/retried_requests"]) == (1, 0, 1)

    def test_a_refusal_is_one_line_and_no_fault_of_the_server(self, folder, fakes):
        with connected(folder, fakes) as engine:
            fakes[0].overrides[TOKENS] = fakes[1].overrides[TOKENS] = (400, {"error": "too\nlong"})
            with pytest.raises(EngineError, match=f"{TOKENS}: 400 .*too") as error:
                sample(engine, request(0))
            assert "\n" not in str(error.value) and not isinstance(error.value, ServerError)
            assert len(fakes[0].samples) + len(fakes[1].samples) == 1
            assert alive(engine) == 2

    def test_without_any_server_the_run_ends_after_a_while(self, folder, fakes):
        with connected(folder, fakes, restart_timeout=0.2) as engine:
            for fake in fakes:
                fake.kill()
            with pytest.raises(EngineDiedError, match=r"no vLLM server has served for 0.2 s; the last one: .*"):
                sample(engine, request(0))
            with pytest.raises(EngineDiedError, match="start the servers again"):
                update(engine, folder, 1)

    def test_requests_wait_while_there_is_none(self, folder, fakes):
        with connected(folder, fakes[:1]) as engine:
            fakes[0].kill()
            asyncio.run(until(lambda: not alive(engine)))

            async def wait():
                running = asyncio.create_task(engine.generate(request(0)))
                await until(lambda: engine._pool._queue)
                fakes[0].revive()
                return await running

            assert len(together(wait())[0].ids) == 2


class TestUpdates:
    def test_an_update_waits_for_running_requests_and_holds_new_ones(self, folder, fakes):
        for fake in fakes:
            fake.open.clear()

        async def all_of_it(engine):
            old = [asyncio.create_task(engine.generate(request(i))) for i in range(4)]
            await until(lambda: sum(fake.running for fake in fakes) == 4)
            updated = asyncio.create_task(engine.update_weights(tensors(folder), 7))
            await until(lambda: engine._pool._updating)
            new = [asyncio.create_task(engine.generate(request(i))) for i in range(4)]
            await until(lambda: len(engine._pool._queue) == 4)
            assert not any(path == "/start_weight_update" for fake in fakes for path, _ in fake.calls)
            for fake in fakes:
                fake.open.set()
            return await asyncio.gather(*old), await updated, await asyncio.gather(*new)

        with connected(folder, fakes, probe_seconds=1000.0) as engine:
            fakes[1].calls.clear()
            old, confirmed, new = together(all_of_it(engine))[0]
            assert [(r.policy_version, r.ids[0]) for r in old] == [(0, 0)] * 4
            assert [(r.policy_version, r.ids[0]) for r in new] == [(7, 7)] * 4
            assert (confirmed, engine.version) == (7, 7)
            with pytest.raises(StaleVersionError):
                update(engine, folder, 7)
            assert len(set(asyncio.run(engine.checksums()).values())) == 1
        control = [path for path, _ in fakes[1].calls if path not in (TOKENS, "/weight_info", "/weight_checker")]
        steps = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert control == [*steps, "/reset_prefix_cache", "/resume"]

    def test_a_server_that_fails_an_update_serves_no_more_until_it_has_the_weights(self, folder, fakes):
        fakes[1].overrides["/reset_prefix_cache"] = {"success": False}
        with connected(folder, fakes) as engine:
            assert update(engine, folder, 1) == 1
            assert alive(engine) == 1
            assert {r.ids[0] for r in sample(engine, *[request(i) for i in range(4)])} == {1}
            assert not fakes[1].samples
            fakes[1].overrides.clear()
            asyncio.run(until(lambda: alive(engine) == 2))
            assert fakes[1].version == fakes[0].version

    def test_an_update_that_no_server_takes_ends_the_run(self, folder, fakes):
        fakes[0].overrides["/update_weights"] = (500, {"error": "out of memory"})
        with connected(folder, fakes[:1], restart_timeout=0.2) as engine:
            with pytest.raises(EngineDiedError, match="no vLLM server has served.*out of memory"):
                update(engine, folder, 1)

    def test_a_new_trainer_starts_from_the_first_weights_and_goes_on_where_it_was(self, folder, fakes):
        with connected(folder, fakes) as engine:
            update(engine, folder, 40)
        with connected(folder, fakes) as engine:  # the run before was ended at step 40; its checkpoint is of step 38
            assert engine.version == 0 and sample(engine, request(0))[0].ids[0] == 0
            loaded = [body["update_info"]["path"] for path, body in fakes[0].calls if path == "/update_weights"]
            assert loaded[-1] == "" and len(loaded) == 2  # the server's own model folder
            assert update(engine, folder, 38) == 38
            assert sample(engine, request(0))[0].ids[0] == 38


class TestStart:
    def test_wrong_settings_are_named_with_the_flag(self, folder, fakes):
        fakes[0].overrides["/server_info"] = {
            "vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}, "weight_transfer_config": None}
        }
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"), connected(folder, fakes):
            pass
        fakes[0].overrides["/server_info"] = (404, {})
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"), connected(folder, fakes):
            pass
        fakes[0].overrides = {TOKENS: (403, {})}
        with pytest.raises(ConfigError, match="rti serve.*--enable-scale-out"), connected(folder, fakes):
            pass

    def test_an_absent_server_is_named(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineDiedError, match=f"server {url} cannot be reached"):
            make_engine(folder, config(kind="server", urls=[url]))

    def test_a_closed_engine_says_so(self, folder, fakes):
        with connected(folder, fakes) as engine:
            pass
        with pytest.raises(EngineDiedError, match="closed"):
            sample(engine, request(0))


class TestAnswers:
    RIGHT = json.dumps(
        answer(
            token_ids=[5, 7],
            finish_reason="stop",
            logprobs={"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 7, "logprob": 0.0}]},
            weight_versions=[{"version": "t-3", "start": 0, "end": 2}],
        )
    )

    def check(self, **changes):
        reply = json.loads(self.RIGHT)
        reply["choices"][0] |= changes
        r = dataclasses.replace(request(0), stop_token_ids=(7,))
        return server_lib.checked(reply, r, 2, 10, ("t-3",), 3, "http://x")

    def test_a_right_one(self):
        result = self.check()
        assert (result.ids, result.logprobs, result.finish_reason, result.policy_version) == (
            (5, 7),
            (-0.5, 0),
            "stop",
            3,
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"token_ids": [5, 10]},  # outside the vocabulary
            {"token_ids": [5]},  # fewer than the log-probabilities
            {"token_ids": [7, 5]},  # other than theirs
            {"token_ids": None},
            {
                "finish_reason": "stop",
                "token_ids": [7, 5],
                "logprobs": {"content": [{"token_id": 7, "logprob": -1}] * 2},
            },
            {"logprobs": {"content": [{"token_id": 5, "logprob": 0.7}, {"token_id": 7, "logprob": -1}]}},
            {"logprobs": {"content": [{"token_id": 5, "logprob": float("nan")}, {"token_id": 7, "logprob": -1}]}},
            {"logprobs": {"content": []}, "token_ids": []},
            {"weight_versions": None},
        ],
    )
    def test_wrong_ones_are_garbage(self, changes):
        with pytest.raises(GarbageError, match="http://x"):
            self.check(**changes)

    @pytest.mark.parametrize(
        "changes", [{"finish_reason": "abort"}, {"weight_versions": [{"version": "other-3"}]}, {"weight_versions": []}]
    )
    def test_aborted_and_other_weights_are_not_used(self, changes):
        with pytest.raises(ServerError):
            self.check(**changes)
