"""Episodes, their outcomes and limits, explicit groups, seeds, and which tasks a step plays."""

import asyncio
import collections
import re

import pytest

from envs.base import Environment, Outcome, StepResult, Task, tool_error
from rti_jax import batching, runs
from rti_jax.config import ConfigError, EnvConfig
from rti_jax.engine_errors import EngineDiedError, EngineError
from rti_jax.environments import BUILT_IN, environment_source, load_environment, sample_tasks
from rti_jax.limits import run_bounded
from rti_jax.rollout import Player, Seat
from rti_jax.seeds import derive_seed
from rti_jax.types import Status
from tests.fakes import FakeEngine, Lookup, call, lookup_source, lookup_task, small_config, tiny_chat


def good_player(request_text: str) -> str:
    """Looks, then answers with the code that the result shows."""
    if '"code": "X4711"' in request_text:
        return call("answer", code="X4711")
    return call("look", name="Ada")


def player(answer=good_player, *, max_turns=4, thinking=False, **sections):
    """A Player over Lookup whose policy is a function of the prompt's text (or of the request)."""
    chat = tiny_chat(thinking)
    engine = FakeEngine(chat, lambda request: answer(chat.decode(request.prompt_ids)))
    return Player(lookup_source(max_turns), chat, engine, small_config(**sections))


def play(p, task=None, **kwargs):
    return asyncio.run(p.play(task or lookup_task(), Seat(0, 3, "train/3/0", 1), **kwargs))


class TestEpisode:
    def test_success(self):
        p = player()
        t = play(p)
        assert (t.status, t.reward, t.id, t.member) == (Status.SUCCESS, 1.0, "train/3/0/1", 1)
        assert [turn.id for turn in t.turns] == ["train/3/0/1/0", "train/3/0/1/1"]
        assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
        assert t.messages[2]["tool_calls"][0]["function"]["name"] == "look"

    def test_turns_hold_the_engines_prompts_and_ids(self):
        p = player()
        t = play(p)
        assert [turn.prompt_ids for turn in t.turns] == [r.prompt_ids for r in p.engine.requests]
        before = t.turns[0].prompt_ids + t.turns[0].response_ids
        assert t.turns[1].prompt_ids[: len(before)] == before
        assert t.turns[0].sampler_logprobs[:2] == (-0.01, -0.02) and t.turns[0].finish_reason == "stop"

    def test_sampled_ids_stay_in_the_next_prompt_and_the_row(self):
        chat = tiny_chat()
        he, llo = chat.tokenizer.convert_tokens_to_ids(["he", "llo"])
        p = player(max_turns=2)
        p.engine.answer = lambda request: (he, llo, chat.end_id)
        t = play(p)
        start = len(t.turns[0].prompt_ids)
        assert t.turns[1].prompt_ids[start : start + 3] == (he, llo, chat.end_id)
        (row,) = batching.trajectory_rows(t, 0, 1.0, 1.0, p.config)
        assert row.tokens[row.loss_mask].tolist() == [he, llo, chat.end_id] * 2

    def test_two_thinking_turns_around_a_user_message_are_two_rows(self):
        p = player(lambda text: "<think>\nHm.\n</think>\n\nHello?", thinking=True, max_turns=2)
        t = play(p)
        assert "Hm." not in p.chat.decode(t.turns[1].prompt_ids)
        rows = batching.trajectory_rows(t, 0, 1.0, 1.0, p.config)
        assert [tuple(r.tokens) for r in rows] == [turn.prompt_ids + turn.response_ids for turn in t.turns]
        assert t.messages[2]["reasoning_content"] == "Hm."

    def test_thinking_turns_around_a_tool_result_are_one_row(self):
        p = player(lambda text: "<think>\nHm.\n</think>\n\n" + good_player(text), thinking=True)
        t = play(p)
        assert t.success and len(batching.trajectory_rows(t, 0, 1.0, 1.0, p.config)) == 1

    def test_failures_are_the_policys(self):
        wrong = play(player(lambda text: call("answer", code="1")))
        assert (wrong.status, wrong.reward, wrong.info) == (Status.FAILURE, 0.0, {"answered": "1"})
        idle = play(player(lambda text: "Hello?", max_turns=3))
        assert (idle.status, len(idle.turns)) == (Status.FAILURE, 3)

    def test_a_malformed_call_comes_back_as_a_tool_error(self):
        p = player(lambda text: good_player(text) if "Error" in text else '<tool_call>\n{"a":1\n</tool_call>')
        t = play(p)
        assert t.success and len(t.turns) == 3
        assert t.messages[3]["content"].startswith("Error: the tool call is not valid JSON")

    @pytest.mark.parametrize(
        "written",
        [
            '{"name": "\\ud800", "arguments": {}}',
            '{"name": "look", "arguments": {"\\udfff": "\\ud800"}}',
            '{"name": "look", "arguments": {"name": NaN}}',
            '{"name": "look", "arguments": {"name": 1e999}}',
            '{"name": "look", "arguments": {"name": ' + "[" * 400 + "]" * 400 + "}}",
        ],
    )
    def test_what_only_json_can_write_ends_no_run(self, written, tmp_path):
        """Lone surrogates, which have no UTF-8, numbers that are none, and depth: the call's error, or its text."""

        class Echo(Lookup):
            def _result(self, call):
                return tool_error(call, call.error or f"{call.name} {call.arguments} \ud800")

        p = player(lambda text: f"<tool_call>\n{written}\n</tool_call>", max_turns=2, sampling={"max_tokens": 3000})
        p.source = type(p.source)(Echo, Echo.Config(), 2)
        t = play(p)
        assert (t.status, t.reward, len(t.turns)) == (Status.FAILURE, 0.0, 2)
        assert t.messages[3]["content"].startswith("Error: ")
        (tmp_path / "line").write_text(runs.trajectory_line(t), encoding="utf-8")

    def test_a_user_message_without_utf8(self):
        class Odd(Lookup):
            async def reset(self, task):
                start = await super().reset(task)
                return type(start)([{"role": "user", "content": "\ud800?"}, *start.messages[1:]], start.tools)

        p = player()
        p.source = type(p.source)(Odd, Odd.Config(), 4)
        t = play(p)
        assert t.success and t.messages[0]["content"] == "\ufffd?"

    def test_seeds_differ_by_turn_and_member(self):
        p = player()
        groups = asyncio.run(p.collect([lookup_task()], step=0))
        assert len(groups[0].trajectories) == 2
        assert len({r.seed for r in p.engine.requests}) == 4


class TestLimits:
    def context(self, extra, **kwargs):
        """A player whose context is the first prompt and `extra` tokens."""
        first = len(play(player()).turns[0].prompt_ids)
        return player(**kwargs, sampling={"max_context": first + extra})

    def test_the_request_is_clipped_to_the_context(self):
        p = self.context(4)
        t = play(p)
        assert [r.max_tokens for r in p.engine.requests] == [4]
        assert (t.status, t.reward, len(t.turns)) == (Status.TRUNCATED, 0.0, 1)
        assert t.turns[0].finish_reason == "length" and len(t.turns[0].response_ids) == 4

    @pytest.mark.parametrize("extra", [0, -1])
    def test_no_request_where_there_is_no_room(self, extra):
        p = self.context(extra)
        t = play(p)
        assert p.engine.requests == []
        assert (t.status, t.reward, t.turns, t.valid) == (Status.TRUNCATED, None, (), False)

    def test_truncated_may_be_left_out_of_the_statistics(self):
        p = self.context(4, rollout={"truncated_is_failure": False})
        group = asyncio.run(p.collect([lookup_task()], step=0))[0]
        assert {t.status for t in group.trajectories} == {Status.TRUNCATED} and group.valid == ()

    def test_a_response_cut_at_the_token_limit_is_played(self):
        """What is there is read: a call that is not closed is a tool error, and the episode goes on."""
        padding = " " * 90
        p = player(lambda t: good_player(t) + ("" if "<tool_response>" in t else padding), sampling={"max_tokens": 70})
        t = play(p)
        assert t.turns[0].finish_reason == "length" and t.success

    def test_a_failure_whose_last_turn_was_cut_is_truncated(self):
        t = play(player(lambda text: "Hello? " * 50, max_turns=2, sampling={"max_tokens": 20}))
        assert (t.status, t.reward, len(t.turns)) == (Status.TRUNCATED, 0.0, 2)

    @pytest.mark.parametrize("fault", ["sleep", "stubborn"])
    def test_a_tool_that_never_returns(self, fault, monkeypatch):
        monkeypatch.setattr("rti_jax.limits.CLOSE_SECONDS", 0.2)
        p = player(rollout={"episode_timeout": 0.5})
        made = []

        class Recorded(Lookup):
            def __init__(self, *args):
                super().__init__(*args)
                made.append(self)

        p.source = type(p.source)(Recorded, Recorded.Config(), 4)
        tasks = [lookup_task(f"t{i}", fault=fault if i == 3 else "") for i in range(4)]

        async def collect():
            try:
                return await asyncio.wait_for(p.collect(tasks, step=0), timeout=4)
            finally:
                for environment in made:
                    environment.fault = ""  # lets go of the loop

        groups = asyncio.run(collect())
        assert [{t.status for t in g.trajectories} for g in groups] == [{Status.SUCCESS}] * 3 + [{Status.TIMEOUT}]
        assert groups[3].valid == () and len(groups[3].trajectories[0].turns) == 1

    @pytest.mark.parametrize("phase", ["reset", "step", "score"])
    def test_each_call_of_the_environment_has_a_limit_that_names_it(self, phase):
        class Stuck(Lookup):
            pass

        async def stuck(self, *args):
            await asyncio.sleep(3600)

        setattr(Stuck, phase, stuck)
        p = player(rollout={"step_timeout": 0.05, "episode_timeout": 20.0})
        p.source = type(p.source)(Stuck, Stuck.Config(), 4)
        t = play(p)
        assert (t.status, t.reward) == (Status.TIMEOUT, None)
        assert t.info["error"] == f"{phase} took longer than 0.05 s"
        assert len(t.turns) == {"reset": 0, "step": 1, "score": 2}[phase]

    @pytest.mark.parametrize("phase", ["reset", "step", "score", "close"])
    def test_a_cancellation_of_its_own_is_an_error_of_the_environment(self, phase):
        """Taken for the episode's, it would end the whole run as if SIGTERM had come."""

        class Odd(Lookup):
            pass

        async def odd(self, *args):
            raise asyncio.CancelledError

        setattr(Odd, phase, odd)
        p = player()
        p.source = type(p.source)(Odd, Odd.Config(), 4)
        t = play(p)
        if phase == "close":  # what it won stands
            assert t.success
        else:
            assert (t.status, t.reward) == (Status.ENVIRONMENT_ERROR, None)
            assert t.info["error"] == f"{phase} raised CancelledError, though nobody cancelled it"

    def test_a_cancelled_episode_is_cancelled(self):
        class Waiting(Lookup):
            async def step(self, turn):
                started.set()
                await asyncio.sleep(3600)

        p = player()
        p.source = type(p.source)(Waiting, Waiting.Config(), 4)

        async def cancelled():
            task = asyncio.create_task(p.play(lookup_task(), Seat(0, 0, "train/0/0", 0)))
            await started.wait()
            task.cancel()
            await task

        started = asyncio.Event()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())

    @pytest.mark.parametrize("number", [0, -1, "2", 1.5])
    def test_a_number_of_episodes_that_is_none_is_refused(self, number):
        """With 0 slots the first episode would wait for ever."""

        class Odd(Lookup):
            @classmethod
            def at_once(cls, config):
                return number

        p = player()
        source = type(p.source)(Odd, Odd.Config(), 4)
        for asked in (lambda: source.at_once(8), source.check):
            with pytest.raises(ConfigError, match=re.escape(f"Odd.at_once gives {number!r}")):
                asked()
        with pytest.raises(ValueError, match="at most 0 at once"):
            asyncio.run(run_bounded([], 0))

    def test_concurrency(self):
        p = player(rollout={"concurrency": 3})
        running, most = 0, 0

        class Counted(Lookup):
            async def reset(self, task):
                nonlocal running, most
                running, most = running + 1, max(most, running + 1)
                return await super().reset(task)

            async def close(self):
                nonlocal running
                running -= 1

        p.source = type(p.source)(Counted, Counted.Config(), 4)
        asyncio.run(p.collect([lookup_task()] * 6, step=0))
        assert most == 3
        Counted.at_once = classmethod(lambda cls, config: 2)
        most = 0
        asyncio.run(p.collect([lookup_task()] * 6, step=0))
        assert most == 2


class TestArguments:
    """Calls are checked against the JSON schemas of the tools before the environment sees them."""

    def answers(self, first, own=False):
        """The tool's answer to a first call, and the environment's record of what it ran."""
        ran = []

        class Recorded(Lookup):
            check_arguments = not own

            def _result(self, call):
                ran.append((call.name, call.error))
                return super()._result(call)

        p = player(lambda text: good_player(text) if "<tool_response>" in text else first)
        p.source = type(p.source)(Recorded, Recorded.Config(), 4)
        t = play(p)
        return t.messages[3]["content"], ran[0], t.success

    def test_a_wrong_type_names_the_field(self):
        text, ran, success = self.answers(call("look", name=3))
        assert text == "Error: argument name: 3 is not of type 'string'" and ran[1] == text[7:]
        assert success  # the policy's mistake cost a turn

    def test_an_unknown_tool_is_answered_with_those_there_are(self):
        assert self.answers(call("find", name="Ada"))[0] == "Error: unknown tool find; the tools are look, answer"

    def test_a_call_that_fits_arrives_as_it_was(self):
        text, ran, _ = self.answers(call("look", name="Ada"))
        assert "X4711" in text and ran == ("look", None)

    def test_an_environment_may_word_these_errors_itself(self):
        text, ran, _ = self.answers(call("find", name="Ada"), own=True)
        assert text == "Error: no tool find" and ran == ("find", None)

    def test_a_schema_that_is_none_is_the_environments_error(self):
        class Wrong(Lookup):
            async def reset(self, task):
                start = await super().reset(task)
                function = {"name": "look", "parameters": {"type": "objekt"}}
                return type(start)(start.messages, [{"type": "function", "function": function}])

        p = player()
        p.source = type(p.source)(Wrong, Wrong.Config(), 4)
        t = play(p)
        assert t.status is Status.ENVIRONMENT_ERROR and "the schema of tool look" in t.info["error"]


class TestErrors:
    @pytest.mark.parametrize(
        "fault, status, words",
        [
            ("reset", Status.ENVIRONMENT_ERROR, "OSError: no such machine"),
            ("step", Status.ENVIRONMENT_ERROR, "RuntimeError: lost connection"),
            ("silent", Status.ENVIRONMENT_ERROR, "answered a turn with nothing"),
            ("status", Status.ENVIRONMENT_ERROR, "unknown status 'great'"),
            ("user", Status.USER_ERROR, "simulator is down"),
            ("judge", Status.JUDGE_ERROR, "no verdict"),
        ],
    )
    def test_are_statuses_without_reward_and_closed(self, fault, status, words):
        Lookup.closed.clear()
        t = play(player(rollout={"retries": 1}), lookup_task(fault=fault))
        assert (t.status, t.reward) == (status, None)
        assert words in t.info["error"] and t.info["retries"] == 1
        assert len(Lookup.closed) == 2

    @pytest.mark.parametrize(
        "method, given, words",
        [
            ("step", None, "step gave None, not a StepResult"),
            ("step", StepResult(["go on"]), "step gave as message 0 a str"),
            ("score", Outcome("success", 0.0), "success with reward 0.0, which contradict each other"),
            ("score", Outcome("failure", None), "failure with a reward that is None"),
        ],
    )
    def test_a_wrong_answer_of_the_environment_is_its_error(self, method, given, words):
        class Wrong(Lookup):
            pass

        async def wrong(self, *args):
            return given

        setattr(Wrong, method, wrong)
        p = player()
        p.source = type(p.source)(Wrong, Wrong.Config(), 4)
        t = play(p)
        assert (t.status, t.reward) == (Status.ENVIRONMENT_ERROR, None) and words in t.info["error"]

    def test_a_judge_that_answers_at_last(self):
        Lookup.judged.clear()
        t = play(player(rollout={"retries": 2}), lookup_task(fault="judge_twice"))
        assert (t.status, t.info["retries"]) == (Status.SUCCESS, 2)

    def test_a_retry_is_the_same_episode(self):
        p = player(rollout={"retries": 1})
        play(p, lookup_task(fault="judge"))
        seeds = [r.seed for r in p.engine.requests]
        assert seeds[:2] == seeds[2:]

    def test_only_errors_are_played_again(self):
        for answer in (good_player, lambda text: call("answer", code="1")):
            p = player(answer, rollout={"retries": 3})
            Lookup.closed.clear()
            assert play(p).valid and len(Lookup.closed) == 1

    def test_failing_to_close_does_not_matter(self):
        assert play(player(), lookup_task(fault="close")).success

    def test_a_failed_request_is_data_and_a_dead_engine_is_not(self):
        p = player()
        p.engine.answer = lambda r: EngineError("refused")
        assert play(p).status is Status.ENVIRONMENT_ERROR
        p.engine.answer = lambda r: EngineDiedError("gone")
        with pytest.raises(EngineDiedError):
            asyncio.run(p.collect([lookup_task()] * 3, step=0))

    def test_the_other_members_stand(self):
        p = player()
        seats = iter(range(8))

        class Once(Lookup):
            async def reset(self, task):
                observation = await super().reset(task)
                self.fault = "judge" if next(seats) == 5 else ""
                return observation

        p.source = type(p.source)(Once, Once.Config(), 4)
        (group,) = asyncio.run(p.collect([lookup_task()], 8, step=0))
        assert len(group.trajectories) == 8 and len(group.valid) == 7


class TestGroups:
    def test_are_explicit(self):
        """Two groups of one task, and of tasks with the same text, stay two groups."""
        groups = asyncio.run(player().collect([lookup_task("a"), lookup_task("b"), lookup_task("a")], step=7))
        assert [g.id for g in groups] == ["train/7/0", "train/7/1", "train/7/2"]
        assert [g.task_id for g in groups] == ["a", "b", "a"]
        assert [[t.member for t in g.trajectories] for g in groups] == [[0, 1]] * 3

    def test_streams_and_sampling_of_an_evaluation(self):
        p = player()
        seen = []
        sampling = p.config.sampling.model_copy(update={"temperature": 0.0})
        asyncio.run(p.collect([lookup_task()], 3, step=0, stream="eval", sampling=sampling, on_episode=seen.append))
        assert [t.id for t in sorted(seen, key=lambda t: t.id)] == ["eval/0/0/0", "eval/0/0/1", "eval/0/0/2"]
        assert {r.temperature for r in p.engine.requests} == {0.0}

    def test_results_do_not_depend_on_what_runs_beside(self):
        def seeds(concurrency):
            p = player(rollout={"concurrency": concurrency})
            asyncio.run(p.collect([lookup_task(str(i)) for i in range(4)], step=2))
            return sorted(r.seed for r in p.engine.requests)

        assert seeds(1) == seeds(100)


def test_seeds_are_stable():
    assert derive_seed(0, 3, "train/3/0", 1, 0, "policy") == 906487488
    assert derive_seed(1, "2") != derive_seed("1", 2)
    assert all(0 <= derive_seed(i) < 2**31 for i in range(100))


class TestSampleTasks:
    tasks = [Task(f"e{i}", "easy") for i in range(6)] + [Task(f"h{i}", "hard") for i in range(4)]

    def test_every_epoch_plays_each_task_once(self):
        played = [t.id for step in range(5) for t in sample_tasks(self.tasks, step, 4, seed=0)]
        assert collections.Counter(played) == {t.id: 2 for t in self.tasks}
        assert played[:10] != played[10:]

    def test_is_a_function_of_the_step(self):
        again = sample_tasks(self.tasks, 3, 4, seed=0)
        assert again == sample_tasks(self.tasks, 3, 4, seed=0) != sample_tasks(self.tasks, 3, 4, seed=1)

    def test_mix(self):
        for step in range(6):
            kinds = [t.kind for t in sample_tasks(self.tasks, step, 4, seed=0, mix={"hard": 1, "easy": 3})]
            assert collections.Counter(kinds) == {"easy": 3, "hard": 1}
        hard = [
            t.id
            for s in range(4)
            for t in sample_tasks(self.tasks, s, 4, 0, {"hard": 1, "easy": 3})
            if t.kind == "hard"
        ]
        assert sorted(hard) == ["h0", "h1", "h2", "h3"]

    def test_a_kind_may_have_fewer_tasks_than_its_share(self):
        assert len(sample_tasks(self.tasks, 0, 20, seed=0, mix={"hard": 1.0})) == 20

    @pytest.mark.parametrize(
        "mix, n, words",
        [
            ({"hrd": 1}, 4, "no tasks of kind 'hrd'; kinds here: easy, hard"),
            ({"easy": 1, "hard": 1e-3}, 4, "none of kind hard"),
            ({"easy": -1}, 4, "not a positive number"),
            ({"easy": 0}, 4, "share of 0"),
        ],
    )
    def test_mistakes(self, mix, n, words):
        with pytest.raises(ConfigError, match=words):
            sample_tasks(self.tasks, 0, n, 0, mix)


class TestEnvironmentNames:
    def test_an_import_path(self):
        source = environment_source(EnvConfig(name="tests.fakes:Lookup", max_turns=3))
        assert source.make().max_turns == 3 and len(source.tasks("test")) == 9

    def test_from_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "my_env_abc.py").write_text("from tests.fakes import Lookup as Base\nclass Mine(Base):\n    pass\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*__import__("sys").path])
        assert load_environment("my_env_abc:Mine").__name__ == "Mine"

    def test_the_built_in_one(self):
        assert issubclass(load_environment("navigation"), Environment)

    @pytest.mark.parametrize(
        "name, words",
        [
            ("navigaton", "did you mean navigation"),
            ("something", "neither built in nor an import path"),
            ("planned", "not available in this installation"),
            ("no_such_pkg:Env", "no module no_such_pkg"),
            ("tests.fakes:Nothing", "has no Nothing"),
            ("tests.fakes:FakeEngine", "is not a subclass of envs.base.Environment"),
            (":X", "neither built in"),
        ],
    )
    def test_mistakes_are_one_line(self, name, words, monkeypatch):
        monkeypatch.setitem(BUILT_IN, "planned", "envs.planned:Planned")
        with pytest.raises(ConfigError, match=words) as error:
            load_environment(name)
        assert "\n" not in str(error.value)

    def test_an_unknown_key_and_split(self):
        with pytest.raises(ConfigError, match="unknown key env.speed"):
            environment_source(EnvConfig(name="tests.fakes:Lookup", speed=3))
        with pytest.raises(ConfigError, match="env.split=dev: unknown split"):
            lookup_source().tasks("dev")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (KeyError("oops"), r"Odd.tasks: KeyError: 'oops' \(.*tests/test_rollout.py:\d+\)"),
            (None, "Odd.tasks gives None; expected a list of envs.base.Task"),
            ("ab", "Odd.tasks gives 'ab'; expected a list"),
            (["a", "b"], "Odd.tasks gives 'a'; expected an envs.base.Task"),
            ([Task("a"), Task(2)], "Odd gave a task with id 2, not a text"),
            (3, "Odd.tasks: TypeError"),
            ([Task("a"), Task("a")], "the tasks of Odd have ids that are not unique"),
        ],
    )
    def test_what_are_no_tasks_is_one_line(self, given, words):
        class Odd(Lookup):
            @classmethod
            def tasks(cls, config, split):
                if isinstance(given, Exception):
                    raise given
                return given

        with pytest.raises(ConfigError, match=f"^env.split=train: {words}") as error:
            type(lookup_source())(Odd, Odd.Config(), 4).tasks("train")
        assert "\n" not in str(error.value)
