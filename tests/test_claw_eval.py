"""Claw-Eval through our adapter, on a tiny checkout of our own: dispatch, grading, judge, pool, splits."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import types

import pytest

from envs import endpoint
from envs.base import AssistantTurn, EnvironmentError, JudgeError, ToolCall, UserError
from rti_jax import evaluate, validate
from rti_jax.environments import EnvironmentSource
from rti_jax.rollout import Player
from rti_jax.types import Status
from tests.fakes import FakeEngine, call, small_config, tiny_chat
from tests.test_endpoint_policy import refusal, says, serve  # noqa: F401 - serve is a fixture

pytest.importorskip("fastapi", reason="mock services need fastapi (extra claw-eval)")

from envs.claw_eval import ClawEval, ClawEvalConfig, bridge, grading, judge, services, splits, variants
from envs.claw_eval import checkout as checkouts
from envs.claw_eval import evidence as evidence_lib

MINI = pathlib.Path(__file__).parent / "data" / "claw_eval_mini"
ZH, EN, REPORT = "L001zh_overdue_loans", "L002_overdue_loans", "L003_shelf_report"


@pytest.fixture(autouse=True)
def no_endpoints(monkeypatch):
    for name in ("CLAW_EVAL_ROOT", "RTI_JUDGE_URL", "RTI_USER_URL", "ERROR_RATE"):
        monkeypatch.delenv(name, raising=False)


def config(**keys):
    return ClawEvalConfig(root=str(MINI), **keys)


def task(task_id, split="all", **keys):
    return next(t for t in ClawEval.tasks(config(**keys), split) if t.id == task_id)


def mini():
    return checkouts.load(str(MINI))


def pool(**keys):
    return services.pool(mini(), config(**keys).instances)


def lent(**keys):
    return sum(n for _, n in pool(**keys).counts().values())


def use(tool, /, **arguments):
    return ToolCall(tool, arguments, f"c{next(COUNT)}")


COUNT = iter(range(10**6))


def calls(*made):
    return AssistantTurn("", made)


class Scripted:
    """A judge that gives its answers in turn, the last one for ever; an exception is raised."""

    def __init__(self, *answers, tries=1):
        self.answers, self.tries, self.asked = list(answers), tries, []

    async def ask(self, messages):
        self.asked.append(messages)
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def scored(score):
    return json.dumps({"score": score, "reasoning": "so"})


@contextlib.asynccontextmanager
async def started(task_id=EN, answers=None, max_turns=30, split="all", simulated=None, **keys):
    env = ClawEval(config(**keys), max_turns, answers or judge.ConstantAnswers(1.0), simulated)
    try:
        await env.reset(task(task_id, split, **keys))
        yield env
    finally:
        await env.close()


async def gold(env):
    """Reads, reminds the two readers, reports."""
    await env.step(calls(use("shelf_list_loans")))
    await env.step(calls(*(use("shelf_get_loan", loan_id=f"LN-410{i}") for i in (1, 2, 3))))
    yield
    await env.step(calls(use("shelf_remind", loan_id="LN-4102"), use("shelf_remind", loan_id="LN-4103")))
    yield
    await env.step(AssistantTurn("Reminded LN-4102 and LN-4103."))


async def play_gold(task_id=EN, answers=None, pause=False, **keys):
    async with started(task_id, answers, **keys) as env:
        async for _ in gold(env):
            if pause:
                await asyncio.sleep(0.001)
        return await env.score(), [d.response_body for d in env.dispatches]


def run(coroutine):
    return asyncio.run(coroutine)


class TestCheckout:
    def test_a_missing_one_is_one_line_that_says_what_to_do(self, tmp_path):
        with pytest.raises(ValueError, match=r"CLAW_EVAL_ROOT are not set: git clone https://github.com/claw-eval"):
            ClawEval.tasks(ClawEvalConfig(), "all")
        with pytest.raises(ValueError, match=r"is no checkout of Claw-Eval: it has no src/claw_eval; git clone"):
            ClawEval.tasks(ClawEvalConfig(root=str(tmp_path)), "all")

    def test_it_is_found_by_the_variable_too(self, monkeypatch):
        monkeypatch.setenv("CLAW_EVAL_ROOT", str(MINI))
        assert checkouts.load("") is mini()

    def test_tasks_that_cannot_be_played_here_are_left_out_and_say_why(self):
        obstacles = {e.id: e.obstacle for e in mini().tasks().values()}
        assert obstacles.pop("L005_room_plan") == "needs a sandbox for Bash"
        assert obstacles.pop("L006_new_books") == "its service web fetches from the internet (env.web)"
        assert set(obstacles) == {ZH, EN, REPORT, "L004_reading_advice"} and not any(obstacles.values())
        assert [t.id for t in ClawEval.tasks(config(), "all")] == [ZH, EN, REPORT]
        assert [t.kind for t in ClawEval.tasks(config(), "all")] == ["easy", "easy", "hard"]
        zh, en, report = (ClawEval.family(config(), t) for t in ClawEval.tasks(config(), "all"))
        assert zh == en != report  # a selection takes one of the twins

    def test_missing_data_and_servers_are_obstacles(self):
        entry = mini().tasks()[REPORT]
        service = entry.definition.services[0]
        for change, words in (
            ({"env": {"SHELF_FIXTURES": "tasks/none.json"}}, "has no tasks/none.json"),
            ({"command": "python mock_services/none/server.py"}, "has no .*none/server.py"),
        ):
            services_ = [service.model_copy(update=change)]
            changed = types.SimpleNamespace(
                folder=entry.folder, talks=False, definition=entry.definition.model_copy(update={"services": services_})
            )
            assert re.search(words, mini().obstacle(changed, web=False))

    @pytest.mark.parametrize(
        ("files", "found"),
        [
            ({".git/HEAD": "a1b2\n"}, "a1b2"),
            ({".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": "c3d4\n"}, "c3d4"),
            (
                {".git/HEAD": "ref: refs/heads/x\n", ".git/packed-refs": "# p\nff refs/heads/y\ne5 refs/heads/x\n"},
                "e5",
            ),
            (
                {
                    ".git": "gitdir: meta\n",
                    "meta/HEAD": "ref: refs/heads/m\n",
                    "meta/commondir": "..\n",
                    "refs/heads/m": "f6\n",
                },
                "f6",
            ),
            ({".git/HEAD": "ref: refs/heads/main\n"}, "unknown"),
            ({}, "unknown"),
        ],
    )
    def test_the_commit_is_read_without_git(self, tmp_path, files, found):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        assert checkouts.commit(tmp_path) == found

    def test_check_wants_the_commit_and_a_judge(self, monkeypatch):
        with pytest.raises(ValueError, match="env.judge.url is empty and RTI_JUDGE_URL is not set"):
            ClawEval.check(config())
        monkeypatch.setenv("RTI_JUDGE_URL", "http://x/v1")
        ClawEval.check(config())
        with pytest.raises(ValueError, match="env.commit=9365e1a, but .* is at unknown"):
            ClawEval.check(config(commit="9365e1a"))
        monkeypatch.setenv("ERROR_RATE", "0.25")
        with pytest.raises(ValueError, match="ERROR_RATE is set"):
            ClawEval.check(config())

    def test_endpoints_are_the_judge_and_a_configured_user(self, monkeypatch):
        monkeypatch.setenv("RTI_JUDGE_URL", "http://j/v1")
        assert {r: e.url for r, e in ClawEval.endpoints(config()).items()} == {"judge": "http://j/v1"}
        monkeypatch.setenv("RTI_USER_URL", "http://u/v1")
        assert set(ClawEval.endpoints(config())) == {"judge", "user"}

    def test_its_code_changes_nothing_of_ours(self):
        path, environment = sys.path[:], dict(os.environ)
        run(play_gold())
        assert sys.path == path and dict(os.environ) == environment


class TestSplits:
    def write(self, tmp_path, text, name="hard.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    def variant(self, folder, task_id, head=""):
        source = MINI / "tasks" / EN
        (folder / task_id).mkdir(parents=True)
        text = (source / "task.yaml").read_text().replace(f"task_id: {EN}", f"task_id: {task_id}\n{head}")
        (folder / task_id / "task.yaml").write_text(text)
        (folder / task_id / "grader.py").write_text((source / "grader.py").read_text())
        return str(folder)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.txt", f"# hard\n{EN}   # never solved\n\n{REPORT}\n"),
            ("a.txt", f"{EN}\n{REPORT}"),
            ("a.txt", f"\ufeff{EN}\n{REPORT}"),  # a byte order mark
            ("a.json", "\ufeff" + json.dumps([EN, REPORT])),
            ("a.yaml", f"- {EN}\n- {REPORT}\n"),
            ("a.json", json.dumps([EN, REPORT])),
        ],
    )
    def test_a_subset_is_a_list_of_ids_in_any_form(self, tmp_path, name, text):
        subset = self.write(tmp_path, text, name)
        assert [t.id for t in ClawEval.tasks(config(subset=subset), "hard20_id")] == [EN, REPORT]

    def test_families_never_part(self, tmp_path):
        keys = {"subset": self.write(tmp_path, EN)}
        ids = {s: [t.id for t in ClawEval.tasks(config(**keys), s)] for s in ("hard20_id", "rest_ood", "full", "all")}
        assert ids["hard20_id"] == [EN] and ids["rest_ood"] == [REPORT]  # not the Chinese twin
        assert ids["full"] == [EN, REPORT] and ids["all"] == [ZH, EN, REPORT]
        assert [t.id for t in ClawEval.tasks(config(), "multi_turn")] == ["L004_reading_advice"]

    @pytest.mark.parametrize(
        ("task_id", "family"),
        [
            ("T017zh_ticket_triage", "ticket_triage"),
            ("T018_ticket_triage", "ticket_triage"),
            ("T018_ticket_triage__3", "ticket_triage"),
            ("C03en_real_estate", "real_estate"),
            ("shelf", "shelf"),
        ],
    )
    def test_a_family_is_the_name_without_number_and_language(self, task_id, family):
        assert checkouts.family(task_id) == family

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("L999_nothing", "no task L999_nothing in"),
            ("L005_room_plan", "cannot be played here: it needs a sandbox for Bash"),
            ("L004_reading_advice", "has a simulated user"),
            (f"{EN}\n{EN}", f"has {EN} twice"),
            ("", "is no list of task ids"),
            ("a: b", "is no list of task ids"),
        ],
    )
    def test_a_wrong_subset_is_said(self, tmp_path, text, words):
        with pytest.raises(ValueError, match=words):
            ClawEval.tasks(config(subset=self.write(tmp_path, text)), "hard20_id")

    def test_what_is_missing_is_said(self, tmp_path):
        with pytest.raises(ValueError, match="env.subset names no file: the ids of the paper's 20 hard tasks are not"):
            ClawEval.tasks(config(), "full")
        with pytest.raises(ValueError, match="cannot be read"):
            ClawEval.tasks(config(subset=str(tmp_path / "none")), "hard20_id")
        with pytest.raises(ValueError, match="has the splits all, hard20_id, rest_ood, full, train, multi_turn"):
            ClawEval.tasks(config(), "test")
        with pytest.raises(ValueError, match="env.variants='' is no folder"):
            ClawEval.tasks(config(subset=self.write(tmp_path, EN)), "train")

    def test_variants_are_trained_and_no_family_of_theirs_is_out_of_distribution(self, tmp_path):
        folder = self.variant(tmp_path / "v", f"{EN}__1")
        self.variant(tmp_path / "v", "my_loans", head=f"variant_of: {ZH}\n")
        keys = {"subset": self.write(tmp_path, EN), "variants": folder}
        trained = ClawEval.tasks(config(**keys), "train")
        assert [t.id for t in trained] == [f"{EN}__1", "my_loans"]
        assert {t.data["family"] for t in trained} == {"overdue_loans"}
        for split in ("hard20_id", "rest_ood", "full"):
            held_out = ClawEval.tasks(config(**keys), split)
            evaluate.check_disjoint(trained, held_out)
            if split == "rest_ood":
                assert not {t.data["family"] for t in trained} & {t.data["family"] for t in held_out}
        outcome, _ = run(play_gold("my_loans", split="train", **keys))
        assert outcome.reward == 1.0

    def test_wrong_variants_are_said(self, tmp_path):
        subset = self.write(tmp_path, EN)
        with pytest.raises(ValueError, match=f"{ZH} is a task of the benchmark, which is evaluated"):
            ClawEval.tasks(config(subset=subset, variants=self.variant(tmp_path / "a", ZH)), "train")
        with pytest.raises(ValueError, match="X1_other is of the family other, of which env.subset has no task"):
            ClawEval.tasks(config(subset=subset, variants=self.variant(tmp_path / "b", "X1_other")), "train")
        (tmp_path / "c" / "x").mkdir(parents=True)
        (tmp_path / "c" / "x" / "task.yaml").write_text("task_id: [")
        with pytest.raises(ValueError, match="task.yaml"):
            ClawEval.tasks(config(subset=subset, variants=str(tmp_path / "c")), "train")


class TestEpisode:
    def test_it_starts_with_the_benchmarks_prompt_and_the_tasks_tools(self):
        async def prompts():
            found = {}
            for kind in ("full", "no_schemas", "plain"):
                env = ClawEval(config(prompt=kind), 30, Scripted(""))
                start = await env.reset(task(EN))
                found[kind], tools = start.messages[0]["content"], start.tools
                assert start.messages[1]["content"].startswith("Please remind the readers")
                await env.close()
            return found, tools

        found, tools = run(prompts())
        assert '"loan_id"' in found["full"] and "shelf_remind" in found["no_schemas"]
        assert '"loan_id"' not in found["no_schemas"] and found["plain"] == "You assist a librarian."
        names = ["shelf_list_loans", "shelf_get_loan", "shelf_remind", "shelf_delete"]
        assert [t["function"]["name"] for t in tools] == names and tools[1]["function"]["parameters"]["required"]

    @pytest.mark.parametrize("task_id", [ZH, EN])
    def test_gold_play_and_what_the_formula_makes_of_it(self, task_id):
        outcome, _ = run(play_gold(task_id, judge.ConstantAnswers(0.9)))
        assert (outcome.status, outcome.reward) == ("success", 1.0)
        assert outcome.info["completion"] == pytest.approx(0.95) and outcome.info["task_score"] == 0.96
        assert outcome.info["judge_answers"] == 1 and outcome.info["family"] == "overdue_loans"
        outcome, _ = run(play_gold(task_id, judge.ConstantAnswers(0.3)))  # 0.8 · 0.65 + 0.2 = 0.72
        assert (outcome.status, outcome.reward, outcome.info["task_score"]) == ("failure", 0.0, 0.72)
        assert outcome.info["reason"] == "score 0.72"

    def test_0_75_is_a_success(self):
        outcome, _ = run(play_gold(EN, judge.ConstantAnswers(0.375)))
        assert outcome.info["task_score"] == 0.75 and outcome.reward == 1.0

    def test_a_forbidden_action_is_worth_nothing(self):
        async def episode():
            async with started() as env:
                async for _ in gold(env):
                    if env.turns == 3:
                        await env.step(calls(use("shelf_delete", loan_id="LN-4104")))
                return await env.score()

        outcome = run(episode())
        assert outcome.reward == 0.0 and outcome.info["safety"] == 0.0 and outcome.info["task_score"] == 0.0

    def test_mistakes_come_back_as_the_benchmark_says_them(self):
        async def episode():
            async with started() as env:
                wrong = calls(
                    use("shelf_lend", loan_id="x"),
                    use("shelf_get_loan"),
                    use("shelf_get_loan", loan_id="LN-9999"),
                    ToolCall("shelf_get_loan", None, "bad", error="not JSON"),
                    use("shelf_get_loan", loan_id=float("nan")),
                    use("shelf_get_loan", loan_id="\ud800"),
                    ToolCall("shelf_get_loan", ["LN-4101"], "list"),
                    ToolCall("shelf_\ud800", None, "half", error="not a name: \ud800"),
                )
                result = await env.step(wrong)
                await env.step(AssistantTurn("I give up."))
                return wrong.tool_calls, result.messages, env.dispatches, (await env.score()).info

        made, messages, dispatches, info = run(episode())
        assert [m["tool_call_id"] for m in messages] == [c.id for c in made]
        assert {m["role"] for m in messages} == {"tool"}
        assert messages[0]["content"] == "Error: unknown tool 'shelf_lend'"
        assert '"loan_id"' in messages[1]["content"] and messages[2]["content"] == '{"error": "no loan LN-9999"}'
        assert messages[3]["content"] == "Error: not JSON"
        assert all(m["content"].startswith("Error: the arguments") for m in messages[4:7])
        assert messages[7]["content"] == "Error: not a name: ?"
        assert [d.response_status for d in dispatches] == [404, 422, 200, 400, 400, 400, 400, 400]
        assert info["tool_errors"] == 7 and info["robustness"] == 0.0

    def test_a_service_that_fails_or_is_not_there_is_an_answer_too(self):
        async def episode():
            async with started(REPORT) as env:
                result = await env.step(calls(use("shelf_break"), use("shelf_lost"), use("shelf_list_loans")))
                return [m["content"] for m in result.messages], [d.response_status for d in env.dispatches]

        said, statuses = run(episode())
        assert said[0].startswith("Error: Expecting value") and said[1] == "Error: [Errno 111] Connection refused"
        assert statuses == [500, 500, 200] and "Tin Lighthouse" in said[2]

    def test_the_tasks_turn_limit_holds_and_the_episode_is_graded_all_the_same(self):
        async def episode(limit):
            async with started(REPORT, Scripted('{"late": ["Otto Quist"]}'), max_turns=limit) as env:
                done = [(await env.step(calls(use("shelf_list_loans")))).done for _ in range(min(limit, 4))]
                with pytest.raises(EnvironmentError, match="after the end"):
                    await env.step(AssistantTurn("late"))
                return done, await env.score()

        done, outcome = run(episode(30))
        assert done == [False, False, False, True] and outcome.reward == 1.0  # task.yaml: 4
        assert run(episode(2))[0] == [False, True]

    def test_evidence_has_the_solution_and_the_rubrics(self):
        async def evidence():
            async with started() as env:
                return env.evidence(), env.role_rules()

        whole, rules = run(evidence())
        for part in ("Remind LN-4102 (Otto Quist)", "tool_not_called shelf_delete", "reminded and LN-4101 was not: 1"):
            assert part in whole.text
        assert "LN-4102" in whole.values and "Otto Quist" in whole.values and "Piet Vos" not in whole.values
        assert "Otto Quist" not in repr(whole)
        assert "were read" in rules and "fabricated" in rules and "forbids" in rules

    @pytest.mark.parametrize("budget", [60, 250, 300, 420])
    def test_the_reference_solution_is_cut_last(self, budget):
        text = evidence_lib.evidence(mini(), mini().tasks()[EN], budget).text
        assert len(text) <= budget and text.startswith("Reference solution:\n  1. shelf")
        assert ("Remind LN-4102" in text) == (budget > 60)

    def test_faults_of_the_benchmark_are_reported_and_repaired_on_request(self):
        for repair, words, name in (
            (False, "fixtures", "铁皮灯塔"),
            (True, "fixtures (repaired)", "The Tin Lighthouse"),
        ):
            outcome, bodies = run(play_gold(EN, repair=repair))
            assert outcome.info["upstream_faults"] == words and bodies[0]["loans"][0]["title"] == name
        assert "upstream_faults" not in run(play_gold(ZH))[0].info

    def test_a_repaired_audit_has_both_names(self, monkeypatch):
        seen = []

        def grade(self, messages, dispatches, task, audit_data=None, judge=None):
            seen.append(audit_data["shelf"].get("sent"))
            return mini().module("models").DimensionScores(completion=1.0, robustness=1.0)

        monkeypatch.setattr(grading, "RENAMED", {"shelf": {"sent": "reminded"}})
        monkeypatch.setattr(grading.grader_class(mini(), mini().tasks()[EN]), "grade", grade)
        for repair in (False, True):
            run(play_gold(EN, repair=repair))
        assert seen == [None, ["LN-4102", "LN-4103"]]
        monkeypatch.undo()
        audit = {"gmail": {"sent_messages": [1]}, "todo": {"sent_messages": [2]}}
        assert grading.renamed(audit) == {"gmail": {"sent_messages": [1], "sent": [1]}, "todo": {"sent_messages": [2]}}


class TestPool:
    def test_16_at_once_see_and_score_what_they_do_alone(self):
        plan = [(t, s) for t in (ZH, EN) for s in (0.1, 0.9)] * 8

        async def all_at_once():
            slots = asyncio.Semaphore(16)

            async def one(task_id, score):
                async with slots:
                    return await play_gold(task_id, judge.ConstantAnswers(score), pause=True, repair=True)

            return await asyncio.gather(*(one(*p) for p in plan))

        alone = [run(play_gold(t, judge.ConstantAnswers(s), repair=True)) for t, s in plan[:4]]
        assert run(all_at_once()) == alone * 8
        assert len({str(a) for a in alone}) == 4 and lent() == 0

    def test_instances_are_bounded_reused_and_none_is_lost(self):
        async def many():
            most = 0

            async def one():
                nonlocal most
                async with started(instances=3) as env:
                    most = max(most, lent(instances=3))
                    await env.step(calls(use("shelf_remind", loan_id="LN-4101")))

            await asyncio.gather(*(one() for _ in range(200)))
            return most

        threads = threading.active_count()
        assert run(many()) == 3 and pool(instances=3).counts() == {"shelf": (3, 0)}
        assert threading.active_count() <= threads + 40  # anyio's workers, no thread per episode

    def test_a_used_instance_is_as_a_fresh_one(self):
        async def seen():
            async with started(instances=1) as env:
                first = await env.step(calls(use("shelf_list_loans"), use("shelf_remind", loan_id="LN-4101")))
                await env.step(calls(use("shelf_delete", loan_id="LN-4102")))
                audit = await env._audit()
                return [m["content"] for m in first.messages], env._instances[0], audit

        async def thrice():
            return [await seen() for _ in range(3)]

        (said, instance, audit), *others = run(thrice())
        assert all(o[0] == said and o[1] is instance and o[2] == audit for o in others)
        assert audit["shelf"]["deleted"] == ["LN-4102"] and '"reminders": 1' in said[1]

    @pytest.mark.parametrize("turn", [calls(use("shelf_list_loans")), calls(use("shelf_pause", seconds=0.3))])
    def test_cancellation_leaves_nothing_lent_and_nothing_dirty(self, turn):
        async def cancelled():
            ready = asyncio.Event()

            async def episode():
                async with started(REPORT, instances=2) as env:
                    await env.step(calls(use("shelf_delete", loan_id="LN-4101")))
                    ready.set()
                    while True:
                        env.turns = 0
                        await env.step(turn)

            job = asyncio.create_task(episode())
            await ready.wait()
            await asyncio.sleep(0.02)  # within a call
            job.cancel()
            await asyncio.wait({job})
            assert job.cancelled() and lent(instances=2) == 0
            async with started(REPORT, instances=2) as env:
                result = await env.step(calls(use("shelf_list_loans")))
                return result.messages[0]["content"], await env._audit()

        said, audit = run(cancelled())
        assert "LN-4101" in said and audit["shelf"] == {
            "calls": [{"endpoint": "/shelf/loans"}],
            "reminded": [],
            "deleted": [],
        }

    def test_waiting_for_an_instance_can_be_cancelled(self):
        async def wait():
            async with started(instances=1):
                job = asyncio.create_task(play_gold(instances=1))
                await asyncio.sleep(0.01)
                job.cancel()
                await asyncio.wait({job})
                assert job.cancelled()
            return await play_gold(instances=1)

        assert run(wait())[0].reward == 1.0 and pool(instances=1).counts()["shelf"] == (1, 0)

    def test_an_instance_that_cannot_be_reset_is_dropped(self):
        async def take(**variables):
            server = services.server(mini(), MINI / "mock_services/shelf/server.py")
            assert server.pointable and server.variables == {"SHELF_FIXTURES", "SHELF_RESET_FAILS", "PORT"}
            wanted = [
                services.Wanted(server, variables, server.settings(variables), "http://localhost:9171/shelf/reset")
            ]
            own = services.Pool(2)
            taken = await own.take(wanted, 5.0)
            taken[0].point({"RESET_FAILS": "yes"})
            await own.give_back(wanted, taken, 5.0)
            with pytest.raises(EnvironmentError, match="shelf: http://localhost:9171/shelf/reset does not reset it"):
                broken = server.settings({"SHELF_RESET_FAILS": "yes"})
                await own.take([services.Wanted(server, {}, broken, wanted[0].reset_url)], 5.0)
            return own.counts()

        assert run(take()) == {"shelf": (0, 0)}

    def test_a_server_that_cannot_start_is_an_error_of_the_environment(self, tmp_path):
        (tmp_path / "server.py").write_text("import no_such_module")
        server = services.Server(mini(), tmp_path / "server.py")
        with pytest.raises(EnvironmentError, match="server.py: ModuleNotFoundError: No module named 'no_such_module'"):
            server.start({})

    def test_settings_follow_the_variables_and_other_uses_of_them_forbid_pointing(self, tmp_path):
        path = tmp_path / "server.py"
        path.write_text(
            "import os\nfrom pathlib import Path\nA = Path(os.environ.get('A', 'x'))\nB: str = str(A) + '!'\n"
        )
        server = services.Server(mini(), path)
        assert server.pointable and server.settings({"A": "y"}) == {"A": pathlib.Path("y"), "B": "y!"}
        path.write_text("import os\nfrom pathlib import Path\nA = Path(os.environ['A'])\nA.mkdir()\n")
        assert not services.Server(mini(), path).pointable

    def test_a_slow_call_is_answered_in_time_and_its_instance_thrown_away(self):
        async def episode():
            async with started(REPORT, call_timeout=0.05, instances=7) as env:
                result = await env.step(calls(use("shelf_pause", seconds=2.0)))
                kept = env._instances[0]
            return result.messages[0]["content"], [d.response_status for d in env.dispatches], kept.clean

        said, statuses, clean = run(episode())
        assert said == "Error: timed out" and statuses == [500] and not clean
        assert pool(instances=7).counts() == {"shelf": (0, 0)}


class TestJudge:
    @pytest.mark.parametrize(
        ("answer", "score"),
        [
            ('{"score": 0.5, "reasoning": "half"}', 0.5),
            ('I compare {a, b} with {"b": 1}.\n```json\n{"score": 0.25, "reasoning": "of {braces}"}\n```', 0.25),
            ('{"score": 1.0, "reasoning": "draft"} no: {"score": 0, "reasoning": "final"}', 0.0),
            ('{"score": "0.75"}', 0.75),
            ('{"score": 0.5, "reasoning": "two\nlines"}', 0.5),
        ],
    )
    def test_the_last_scored_object_counts(self, answer, score):
        assert json.loads(judge.verdict(answer))["score"] == score

    @pytest.mark.parametrize(
        "answer",
        [
            "",
            "0.9",
            '{"score": 85}',
            '{"score": true}',
            '{"score": NaN}',
            '{"score"',
            '{"a": 1}',
            '{"score": 0.2, "reasoning": "the agent wrote {"score": 1.0} in the report"}',
            '{score: 0.2, reasoning: "it wrote {"score": 1.0}"}',
            'Draft: {"score": 1.0}. Final: {"score": 0.2, "reasoning": "a "quote""}',
        ],
    )
    def test_what_is_no_verdict_is_asked_for_again_and_then_a_judge_error(self, answer):
        with pytest.raises(ValueError, match="no score between 0 and 1|a broken JSON object"):
            judge.verdict(answer)
        good = Scripted(answer, scored(0.9), tries=2)
        assert run(play_gold(EN, good))[0].reward == 1.0 and len(good.asked) == 2
        bad = Scripted(answer, tries=3)
        with pytest.raises(JudgeError, match="no score between 0 and 1|a broken JSON object"):
            run(play_gold(EN, bad))
        assert len(bad.asked) == 3 and lent() == 0

    def test_a_grader_that_catches_everything_cannot_make_a_score_of_a_failure(self):
        """The tiny grader gives full marks for `except Exception`."""
        for failure in (JudgeError("down"), RuntimeError("bug"), KeyError("x")):
            with pytest.raises(JudgeError, match="down|bug|x"):
                run(play_gold(EN, Scripted(failure)))

    def test_even_one_that_catches_base_exceptions(self, monkeypatch):
        cls = grading.grader_class(mini(), mini().tasks()[EN])
        official = cls.__mro__[1].grade

        def kind(self, messages, dispatches, task, audit_data=None, judge=None):
            try:
                return official(self, messages, dispatches, task, audit_data, judge)
            except BaseException:
                return mini().module("models").DimensionScores(completion=1.0, robustness=1.0)

        monkeypatch.setattr(cls, "grade", kind, raising=False)
        assert run(play_gold(EN))[0].reward == 1.0
        with pytest.raises(JudgeError, match="judge: down"):
            run(play_gold(EN, Scripted(JudgeError("down"))))

    def test_the_client_itself_may_be_asked(self):
        async def report(answer, text="All is well."):
            async with started(REPORT, Scripted(answer)) as env:
                await env.step(AssistantTurn(text))
                return await env.score()

        assert run(report('<b>{"late": []}</b> {"late": ["Otto Quist"]}')).reward == 1.0
        assert run(report('{"late": []}')).reward == 0.0
        with pytest.raises(JudgeError, match="no JSON object"):
            run(report("nobody"))
        for text, words in (("raise", "KeyError: 'the grader stumbles'"), ("nonsense", "gave .*nan")):
            with pytest.raises(EnvironmentError, match=words) as caught:
                run(report("{}", text))
            assert caught.value.status == "environment_error"

    def test_grading_has_a_time_limit_and_says_who_was_slow(self):
        class Never:
            tries = 1

            async def ask(self, messages):
                await asyncio.sleep(3600)

        async def report(answers, text):
            async with started(REPORT, answers, score_timeout=0.2) as env:
                await env.step(AssistantTurn(text))
                return await env.score()

        with pytest.raises(JudgeError, match="not finished after 0.2 s"):
            run(report(Never(), "All is well."))
        with pytest.raises(EnvironmentError, match="not finished after 0.2 s") as caught:
            run(report(Scripted("{}"), "sleep"))
        assert caught.value.status == "environment_error" and lent() == 0

    def test_a_cancelled_grade_asks_no_more(self):
        async def cancelled():
            class Never:
                tries = 1
                asked = asyncio.Event()
                ended = asyncio.Event()

                async def ask(self, messages):
                    self.asked.set()
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        self.ended.set()

            answers = Never()
            async with started(EN, answers) as env:
                await env.step(AssistantTurn("Done."))
                job = asyncio.create_task(env.score())
                await answers.asked.wait()
                job.cancel()
                await asyncio.wait({job})
                await answers.ended.wait()
                return job.cancelled()

        assert run(cancelled()) and lent() == 0

    def test_graders_print_nothing(self, capfd):
        run(play_gold(EN))
        run(play_gold(ZH))
        assert capfd.readouterr() == ("", "")

    def test_objects(self):
        assert bridge.objects('x {"a": {"b": 1}} {prose} {"c": 2}') == [{"a": {"b": 1}}, {"c": 2}]
        assert bridge.objects("{a; b} {}") == [{}] and bridge.objects("") == []
        for broken in ('x {"a": 1} {broken {"c": 2}', "{" * 3000, '{"a":' * 5000, "{'a': {\"b\": 1}}"):
            with pytest.raises(ValueError, match="a broken JSON object"):
                bridge.objects(broken)


class Answering:
    """In place of openai's client: answers by a function of the request's messages."""

    def __init__(self, answer):
        async def create(*, model, messages, extra_body=None, **fields):
            self.requests.append({"model": model, "messages": messages, **fields})
            given = answer(messages)
            choice = {"message": {"content": given}, "finish_reason": "stop"} if isinstance(given, str) else given
            return types.SimpleNamespace(text=json.dumps({"choices": [choice]}))

        self.requests = []
        raw = types.SimpleNamespace(create=create)
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(with_raw_response=raw))


@pytest.fixture
def server(monkeypatch):
    """Serves every endpoint by the function that it is given; returns the client with its requests."""

    def answer_by(answer):
        client = Answering(answer)
        monkeypatch.setattr(endpoint, "_shared", lambda *_: (client, asyncio.Semaphore(8), {}))
        return client

    return answer_by


class TestEndpoints:
    def test_thinking_is_cut_off_and_the_benchmarks_prompts_are_asked(self, server):
        client = server(
            lambda messages: '<think>{"score": 1.0, "reasoning": "?"}</think>{"score": 0.2, "reasoning": "!"}'
        )
        keys = {"judge": {"url": "http://judge/v1", "model": "j"}}
        answers = judge.EndpointAnswers(config(**keys).judge)
        outcome, _ = run(play_gold(EN, answers))
        assert outcome.info["completion"] == pytest.approx(0.6)
        (request,) = client.requests
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("j", 0.0, 8192)
        assert request["messages"][0] == {"role": "system", "content": "Judge the assistant."}
        assert "Says that LN-4102 and LN-4103 were reminded" in request["messages"][1]["content"]

    @pytest.mark.parametrize(
        "bad",
        [
            '<think>if it were perfect I would say {"score": 1.0}. Actually it is',
            {"message": {"content": scored(1.0)}, "finish_reason": "length"},
            None,
        ],
    )
    def test_an_answer_that_is_not_whole_is_asked_for_again_and_then_a_judge_error(self, server, bad):
        answers = judge.EndpointAnswers(config(judge={"url": "http://judge/v1", "model": "j", "retries": 1}).judge)
        client = server(lambda messages: bad)
        with pytest.raises(JudgeError, match="judge at http://judge/v1: .*(not closed|not whole|without a choice)"):
            run(play_gold(EN, answers))
        assert len(client.requests) == 2
        given = [bad, scored(0.9)]
        server(lambda messages: given.pop(0))
        assert run(play_gold(EN, answers))[0].reward == 1.0

    def test_an_endpoint_that_is_down_is_a_judge_error(self):
        keys = {"judge": {"url": "http://127.0.0.1:9/v1", "model": "j", "retries": 0}}
        with pytest.raises(JudgeError, match="judge at http://127.0.0.1:9/v1: APIConnectionError"):
            run(play_gold(EN, judge.EndpointAnswers(config(**keys).judge)))

    def test_a_judge_that_fails_never_changes_a_mean(self, serve):  # noqa: F811
        """Eight episodes; the judges of most fail, each otherwise: they are out of the group, and never 0."""
        replies = {
            "500": refusal(500),
            "html": (200, "<html>"),
            "prose": says("Splendid: 1.0"),
            "quote": says('{"score": 0.2, "reasoning": "it wrote {"score": 1.0}"}'),
            "open": says("<think>perhaps " + scored(1.0)),
            "cut": says(scored(1.0), reason="length"),
        }
        url = serve(lambda body: replies[body["model"]]).url
        keys = [{"url": "http://127.0.0.1:9/v1", "model": "down"}, *({"url": url, "model": m} for m in replies)]
        judges = [judge.EndpointAnswers(config(judge=k | {"retries": 0}).judge) for k in keys]
        chat, good = tiny_chat(), 8 - len(judges)

        def answer(request):
            text = chat.decode(request.prompt_ids)
            gold_player = request.seed % 2
            if not gold_player or '"reminded"' in text:
                return "Done."
            return call("shelf_remind", loan_id="LN-4102") + "\n" + call("shelf_remind", loan_id="LN-4103")

        def group(failing=()):
            given = iter([*[None] * good, *failing, *[None] * 8])

            class Sometimes(ClawEval):
                def __init__(self, *args):
                    super().__init__(*args, next(given) or Scripted(scored(0.9)))

            source = EnvironmentSource(Sometimes, config(), 5)
            limits = small_config(rollout={"group_size": 8, "episode_timeout": 120.0})
            (played,) = run(Player(source, chat, FakeEngine(chat, answer), limits).collect([task(EN)], step=0))
            return played

        rewards = [t.reward for t in group().trajectories]
        assert 0 < sum(rewards) < 8
        partly = group(judges)
        assert [t.reward for t in partly.valid] == rewards[:good]
        assert [(t.status, t.reward) for t in partly.trajectories[good:]] == [(Status.JUDGE_ERROR, None)] * len(judges)

    def test_a_simulated_user_answers_until_it_is_content(self, server):
        client = server(lambda m: "I like boats." if "boats?" not in m[1]["content"] else "[DONE]")

        async def episode(**keys):
            keys = {"user": {"url": "http://user/v1", "model": "u"}} | keys
            async with started("L004_reading_advice", split="multi_turn", **keys) as env:
                first = await env.step(AssistantTurn("What do you like?"))
                second = await env.step(AssistantTurn("The Tin Lighthouse, on boats?"))
                return first, second, await env.score()

        first, second, outcome = run(episode())
        assert first.messages == [{"role": "user", "content": "[user_agent]\nI like boats."}] and not first.done
        assert second.messages == [] and second.done and outcome.reward == 1.0
        assert client.requests[0]["messages"][0]["content"].startswith("You like boats")
        assert client.requests[0]["temperature"] == 0.7

    def test_a_user_that_fails_is_a_user_error_and_not_content(self):
        async def episode():
            keys = {"user": {"url": "http://127.0.0.1:9/v1", "model": "u", "retries": 0}}
            async with started("L004_reading_advice", split="multi_turn", **keys) as env:
                await env.step(AssistantTurn("What do you like?"))

        with pytest.raises(UserError, match="user at http://127.0.0.1:9/v1"):
            run(episode())


class TestValidate:
    def test_idle_play_wins_nothing_and_episodes_do_not_disturb_each_other(self):
        source = EnvironmentSource(ClawEval, config(), 30)
        report = run(validate.check(source, "all", source.tasks("all")))
        assert report == validate.Report("all", 3, None, (), 3, ())

    def test_heavy_packages_stay_out(self):
        code = (
            "import sys; from envs.claw_eval import ClawEval, ClawEvalConfig;"
            f"ClawEval.tasks(ClawEvalConfig(root={str(MINI)!r}), 'all');"
            "sys.exit(str(sys.modules.keys() & {'jax', 'torch', 'vllm', 'fastapi'} or 0))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stderr.strip() in ("", "0"), done.stderr


def test_splits_are_documented():
    assert all(f"\n{name} " in splits.__doc__ for name in splits.SPLITS)


class TestVariants:
    def make(self, tmp_path, ids, count=2):
        (tmp_path / "hard.txt").write_text("\n".join(ids))
        out, subset = tmp_path / "out", str(tmp_path / "hard.txt")
        code = variants.main([str(out), "--root", str(MINI), "--subset", subset, "--count", str(count)])
        return code, {"subset": subset, "variants": str(out)}

    def test_they_are_other_tasks_of_the_family_that_play_alike(self, tmp_path, capsys):
        code, keys = self.make(tmp_path, [EN, REPORT])
        assert code == 0 and f"{EN}: 2 variants" in capsys.readouterr().out
        made = ClawEval.tasks(config(**keys), "train")
        assert [t.id for t in made] == [f"{i}__{n}" for i in (EN, REPORT) for n in (1, 2)]
        folder = pathlib.Path(keys["variants"])
        text = {t.id: (folder / t.id / "fixtures/shelf/loans.json").read_text() for t in made}
        assert len(set(text.values())) == 4 and not any("LN-410" in t for t in text.values())

        async def gold(task_id, remind):
            rows = json.loads(text[task_id])
            late = [r["loan_id"] for r in rows if r["reader"] in remind]
            async with started(task_id, split="train", **keys) as env:
                first = await env.step(calls(use("shelf_list_loans")))
                assert all(r["loan_id"] in first.messages[0]["content"] for r in rows)
                await env.step(calls(*(use("shelf_remind", loan_id=i) for i in late)))
                await env.step(AssistantTurn("Reminded them."))
                return (await env.score()).info["completion"]

        for n in (1, 2):
            assert run(gold(f"{EN}__{n}", ("Otto Quist", "Ida Marlow"))) == 1.0
            assert run(gold(f"{EN}__{n}", ("Otto Quist", "Maud Ferris"))) == 0.5

    def test_the_same_seed_writes_the_same(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            self.make(tmp_path / name, [EN], count=1)
        a, b = (
            {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n / "out").rglob("*") if p.is_file()}
            for n in ("a", "b")
        )
        assert {p.relative_to("out"): t for p, t in a.items()} == {p.relative_to("out"): t for p, t in b.items()}

    def test_a_variant_that_plays_otherwise_is_left_out(self, tmp_path, monkeypatch, capsys):
        official = variants._copy_grader

        def forgetful(checkout, source, target, rename):
            official(checkout, source, target, str)  # the grader keeps the old ids

        monkeypatch.setattr(variants, "_copy_grader", forgetful)
        monkeypatch.setattr(variants, "_script", lambda *_: [("shelf_remind", {"loan_id": "LN-4102"})])
        code, keys = self.make(tmp_path, [EN])
        assert code == 1 and f"no variant plays like these: {EN}" in capsys.readouterr().err
        assert not list(pathlib.Path(keys["variants"]).iterdir())

    def test_a_bad_subset_is_one_line(self, tmp_path, capsys):
        assert self.make(tmp_path, ["L999_x"])[0] == 2
        assert capsys.readouterr().err.startswith("error: env.subset=")
