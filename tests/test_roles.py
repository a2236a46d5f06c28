"""Role prompts, their switches, and how verdicts are read."""

import asyncio
import math

import pytest

from envs.base import Evidence
from rti_jax.config import ConfigError
from rti_jax.engine_errors import CutOffError
from rti_jax.roles import ROLES, RolePrompts, Roles, last_json_object, read_validator, read_verifier
from rti_jax.rollout import TurnView
from rti_jax.types import RejectReason
from tests.fakes import CANARY, TOOLS, FakeEngine, call, small_config, tiny_chat

START = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the code of Ada?"})
EVIDENCE = Evidence(f"{CANARY}: the code is X4711.", ("X4711",))


def make_roles(answer, *, thinking=False, endpoints=None, **sections):
    chat = tiny_chat(thinking)
    config = small_config(**sections)
    engine = FakeEngine(chat, answer if callable(answer) else lambda request: answer)
    roles = Roles(chat, engine, config.sampling, config.rti, endpoints)
    view = TurnView("g/0/0", 0, chat.start(START, TOOLS), START, tuple(TOOLS))
    return roles, engine, view


class TestPrompts:
    @pytest.mark.parametrize("style", ["default", "compact"])
    def test_hold_what_each_role_knows(self, style):
        prompts = RolePrompts(style)
        validator = prompts.validator("EVIDENCE", "PROPOSAL", "RULES")
        corrector = prompts.corrector("EVIDENCE", "PROPOSAL", "BECAUSE", "RULES")
        verifier = prompts.verifier("EVIDENCE", "PROPOSAL", "REWRITE", "RULES")
        for text, words in (
            (validator, ["EVIDENCE", "PROPOSAL"]),
            (corrector, ["EVIDENCE", "PROPOSAL", "BECAUSE"]),
            (verifier, ["EVIDENCE", "PROPOSAL", "REWRITE"]),
        ):
            assert all(word in text for word in words)
            assert ("RULES" in text) == (style == "default")
        assert "REWRITE" not in validator + corrector

    def test_compact_ones_are_short(self):
        prompts = RolePrompts("compact")
        assert prompts.validator("E", "Y") == "VALIDATE\nE\nPROPOSED Y"
        assert prompts.corrector("E", "Y", "R") == "CORRECT CONCEAL\nE\nPROPOSED Y\nREASON R"
        assert prompts.verifier("E", "Y", "N") == "VERIFY LEAKS\nE\nOLD Y\nNEW N"

    def test_leak_suppression_off(self):
        on, off = (RolePrompts("default", conceal=c).corrector("E", "Y", "R") for c in (True, False))
        assert "The reference is private" in on and "only the reference holds" in on
        assert not any(
            word in off for word in ("The reference is private", "silently", "answer key", "only the reference")
        )
        assert "CONCEAL" not in RolePrompts("compact", conceal=False).corrector("E", "Y", "R")

    def test_leak_criterion_off(self):
        on, off = (RolePrompts("default", verify_leaks=v).verifier("E", "Y", "N") for v in (True, False))
        assert '"leak"' in on and "reveals privileged information" in on
        assert "leak" not in off and "privileged" not in off and '"implausible"' in off
        assert "LEAKS" not in RolePrompts("compact", verify_leaks=False).verifier("E", "Y", "N")

    def test_text_is_not_escaped_or_executed(self):
        text = RolePrompts("default").validator("{{ 7 * 7 }} <b>", '{% raw %} & "q"')
        assert "{{ 7 * 7 }} <b>" in text and '{% raw %} & "q"' in text

    def test_a_folder_of_templates(self, tmp_path):
        for role in ("validator", "corrector", "verifier"):
            (tmp_path / f"{role}.j2").write_text(f"{role}: {{{{ evidence }}}}")
        assert RolePrompts(str(tmp_path)).verifier("E", "Y", "N") == "verifier: E"

    @pytest.mark.parametrize(
        "files, words",
        [
            (None, "neither a built-in style \\(compact, default\\)"),
            ({}, "has no validator.j2"),
            ({"validator": "{% if %}", "corrector": "", "verifier": ""}, "validator.j2, line 1"),
            ({"validator": "{{ truth }}", "corrector": "", "verifier": ""}, "validator.j2: 'truth' is undefined"),
        ],
    )
    def test_mistakes(self, tmp_path, files, words):
        for role, text in (files or {}).items():
            (tmp_path / f"{role}.j2").write_text(text)
        with pytest.raises(ConfigError, match=words):
            RolePrompts(str(tmp_path) if files is not None else "no such style").validator("E", "Y")


class TestVerdicts:
    @pytest.mark.parametrize(
        "text, found",
        [
            ('{"a": 1}', {"a": 1}),
            ('First {"a": 1}, then {"b": {"c": 2}} done.', {"b": {"c": 2}}),
            ('```json\n{"a": "}{"}\n```', {"a": "}{"}),
            ('{"a": 1} {"b": ', {"a": 1}),
            ("no object { here }", None),
            ("", None),
            ('{"a":' * 5000, None),
            ('{"a": {"verdict": "accept"}, broken}', None),  # what a broken object holds is not the answer
            ('{"a": {"b": 1}, "c": ', None),
            ('{"a": "}", "b": {"c": 1}, "d": oops} {"e": 2}', {"e": 2}),
            ('{"said "x"}", {"b": 1}} {"e": 2}', {"e": 2}),
            ("the set {x: {y}} and {z}, so " + '{"a": 1}', {"a": 1}),
            ('{"a": "open', None),
            ('{"' + '\\"' * 50_000 + "\\", None),
            ('{"a": ' + "9" * 5000 + '} {"b": 1}', {"b": 1}),
        ],
    )
    def test_last_json_object(self, text, found):
        assert last_json_object(text) == found

    @pytest.mark.parametrize(
        "text, flagged, readable, reason",
        [
            ('{"expected": "look", "verdict": "valid"}', False, True, ""),
            ('{"expected": "look", "verdict": "invalid", "reason": "no look"}', True, True, "no look"),
            ('{"expected": {"name": "look"}, "verdict": "Invalid "}', True, True, '{"name": "look"}'),
            ('{"verdict": "invalid"}', True, True, ""),
            ('{"verdict": "perhaps"}', False, False, ""),
            ('{"verdict": true}', False, False, ""),
            ("invalid", False, False, ""),
            ("", False, False, ""),
        ],
    )
    def test_validator(self, text, flagged, readable, reason):
        verdict = read_validator(text)
        assert (verdict.flagged, verdict.readable, verdict.reason) == (flagged, readable, reason)

    @pytest.mark.parametrize(
        "text, rejected",
        [
            ('{"verdict": "accept"}', None),
            ('{"verdict": "reject", "reason": "leak"}', RejectReason.LEAK),
            ('{"verdict": "reject", "reason": "inconsistent"}', RejectReason.INCONSISTENT),
            ('{"verdict": "reject", "reason": "implausible"}', RejectReason.IMPLAUSIBLE),
            ('{"verdict": "reject", "reason": "gate"}', RejectReason.UNREADABLE),
            ('{"verdict": "reject"}', RejectReason.UNREADABLE),
            ("accept", RejectReason.UNREADABLE),
            ("", RejectReason.UNREADABLE),
        ],
    )
    def test_verifier(self, text, rejected):
        assert read_verifier(text) == rejected

    def test_without_the_leak_criterion_a_leak_is_no_reason(self):
        assert read_verifier('{"verdict": "reject", "reason": "leak"}', verify_leaks=False) is None
        assert read_verifier('{"verdict": "reject", "reason": "implausible"}', verify_leaks=False)


class TestPlayedByThePolicy:
    def test_requests(self):
        roles, engine, view = make_roles('{"verdict": "valid"}', rti={"roles": {"corrector": {"max_tokens": 50}}})
        asyncio.run(roles.validate(view, EVIDENCE, "", "Y", seed=5))
        asyncio.run(roles.correct(view, EVIDENCE, "", "Y", "R", seed=6))
        asyncio.run(roles.verify(view, EVIDENCE, "", "Y", "N", seed=7))
        seen = [(r.role, r.seed, r.temperature, r.max_tokens) for r in engine.requests]
        assert seen == [("validator", 5, 0.0, 200), ("corrector", 6, 1.0, 50), ("verifier", 7, 0.0, 200)]
        tail = roles.chat.generation_prompt
        for request in engine.requests:
            assert request.prompt_ids[: len(view.prompt_ids) - len(tail)] == view.prompt_ids[: -len(tail)]
            assert request.prompt_ids[-len(tail) :] == tail
            assert CANARY in roles.chat.decode(request.prompt_ids)

    def test_the_verdict_stands_after_the_thinking(self):
        answer = '<think>\nFirst {"verdict": "invalid"}?\n</think>\n\n{"verdict": "valid"}'
        roles, _, view = make_roles(answer, thinking=True)
        assert not asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 0)).flagged
        roles, _, view = make_roles('<think>\n{"verdict": "invalid"}', thinking=True)
        assert not asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 0)).readable

    def test_the_completion_is_the_turn(self):
        roles, engine, view = make_roles(call("look", name="Ada"))
        new = asyncio.run(roles.correct(view, EVIDENCE, "", "Y", "R", 0))
        assert new.response_ids == roles.chat.encode_text(call("look", name="Ada"))
        assert new.prompt_ids == engine.requests[0].prompt_ids and new.logprobs[0] == -0.01
        assert new.parsed.turn.tool_calls[0].arguments == {"name": "Ada"}

    def test_no_room_for_an_answer(self):
        roles, engine, view = make_roles("x")
        roles.sampling = roles.sampling.model_copy(update={"max_context": len(view.prompt_ids) + 10})
        assert not asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 0)).readable
        assert asyncio.run(roles.verify(view, EVIDENCE, "", "Y", "N", 0))[0] is RejectReason.UNREADABLE
        assert asyncio.run(roles.correct(view, EVIDENCE, "", "Y", "R", 0)).parsed.malformed
        assert engine.requests == []

    def test_usage(self):
        roles, engine, view = make_roles('{"verdict": "valid"}')
        asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 0))
        usage = roles.pop_usage()["validator"]
        assert (usage.calls, usage.tokens) == (1, len(roles.chat.encode_text('{"verdict": "valid"}')))
        assert usage.prompt_tokens == len(engine.requests[0].prompt_ids)
        assert roles.pop_usage()["validator"].calls == 0


class FakeEndpoint:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    async def complete(self, messages, tools=(), **sampling):
        self.calls.append((messages, tools, sampling))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestPlayedByAnotherModel:
    def test_a_judge(self):
        endpoint = FakeEndpoint('<think>{"verdict": "valid"}</think>{"verdict": "invalid", "reason": "x"}')
        sections = {"rti": {"roles": {"validator": {"endpoint": "http://judge", "temperature": 0.3, "max_tokens": 9}}}}
        roles, engine, view = make_roles("", endpoints={"validator": endpoint}, **sections)
        assert asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 4)).reason == "x"
        ((messages, tools, sampling),) = endpoint.calls
        assert [m["role"] for m in messages] == ["system", "user", "user"] and CANARY in messages[-1]["content"]
        assert tools == () and sampling == {"temperature": 0.3, "max_tokens": 9, "seed": 4}
        assert engine.requests == []

    @pytest.mark.parametrize("answer", ['<think>{"verdict": "invalid"}', CutOffError("cut off")])
    def test_an_answer_that_is_not_whole_is_unreadable(self, answer):
        sections = {"rti": {"roles": {r: {"endpoint": "http://judge"} for r in ROLES}}}
        endpoints = {r: FakeEndpoint(answer) for r in ROLES}
        roles, _, view = make_roles("", endpoints=endpoints, **sections)
        verdict = asyncio.run(roles.validate(view, EVIDENCE, "", "Y", 4))
        assert (verdict.flagged, verdict.readable) == (False, False)
        assert asyncio.run(roles.verify(view, EVIDENCE, "", "Y", "Z", 4))[0] is RejectReason.UNREADABLE
        assert asyncio.run(roles.correct(view, EVIDENCE, "", "Y", "R", 4)).parsed.malformed

    def test_a_corrector_is_encoded_once(self):
        endpoint = FakeEndpoint(call("look", name="Ada") + "<|im_end|>\nmore")
        sections = {"rti": {"roles": {"corrector": {"endpoint": "http://teacher"}}}}
        roles, engine, view = make_roles("", endpoints={"corrector": endpoint}, **sections)
        new = asyncio.run(roles.correct(view, EVIDENCE, "", "Y", "R", 0))
        assert new.response_ids == roles.chat.encode_text(call("look", name="Ada"))
        assert all(map(math.isnan, new.logprobs)) and new.parsed.malformed is None
        assert CANARY in roles.chat.decode(new.prompt_ids), "h_corr is the policy's own prompt, to be scored under"

    def test_an_endpoint_without_a_client(self):
        with pytest.raises(ConfigError, match="rti.roles.verifier.endpoint=http://x"):
            make_roles("", rti={"roles": {"verifier": {"endpoint": "http://x"}}})
