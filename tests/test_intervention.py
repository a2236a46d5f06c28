"""Intervened rollouts step by step, their rejections and switches, scores, gate, replacement; no evidence gets out."""

import asyncio
import collections
import dataclasses
import math

import numpy as np
import pytest

from envs.base import AssistantTurn
from rti_jax import batching, intervention
from rti_jax.config import ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.intervention import intervene, replace, triggered
from rti_jax.intervention_metrics import statistics
from rti_jax.roles import Roles
from rti_jax.rollout import Player, Seat
from rti_jax.types import Author, Group, IntervenedRollout, RejectReason, Status, Trajectory, Turn
from tests.fakes import CANARY, FakeEngine, Lookup, call, lookup_source, lookup_task, small_config, tiny_chat

WRONG, LOOK, RIGHT = call("answer", code="1"), call("look", name="Ada"), call("answer", code="X4711")
VALID, INVALID = '{"verdict": "valid"}', '{"expected": "look", "verdict": "invalid", "reason": "the code is unknown"}'
ACCEPT = '{"verdict": "accept"}'


def shown(text):
    """Whether the environment has shown the code."""
    return '"code": "X4711"' in text


SCRIPT = {
    "policy": lambda text: WRONG,  # a policy that never succeeds by itself
    "validator": lambda text: INVALID,
    "corrector": lambda text: RIGHT if shown(text) else LOOK,
    "verifier": lambda text: ACCEPT,
}


class Run:
    """One group of a scripted policy, and what `intervene` makes of it.

    Args:
      script: answers by role, as functions of the prompt's text. sections: of the config.
    """

    def __init__(self, script=None, *, task=None, thinking=False, endpoints=None, **sections):
        self.chat = tiny_chat(thinking)
        self.config = small_config(**{"rollout": {"group_size": 4}, **sections})
        self.script = SCRIPT | (script or {})
        self.engine = FakeEngine(self.chat, self._answer)
        self.player = Player(lookup_source(), self.chat, self.engine, self.config)
        self.roles = Roles(self.chat, self.engine, self.config.sampling, self.config.rti, endpoints)
        self.task = task or lookup_task()
        self.scored = []
        self.logprobs = {False: -0.3, True: -0.1}  # under h, under h_corr

    def _answer(self, request):
        answer = self.script[request.role]
        arguments = (self.chat.decode(request.prompt_ids), request)
        text = answer(*arguments[: answer.__code__.co_argcount])
        return "<think>\nHm.\n</think>\n\n" + text if self.chat.thinking else text

    async def score(self, rows):
        self.scored.append(rows)
        return [np.full(len(r), self.logprobs[CANARY in self.chat.decode(p)], np.float32) for p, r in rows]

    def before(self):
        return asyncio.run(self.player.collect([self.task], step=3))

    def __call__(self, groups=None) -> Group:
        groups = groups or self.before()
        self.engine.requests.clear()
        after = intervene(groups, [self.task], self.player, self.roles, self.score, self.config, step=3)
        (self.group,) = asyncio.run(after)
        return self.group

    @property
    def rejections(self):
        return [p.rejected for a in self.group.attempts for i in a.interventions for p in i.proposals]


class TestIntervenedRollout:
    def test_a_corrected_success_replaces_one_failed_member(self):
        run = Run()
        group = run()
        (attempt,) = group.attempts
        new = attempt.trajectory
        assert (new.status, new.member, new.id) == (Status.SUCCESS, -1, "train/3/0/-1")
        assert sum(t is new for t in group.trajectories) == 1 and len(group.trajectories) == 4
        assert not group.replaced.success and group.replaced not in group.trajectories
        assert attempt.decision.admitted and attempt.decision.perplexities == pytest.approx([math.exp(0.3)] * 2)

    def test_the_completion_is_trained_token_for_token_under_the_visible_history(self):
        run = Run()
        turns = run().attempts[0].trajectory.turns
        y = run.chat.encode_text(WRONG)
        assert [t.response_ids for t in turns] == [run.chat.encode_text(LOOK), run.chat.encode_text(RIGHT)]
        assert [t.correction.original_ids for t in turns] == [y, y]
        policy = [r.prompt_ids for r in run.engine.requests if r.role == "policy"]
        assert [t.prompt_ids for t in turns] == policy
        assert {t.author for t in turns} == {Author.CORRECTOR}

    def test_each_turn_asks_validator_corrector_verifier_in_order(self):
        run = Run()
        run()
        assert [r.role for r in run.engine.requests] == ["policy", "validator", "corrector", "verifier"] * 2
        assert len({r.seed for r in run.engine.requests}) == 8

    def test_its_random_stream_is_its_own(self):
        run = Run()
        groups = run.before()
        sampled = {r.seed for r in run.engine.requests}
        run(groups)
        assert not sampled & {r.seed for r in run.engine.requests}

    def test_a_turn_judged_valid_is_played_as_it_is(self):
        run = Run({"validator": lambda text: INVALID if not shown(text) else VALID, "policy": wrong_until_shown})
        first, second = run().attempts[0].trajectory.turns
        assert first.correction and second.correction is None and run.group.replaced
        assert run.group.attempts[0].interventions[1].proposals == ()

    def test_an_unreadable_validator_counts_as_valid(self):
        run = Run({"validator": lambda text: "I would say invalid."})
        (attempt,) = run().attempts
        assert not attempt.interventions[0].flagged and not attempt.interventions[0].readable
        assert attempt.trajectory.status is Status.FAILURE and run.group.replaced is None
        assert statistics([run.group])["rti/validator_unreadable"] == 1

    def test_the_record_of_a_turn(self):
        run = Run()
        (record, _) = run().attempts[0].interventions
        assert (record.turn_id, record.flagged, record.reason) == ("train/3/0/-1/0", True, "the code is unknown")
        assert record.original_text == WRONG and record.accepted.text == LOOK
        assert "REASON the code is unknown" in run.chat.decode(record.accepted.prompt_ids)
        assert record.accepted.verifier_text == ACCEPT

    def test_thinking_is_part_of_the_replacement(self):
        run = Run(thinking=True)
        turns = run().attempts[0].trajectory.turns
        assert run.chat.decode(turns[0].response_ids).startswith("<think>\nHm.\n</think>\n\n<tool_call>")
        assert "NEW <think>\nHm." in run.engine.prompts("verifier")[0]


def wrong_until_shown(text):
    return RIGHT if shown(text) else WRONG


class TestRejections:
    @pytest.mark.parametrize(
        "script, reason",
        [
            ({"corrector": lambda text: "<tool_call>\n{\n</tool_call>"}, RejectReason.MALFORMED),
            ({"corrector": lambda text: ""}, RejectReason.MALFORMED),
            ({"corrector": lambda text: "word " * 100}, RejectReason.MALFORMED),
            ({"corrector": lambda text: WRONG}, RejectReason.UNCHANGED),
            ({"verifier": lambda text: '{"verdict": "reject", "reason": "leak"}'}, RejectReason.LEAK),
            ({"verifier": lambda text: '{"verdict": "reject", "reason": "inconsistent"}'}, RejectReason.INCONSISTENT),
            ({"verifier": lambda text: '{"verdict": "reject", "reason": "implausible"}'}, RejectReason.IMPLAUSIBLE),
            ({"verifier": lambda text: "fine by me"}, RejectReason.UNREADABLE),
            ({"corrector": lambda text: RIGHT}, RejectReason.LEAK_GUARD),
        ],
    )
    def test_is_counted_by_reason_and_the_original_turn_is_kept(self, script, reason):
        run = Run(script, rti={"prompts": "compact", "retries": 2})
        (attempt,) = run().attempts
        assert run.rejections == [reason] * 3
        assert attempt.trajectory.turns[0].correction is None and run.group.replaced is None
        assert run.chat.decode(attempt.trajectory.turns[0].response_ids) == WRONG + "<|im_end|>"
        counts = statistics([run.group])
        assert counts[f"rti/rejected_{reason.value}"] == counts["rti/proposals"] == 3
        assert counts["rti/accepted"] == 0 and counts["rti/leak_guard_found"] == 3 * (reason is RejectReason.LEAK_GUARD)

    def test_another_way_to_write_the_same_text_is_unchanged(self):
        run = Run({"policy": lambda text: "hello"})
        he, llo = run.chat.tokenizer.convert_tokens_to_ids(["he", "llo"])
        run.script["corrector"] = lambda text: (he, llo, run.chat.end_id)
        run()
        assert set(run.rejections) == {RejectReason.UNCHANGED}

    def test_a_rejected_correction_is_tried_again_with_another_seed(self):
        tries = []

        def corrector(text, request):
            tries.append(request)
            return RIGHT if len(tries) in (1, 3) or shown(text) else LOOK  # the first leaks the code

        run = Run({"corrector": corrector})
        run()
        assert run.rejections[:2] == [RejectReason.LEAK_GUARD, None]
        assert tries[0].prompt_ids == tries[1].prompt_ids and tries[0].seed != tries[1].seed
        assert run.group.replaced

    def test_without_retries(self):
        run = Run({"verifier": lambda text: "?"}, rti={"prompts": "compact", "retries": 0})
        run()
        assert run.rejections == [RejectReason.UNREADABLE]

    def test_a_correction_that_does_not_fit_the_context(self):
        class Endless:
            async def complete(self, messages, tools=(), **sampling):
                return "word " * 2000

        run = Run(
            endpoints={"corrector": Endless()},
            rti={"prompts": "compact", "roles": {"corrector": {"endpoint": "http://x"}}},
        )
        run()
        assert set(run.rejections) == {RejectReason.MALFORMED}


class TestSwitches:
    def test_without_post_check_there_is_no_verifier_and_no_guard(self):
        run = Run({"corrector": lambda text: RIGHT}, rti={"prompts": "compact", "post_check": False})
        run()
        assert run.engine.prompts("verifier") == [] and run.group.replaced
        assert [t.correction is not None for t in run.group.attempts[0].trajectory.turns] == [True]

    def test_without_the_guard_the_verifier_remains(self):
        run = Run({"corrector": lambda text: RIGHT}, rti={"prompts": "compact", "leak_guard": False})
        run()
        assert len(run.engine.prompts("verifier")) == 1 and run.group.replaced

    def test_leak_suppression_off_changes_the_corrector_alone(self):
        def prompts(conceal):
            run = Run(rti={"prompts": "default", "conceal": conceal})
            run()
            return {r: run.engine.prompts(r) for r in ("validator", "corrector", "verifier")}

        on, off = prompts(True), prompts(False)
        assert on["validator"] == off["validator"] and on["verifier"] == off["verifier"]
        assert "The reference is private" in on["corrector"][0] and "is private" not in off["corrector"][0]

    def test_leakage_allowed(self):
        rti = {"prompts": "compact", "conceal": False, "leak_guard": False, "verify_leaks": False}
        run = Run(
            {"corrector": lambda t: RIGHT, "verifier": lambda t: '{"verdict": "reject", "reason": "leak"}'}, rti=rti
        )
        run()
        assert run.group.replaced
        assert "LEAKS" not in run.engine.prompts("verifier")[0]

    def test_no_attempts(self):
        run = Run(rti={"prompts": "compact", "attempts": 0})
        groups = run.before()
        assert run(groups) is groups[0] and run.engine.requests == []


class TestTrigger:
    def member(self, i, status=Status.FAILURE):
        reward = {Status.SUCCESS: 1.0, Status.FAILURE: 0.0, Status.TRUNCATED: 0.0}.get(status)
        turn = Turn(f"g/{i}/0", (1, 2), (3,), (-0.1,), "stop", 0)
        return Trajectory(f"g/{i}", "g", i, "t", (turn,), status, reward)

    @pytest.mark.parametrize(
        "statuses, expected",
        [
            ([Status.FAILURE] * 3, True),
            ([Status.FAILURE, Status.TRUNCATED], True),
            ([Status.FAILURE, Status.FAILURE, Status.TIMEOUT], True),
            ([Status.FAILURE, Status.SUCCESS], False),
            ([Status.FAILURE, Status.TIMEOUT], False),
            ([Status.TIMEOUT] * 2, False),
        ],
    )
    def test_every_valid_member_failed_and_there_are_two(self, statuses, expected):
        members = tuple(self.member(i, s) for i, s in enumerate(statuses))
        assert triggered(Group("g", "t", members)) is expected

    def test_other_groups_are_not_touched(self):
        run = Run({"policy": wrong_until_shown, "validator": lambda text: INVALID})
        group = Group("g", "t", (self.member(0), self.member(1, Status.SUCCESS)))
        assert run([group]) is group and run.engine.requests == [] and run.scored == []

    @pytest.mark.parametrize("status", [Status.TIMEOUT, Status.SUCCESS])
    def test_the_replaced_member_is_a_valid_failed_one_drawn_uniformly(self, status):
        drawn = collections.Counter()
        for n in range(300):
            members = [self.member(0, status), self.member(1), self.member(2), self.member(3)]
            group = Group(f"g{n}", "t", tuple(dataclasses.replace(m, group_id=f"g{n}") for m in members))
            rollout = IntervenedRollout(dataclasses.replace(self.member(-1, Status.SUCCESS), group_id=f"g{n}"), ())
            after = replace(group, rollout, seed=0)
            assert after == replace(group, rollout, seed=0)
            assert sum(a is not b for a, b in zip(after.trajectories, group.trajectories, strict=True)) == 1
            drawn[after.replaced.member] += 1
        assert set(drawn) == {1, 2, 3} and min(drawn.values()) > 70  # 100 each, standard deviation 8

    def test_other_weights_are_refused(self):
        newer = dataclasses.replace(self.member(-1, Status.SUCCESS).turns[0], policy_version=1)
        rollout = IntervenedRollout(dataclasses.replace(self.member(-1, Status.SUCCESS), turns=(newer,)), ())
        with pytest.raises(ValueError, match="weights versions"):
            replace(Group("g", "t", (self.member(0), self.member(1))), rollout, seed=0)


class TestAttempts:
    def test_stop_at_the_first_admission(self):
        calls = []

        def verifier(text, request):
            calls.append(request)
            return ACCEPT if len(calls) > 4 else "?"  # the first two attempts get no correction past it

        run = Run({"verifier": verifier}, rti={"prompts": "compact", "attempts": 5, "retries": 1})
        group = run()
        assert [a.decision.admitted for a in group.attempts] == [False, False, True]
        assert [a.trajectory.member for a in group.attempts] == [-1, -2, -3]
        assert group.replaced and sum(t.member == -3 for t in group.trajectories) == 1

    def test_give_up(self):
        run = Run({"verifier": lambda text: "?"}, rti={"prompts": "compact", "attempts": 3})
        group = run()
        assert len(group.attempts) == 3 and group.replaced is None
        assert all(not t.success for t in group.trajectories)

    @pytest.mark.parametrize("accept", [False, True])
    def test_a_success_without_a_correction(self, accept):
        seat = Seat(0, 3, "train/3/0", -1)
        own = {seat.seed_of(i, "policy") for i in range(4)}
        policy = lambda text, request: (RIGHT if shown(text) else LOOK) if request.seed in own else WRONG  # noqa: E731
        rti = {"prompts": "compact", "accept_uncorrected": accept}
        run = Run({"policy": policy, "validator": lambda text: VALID}, rti=rti)
        group = run()
        assert (group.replaced is not None) is accept and run.scored == []
        counts = statistics([group])
        assert counts["rti/successes"] == counts["rti/successes_uncorrected"] == 1
        assert counts["rti/gate_admitted"] == 0 and counts["rti/replaced"] == accept

    @pytest.mark.parametrize("fault, status", [("judge", Status.JUDGE_ERROR), ("user", Status.USER_ERROR)])
    def test_an_error_is_no_attempt_at_the_policys_cost(self, fault, status):
        run = Run(rollout={"retries": 1, "group_size": 2})
        groups = run.before()
        run.task = lookup_task(fault=fault)
        group = run(groups)
        assert group.attempts[0].trajectory.status is status and group.replaced is None
        turns = group.attempts[0].trajectory.turns
        assert [i.turn_id for i in group.attempts[0].interventions] == [t.id for t in turns], "of the last try only"
        assert statistics([group])["rti/attempts_in_error"] == 1


class TestScoresAndGate:
    def test_both_vectors_come_from_the_scorer_in_one_call(self):
        run = Run()
        turns = run().attempts[0].trajectory.turns
        (rows,) = run.scored
        assert [r[0] for r in rows[::2]] == [t.prompt_ids for t in turns]
        assert [r[1] for r in rows] == [t.response_ids for t in turns for _ in range(2)]
        accepted = [i.accepted.prompt_ids for i in run.group.attempts[0].interventions]
        assert [r[0] for r in rows[1::2]] == accepted
        for turn in turns:
            assert turn.correction.rollout_logprobs == pytest.approx([-0.3] * len(turn.response_ids))
            assert turn.correction.corrector_logprobs == pytest.approx([-0.1] * len(turn.response_ids))

    def test_h_corr_is_the_accepted_attempts(self):
        tries = []

        def corrector(text, request):
            tries.append(request)
            return WRONG if len(tries) == 1 else RIGHT if shown(text) else LOOK

        run = Run({"corrector": corrector, "validator": lambda t: INVALID.replace("unknown", f"unknown {len(tries)}")})
        run()
        assert run.scored[0][1][0] == tries[1].prompt_ids and run.scored[0][3][0] == tries[2].prompt_ids

    def test_failed_rollouts_are_not_scored(self):
        run = Run({"corrector": lambda text: LOOK if not shown(text) else WRONG + " "})
        run()
        assert run.scored == [] and run.group.attempts[0].trajectory.corrected_turns

    @pytest.mark.parametrize(
        "delta, logprob, admitted",
        [(5.0, -0.3, True), (5.0, -1.7, False), (0.0, -0.3, False), (math.inf, -50.0, True), (5.0, math.nan, False)],
    )
    def test_gate(self, delta, logprob, admitted):
        run = Run(gate={"delta": delta})
        run.logprobs[False] = logprob
        group = run()
        assert group.attempts[0].decision.admitted is admitted and (group.replaced is not None) is admitted
        counts = statistics([group])
        assert (counts["rti/gate_admitted"], counts["rti/gate_rejected"]) == (admitted, not admitted)
        assert math.isnan(counts["rti/perplexity_admitted"]) is not admitted

    def test_gate_of_a_turn_rejects_that_correction(self):
        run = Run(gate={"scope": "turn", "delta": 5.0})
        run.logprobs[False] = -2.0
        (attempt,) = run().attempts
        assert run.rejections == [RejectReason.GATE] * 2 and attempt.trajectory.turns[0].correction is None

    def test_gate_of_a_turn_passes(self):
        run = Run(gate={"scope": "turn", "delta": 5.0})
        assert run().replaced and [len(rows) for rows in run.scored] == [1, 1, 4]


class TestEvidence:
    """A canary in the evidence reaches role prompts and `Intervention` records, and nothing else."""

    @pytest.fixture(params=[False, True], ids=["plain", "thinking"])
    def run(self, request):
        tries = []

        def corrector(text, req):
            tries.append(req)
            return WRONG if len(tries) == 1 else RIGHT if shown(text) else LOOK

        script = {
            "corrector": corrector,
            "validator": lambda text: INVALID.replace("unknown", f"in {CANARY}"),
            "verifier": lambda text: ACCEPT + f'{{"verdict": "accept", "note": "{CANARY}"}}',
        }
        run = Run(script, thinking=request.param)
        run()
        assert run.group.replaced and len(tries) == 3
        return run

    def test_reaches_the_roles(self, run):
        for role, n in (("validator", 2), ("corrector", 3), ("verifier", 2)):
            prompts = run.engine.prompts(role)
            assert len(prompts) == n and all(CANARY in p for p in prompts)

    def test_never_reaches_a_policy_prompt_or_a_turn(self, run):
        assert not any(CANARY in p for p in run.engine.prompts("policy"))
        for trajectory in run.group.trajectories:
            for turn in trajectory.turns:
                assert CANARY not in run.chat.decode(turn.prompt_ids + turn.response_ids)
                assert CANARY not in run.chat.decode(turn.correction.original_ids if turn.correction else ())
            assert CANARY not in repr(trajectory)

    def test_never_reaches_a_batch_row(self, run):
        for microbatch in batching.build([run.group], run.config).microbatches:
            for row in microbatch.tokens:
                assert CANARY not in run.chat.decode(row[row >= 0].tolist())

    def test_one_turns_evidence_is_not_in_the_next_turns_role_prompts_twice(self, run):
        """Role calls are not turns: the second turn's role prompts hold the evidence once, by their own message."""
        second = [p for p in run.engine.prompts("validator") if shown(p)]
        assert len(second) == 1 and second[0].count(CANARY) == 1

    def test_is_hidden_from_logs(self, run):
        environment = run.player.source.make()
        asyncio.run(environment.reset(run.task))
        assert CANARY not in repr(environment.evidence()) and CANARY not in f"{environment.evidence()}"


def test_statistics_count_what_happened():
    run = Run({"validator": lambda text: INVALID if not shown(text) else VALID, "policy": wrong_until_shown})
    counts = statistics([run()], run.roles.pop_usage())
    expected = {
        "groups_triggered": 1,
        "attempts": 1,
        "attempts_in_error": 0,
        "turns_validated": 2,
        "turns_flagged": 1,
        "proposals": 1,
        "accepted": 1,
        "successes": 1,
        "successes_uncorrected": 0,
        "gate_admitted": 1,
        "gate_rejected": 0,
        "replaced": 1,
        "validator_calls": 2,
        "corrector_calls": 1,
        "verifier_calls": 1,
    }
    assert {k: counts[f"rti/{k}"] for k in expected} == expected
    assert counts["rti/corrector_tokens"] == len(run.chat.encode_text(LOOK))
    assert counts["rti/perplexity_before_gate"] == pytest.approx(math.exp(0.3))
    assert all(f"rti/rejected_{r.value}" in counts for r in RejectReason)


def test_groups_run_at_once_and_attempts_in_turn():
    run = Run(rti={"prompts": "compact", "attempts": 2}, rollout={"group_size": 2, "concurrency": 50})
    tasks = [lookup_task(str(i)) for i in range(3)]
    groups = asyncio.run(run.player.collect(tasks, step=0))
    run.engine.requests.clear()
    after = asyncio.run(intervene(groups, tasks, run.player, run.roles, run.score, run.config, step=0))
    assert [r.role for r in run.engine.requests[:6]] == ["policy"] * 3 + ["validator"] * 3
    assert all(g.replaced for g in after) and len(run.scored) == 1, "one call of the scorer for a round of attempts"
    assert intervention.decide(after[0].replaced, run.config).admitted is False


class TestControls:
    """rti.control: roles that are not asked, and the evidence of another task."""

    def test_always_invalid_corrects_every_turn_unasked(self):
        run = Run(rti={"control": "always_invalid"})
        run()
        assert [r.role for r in run.engine.requests] == ["policy", "corrector", "verifier"] * 2
        assert run.group.replaced

    def test_never_invalid_leaves_the_policy_alone(self):
        run = Run(rti={"control": "never_invalid"})
        run()
        assert {r.role for r in run.engine.requests} == {"policy"}
        assert run.group.replaced is None

    def test_always_accept_does_not_ask_the_verifier_but_guards(self):
        run = Run(rti={"control": "always_accept"})
        run()
        assert "verifier" not in {r.role for r in run.engine.requests}
        assert run.group.replaced
        leaking = Run({"corrector": lambda text: RIGHT}, rti={"control": "always_accept"})
        leaking()
        assert set(leaking.rejections) == {RejectReason.LEAK_GUARD}

    def test_swapped_evidence_is_another_tasks(self):
        run = Run(rti={"control": "swapped_evidence"})
        tasks = [lookup_task("t"), lookup_task("u", code="Z0815")]
        groups = asyncio.run(run.player.collect(tasks, step=3))
        run.engine.requests.clear()
        asyncio.run(intervene(groups, tasks, run.player, run.roles, run.score, run.config, step=3))
        prompts = run.engine.prompts("validator")
        assert all(("answer Z0815" in p) != ("answer X4711" in p) for p in prompts)
        first = [p for p in prompts if "answer Z0815" in p]
        assert first and len(first) < len(prompts)

    def test_swapped_evidence_needs_two_tasks(self):
        with pytest.raises(ConfigError, match="two tasks"):
            Run(rti={"control": "swapped_evidence"})()


class Telling(Lookup):
    """Lookup that can tell which turns lose."""

    def expert(self):
        return AssistantTurn()

    def valid(self, turn):
        return all(c.arguments.get("code", "X4711") == "X4711" for c in turn.tool_calls)

    def reveals(self, turn):
        return "key" if "key" in turn.content else None


def test_truth_is_counted_where_the_environment_can_tell():
    run = Run({"corrector": lambda text: RIGHT if shown(text) else "By the key:\n" + LOOK})
    assert math.isnan(statistics([run()])["rti/validator_recall"])
    run.player = Player(EnvironmentSource(Telling, Telling.Config(), 4), run.chat, run.engine, run.config)
    found = statistics([run()])
    assert (found["rti/validator_recall"], found["rti/validator_precision"]) == (1.0, 1.0)
    assert found["rti/corrector_success"] == 0.5
    assert found["rti/proposals_revealing"] == found["rti/accepted_revealing"] == found["rti/admitted_revealing"] == 1
    assert found["rti/policy_tokens"] == 2 * len(run.chat.encode_text(WRONG))


def test_lengths_and_perplexities_by_the_gates_decision():
    run = Run()
    group = run()
    tokens = len(run.chat.encode_text(LOOK)) + len(run.chat.encode_text(RIGHT))
    found = statistics([group])
    assert (found["rti/turns_per_attempt"], found["rti/tokens_per_attempt"]) == (2, tokens)
    assert (found["rti/turns_per_admitted"], found["rti/corrected_turns_per_admitted"]) == (2, 2)
    assert found["rti/perplexity_before_gate_max"] == pytest.approx(math.exp(0.3))
    assert math.isnan(found["rti/perplexity_rejected"])
    strict = Run(gate={"delta": 1.2})
    found = statistics([strict()])
    assert found["rti/perplexity_rejected"] == pytest.approx(math.exp(0.3)) and found["rti/gate_rejected"] == 1
    assert math.isnan(found["rti/perplexity_admitted"]) and math.isnan(found["rti/turns_per_admitted"])


def test_the_validator_against_the_outcome_of_episodes_without_a_correction():
    def attempts(script):
        return Run({"verifier": lambda text: "no", **script})().attempts

    flagged_lost = attempts({})
    unflagged_lost = attempts({"validator": lambda text: VALID})
    group = Run()()
    all_of = dataclasses.replace(group, attempts=(*flagged_lost, *unflagged_lost, *group.attempts))
    found = statistics([all_of])
    # one failure was flagged, one was not; the corrected episode says nothing
    assert (found["rti/validator_precision_outcome"], found["rti/validator_recall_outcome"]) == (1.0, 0.5)
    won = dataclasses.replace(flagged_lost[0].trajectory, status=Status.SUCCESS, reward=1.0)
    wrong_flag = dataclasses.replace(flagged_lost[0], trajectory=won)
    found = statistics([dataclasses.replace(group, attempts=(*flagged_lost, wrong_flag))])
    assert (found["rti/validator_precision_outcome"], found["rti/validator_recall_outcome"]) == (0.5, 1.0)
