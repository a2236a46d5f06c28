"""Frozen models in the roles: their vocabulary, one engine a folder, and whose probabilities a correction has."""

import asyncio
import json
import math

import pytest
from tiny_models import byte_tokenizer

from rti_jax import frozen
from rti_jax.config import ConfigError
from rti_jax.intervention import intervene
from rti_jax.roles import Roles
from rti_jax.rollout import Player
from rti_jax.types import Author
from tests.fakes import FakeEngine, call, lookup_source, lookup_task, small_config, tiny_chat, tiny_tokenizer

WRONG, LOOK, RIGHT = call("answer", code="1"), call("look", name="Ada"), call("answer", code="X4711")
STRONG = {"model": "strong"}


def folder_of(path, tokenizer):
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(path)


class TestVocabulary:
    def test_the_policys_own_is_accepted(self, tmp_path):
        frozen.check_vocabulary(tiny_chat(), folder_of(tmp_path, tiny_tokenizer()), "rti.roles.corrector.model")

    def test_another_is_refused_with_the_key(self, tmp_path):
        with pytest.raises(
            ConfigError, match=r"^rti.roles.corrector.model=.* has another vocabulary .*13 of the policy"
        ):
            frozen.check_vocabulary(tiny_chat(), folder_of(tmp_path, byte_tokenizer()), "rti.roles.corrector.model")

    def test_no_model_there(self):
        with pytest.raises(ConfigError, match="k=/nowhere is not a Hugging Face folder"):
            frozen.check_vocabulary(tiny_chat(), "/nowhere", "k")


def test_folders_are_of_roles_without_an_endpoint():
    roles = {"validator": STRONG, "corrector": {"model": "name", "endpoint": "http://x"}, "verifier": STRONG}
    config = small_config(rti={"roles": roles})
    assert config.rti.role_folders == {"validator": "strong", "verifier": "strong"}
    assert config.frozen_folders == {"rti.roles.validator.model": "strong", "rti.roles.verifier.model": "strong"}
    assert not small_config(rti={"roles": roles, "enabled": False}).frozen_folders  # nobody would ask them
    luffy = small_config(loss={"baseline": "luffy", "teacher": {"path": "t"}}, rti={"roles": roles})
    assert luffy.frozen_folders == {"loss.teacher.path": "t"}


class Closing(FakeEngine):
    closed = 0

    async def close(self):
        Closing.closed += 1


def test_one_engine_a_folder_with_its_share_of_memory_is_closed_at_the_end(monkeypatch):
    started = []

    def start(folder, config):
        started.append((folder, config.engine.kind, config.engine.memory_fraction))
        if folder == "broken":
            raise ConfigError("no such folder")
        return Closing(tiny_chat(), lambda r: "x")

    monkeypatch.setattr(frozen, "make_engine", start)
    config = small_config(engine={"frozen_fraction": 0.15, "kind": "server", "urls": ["http://x"]})

    async def serve(folders):
        async with frozen.serving(folders, config) as engines:
            return engines

    engines = asyncio.run(serve({"a": "m1", "b": "m1", "c": "m2"}))
    assert started == [("m1", "vllm", 0.15), ("m2", "vllm", 0.15)] and Closing.closed == 2
    assert engines["a"] is engines["b"] is not engines["c"]
    assert asyncio.run(serve({})) == {}
    with pytest.raises(ConfigError):
        asyncio.run(serve({"a": "m1", "b": "broken"}))
    assert Closing.closed == 3  # the first of the two


class TestRoles:
    def test_each_role_asks_its_own_engine_and_the_turn_has_no_sampler(self):
        config = small_config(
            rollout={"group_size": 2}, rti={"prompts": "compact", "roles": {"corrector": STRONG, "verifier": STRONG}}
        )
        chat, task = tiny_chat(), lookup_task()
        weak = FakeEngine(chat, lambda r: WRONG if r.role == "policy" else '{"verdict": "invalid", "reason": "r"}')
        weak.version = 5
        shown = lambda r: '"code": "X4711"' in chat.decode(r.prompt_ids)  # noqa: E731
        strong = FakeEngine(
            chat, lambda r: '{"verdict": "accept"}' if r.role == "verifier" else RIGHT if shown(r) else LOOK
        )
        player = Player(lookup_source(), chat, weak, config)
        engines = {"corrector": strong, "verifier": strong}
        roles = Roles(chat, weak, config.sampling, config.rti, engines=engines)

        async def score(rows):
            return [[-0.2] * len(response) for _, response in rows]

        groups = asyncio.run(player.collect([task], step=0))
        (group,) = asyncio.run(intervene(groups, [task], player, roles, score, config, step=0))
        assert {r.role for r in weak.requests} == {"policy", "validator"}
        assert {r.role for r in strong.requests} == {"corrector", "verifier"}
        turns = group.attempts[0].trajectory.turns
        assert group.replaced and {t.author for t in turns} == {Author.CORRECTOR}
        assert {t.policy_version for t in turns} == {5}  # a member of its group, whoever wrote it
        assert all(math.isnan(x) for t in turns for x in t.sampler_logprobs)
        assert [t.response_ids for t in turns] == [chat.encode_text(LOOK), chat.encode_text(RIGHT)]
        usage = roles.pop_usage()
        assert usage["corrector"].tokens == sum(len(t.response_ids) for t in turns)

    def test_a_folder_that_nothing_serves_is_an_error(self):
        config = small_config(rti={"prompts": "compact", "roles": {"corrector": STRONG}})
        chat = tiny_chat()
        with pytest.raises(ConfigError, match="rti.roles.corrector.model=strong has no engine"):
            Roles(chat, FakeEngine(chat, lambda r: "x"), config.sampling, config.rti)
        without = config.rti.model_copy(update={"enabled": False})  # a run of GRPO under the same keys asks nobody
        Roles(chat, FakeEngine(chat, lambda r: "x"), config.sampling, without)
