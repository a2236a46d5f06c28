"""`rti validate`: sound environments pass, and each kind of fault is found and named."""

import asyncio
import inspect
import os
import pathlib
import time
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from envs.base import AssistantTurn, Environment, Evidence, Observation, Outcome, StepResult, Task, ToolCall
from rti_jax import cli, validate
from rti_jax.config import EnvConfig
from rti_jax.environments import EnvironmentSource, environment_source

CONFIG = "env: {name: 'tests.test_validate:%s', max_turns: 3}\neval: {split: test}\n"


class Sum(Environment):
    """Add two numbers: the example of envs/base.py with an expert. Subclasses below have one fault each."""

    @classmethod
    def tasks(cls, config, split):
        return [Task(f"{split}/{i}", data={"a": i, "b": 2 * i}) for i in range(1, 6)]

    async def reset(self, task):
        self.task, self.answer = task, None
        return Observation([{"role": "user", "content": f"{task.data['a']} + {task.data['b']}?"}])

    @property
    def result(self):
        return str(self.task.data["a"] + self.task.data["b"])

    async def step(self, turn):
        self.answer = turn.content.strip()
        return StepResult([], done=True)

    async def score(self):
        good = self.answer == self.result
        return Outcome("success" if good else "failure", float(good), {"reason": "" if good else "wrong sum"})

    def evidence(self):
        return Evidence(f"The sum is {self.result}.", (self.result,))

    def check_evidence(self):
        a, b = (self.task.data[k] for k in "ab")
        return [] if str(a + b) in self.evidence().text else ["the sum is another"]

    def expert(self):
        return AssistantTurn(self.result)


class WrongGold(Sum):
    def expert(self):
        return AssistantTurn(self.result if self.task.data["a"] < 3 else "0")


class NoGold(Sum):
    def expert(self):
        return None


class WithoutGold(Sum):
    expert = Environment.expert  # not defined: nobody knows how it is won


class AlwaysRight(Sum):
    async def score(self):
        return Outcome("success", 1.0)


class Refusal(AlwaysRight):
    @classmethod
    def idle_exceptions(cls, config, split):
        return frozenset(t.id for t in cls.tasks(config, split))


class FalseException(Sum):
    @classmethod
    def idle_exceptions(cls, config, split):
        return frozenset(["train/2"])


class FalseEvidence(Sum):
    def evidence(self):
        return Evidence("The sum is 1000.")


class Lasting(Sum):
    """Leaves something behind for the episode after it."""

    greeted: ClassVar[list] = []

    async def reset(self, task):
        start = await super().reset(task)
        self.greeted.append(task.id)
        return Observation([*start.messages, {"role": "user", "content": f"You are number {len(self.greeted)}."}])


class NoEvidence(Sum):
    def evidence(self):
        return Evidence(" ")


class ShownEvidence(Sum):
    async def reset(self, task):
        start = await super().reset(task)
        return Observation([{"role": "system", "content": self.evidence().text}, *start.messages])


class Shared(Sum):
    """Keeps the last answer on the class; correct while episodes are played one by one."""

    last: ClassVar[dict] = {}

    async def step(self, turn):
        self.last["answer"] = turn.content.strip()
        await asyncio.sleep(0)
        self.answer = self.last["answer"]
        return StepResult([], done=True)


class Clock(Sum):
    async def reset(self, task):
        start = await super().reset(task)
        return Observation([*start.messages, {"role": "user", "content": f"It is {time.perf_counter_ns()}."}])


class Slow(Sum):
    async def score(self):
        await asyncio.sleep(60)


class Misfit(Sum):
    """Its expert calls a tool with an argument that the tool does not take."""

    async def reset(self, task):
        start = await super().reset(task)
        parameters = {"type": "object", "properties": {"sum": {"type": "integer"}}}
        return Observation(
            start.messages, [{"type": "function", "function": {"name": "say", "parameters": parameters}}]
        )

    def expert(self):
        return AssistantTurn("", (ToolCall("say", {"sum": self.result}),))


class Broken(Sum):
    async def reset(self, task):
        raise OSError("no such machine")


class Silent(Sum):
    async def step(self, turn):
        return StepResult([])


class Failed(Sum):
    """Names a failure otherwise than `Status` does."""

    async def score(self):
        outcome = await super().score()
        return outcome if outcome.reward else Outcome("failed", 0.0)


class Worthless(Sum):
    async def score(self):
        return Outcome("success", (await super().score()).reward)


class NoReward(Sum):
    async def score(self):
        outcome = await super().score()
        return Outcome(outcome.status, outcome.reward or None)


class NoVerdict(Sum):
    async def score(self):
        outcome = await super().score()
        return outcome if outcome.reward else Outcome("judge_error", None)


class Mute(Sum):
    async def reset(self, task):
        await super().reset(task)
        return Observation([])


class WithTool(Sum):
    """A tool that gold play does not call; a subclass gives its schema."""

    parameters: ClassVar[dict] = {}

    async def reset(self, task):
        start = await super().reset(task)
        tool = {"type": "function", "function": {"name": "say", "parameters": self.parameters}}
        return Observation(start.messages, [tool])


NOWHERE = "the schema of tool say refers to "


class Nowhere(WithTool):
    parameters: ClassVar[dict] = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/nope"}}}}


class Elsewhere(WithTool):
    parameters: ClassVar[dict] = {"$ref": "https://example.org/schema.json"}


class Resolved(WithTool):
    """All that may look like a lost reference and is none."""

    parameters: ClassVar[dict] = {
        "properties": {
            "$ref": {"type": "string", "enum": ["x"], "default": {"$ref": "#/nope"}},
            "a": {"$ref": "#/$defs/a"},
            "b": {"$ref": "#b"},
            "c": {"$id": "https://example.org/c", "$defs": {"d": {}}, "$ref": "#/$defs/d"},
        },
        "$defs": {"a": {"type": "integer"}, "b": {"$anchor": "b"}},
    }


class Drawn(Sum):
    """Draws its tasks anew each time."""

    number: ClassVar[list] = []

    @classmethod
    def tasks(cls, config, split):
        cls.number.append(0)
        return [Task(f"{split}/{i}", data={"a": len(cls.number), "b": 2}) for i in range(2)]


class Reordered(Sum):
    number: ClassVar[list] = []

    @classmethod
    def tasks(cls, config, split):
        cls.number.append(0)
        return Sum.tasks(config, split)[:: 1 if len(cls.number) % 2 else -1]


class Renamed(Sum):
    number: ClassVar[list] = []

    @classmethod
    def tasks(cls, config, split):
        cls.number.append(0)
        return [Task(f"{split}/{i}/{len(cls.number)}", data={"a": i, "b": 2}) for i in range(2)]


class Unclosed(Sum):
    async def close(self):
        raise OSError("close boom")


class BrokenExceptions(Sum):
    @classmethod
    def idle_exceptions(cls, config, split):
        raise RuntimeError("exceptions boom")


class UnknownExceptions(Sum):
    @classmethod
    def idle_exceptions(cls, config, split):
        return {"nope"}


class OneException(Sum):
    @classmethod
    def idle_exceptions(cls, config, split):
        return "train/1 train/2"


class NoExceptions(Sum):
    @classmethod
    def idle_exceptions(cls, config, split):
        return None


class SaidInLetters(Sum):
    def check_evidence(self):
        return "the sum is another"


class NothingSaid(Sum):
    def check_evidence(self):
        return None


class OneValue(Sum):
    def evidence(self):
        return Evidence(f"The sum is {self.result}.", self.result)


class BrokenEvidence(Sum):
    def evidence(self):
        return Evidence(f"The sum is {self.rusult}.")  # the line that a finding names


class Cancelled(Sum):
    async def step(self, turn):
        raise asyncio.CancelledError


class HalfPair(Sum):
    async def step(self, turn):
        raise RuntimeError("bad \ud800")


class NoSlots(Sum):
    @classmethod
    def at_once(cls, config):
        return 0


def source(cls):
    return EnvironmentSource(cls, cls.Config(), 3)


def check(cls, seconds=10.0):
    return asyncio.run(validate.check(source(cls), "train", cls.tasks(None, "train"), seconds))


def found(report):
    return {(f.check, f.task) for f in report.findings}


def all_tasks(kind):
    return {(kind, f"train/{i}") for i in range(1, 6)}


class TestChecks:
    def test_a_sound_environment_passes(self):
        seen = []
        tasks = Sum.tasks(None, "train")
        report = asyncio.run(validate.check(source(Sum), "train", tasks, advance=lambda: seen.append(1)))
        assert report == validate.Report("train", 5, 5, (), 10, ()) and len(seen) == 4 * len(tasks)

    @pytest.mark.parametrize(
        ("cls", "expected", "words"),
        [
            (WrongGold, {("gold", f"train/{i}") for i in (3, 4, 5)}, "failure with reward 0.0 (wrong sum)"),
            (NoGold, all_tasks("gold"), "gives up after 0 turns"),
            (AlwaysRight, all_tasks("idle"), "does not name this task"),
            (FalseException, {("idle", "train/2")}, "named as won by doing nothing"),
            (FalseEvidence, all_tasks("evidence"), "the sum is another"),
            (NoEvidence, all_tasks("evidence"), "there is none"),
            (ShownEvidence, all_tasks("evidence"), "the first observation shows it"),
            (Lasting, all_tasks("isolation"), "differs, also when it is played alone again"),
            (Clock, all_tasks("isolation"), "also when it is played alone again"),
            (Slow, all_tasks("gold") | all_tasks("idle"), "score took longer than 0.05 s"),
            (Misfit, all_tasks("gold"), "a call of turn 0 does not fit its tool: argument sum: '3' is not of type"),
            (Broken, all_tasks("gold") | all_tasks("idle") | all_tasks("evidence"), "OSError"),
            (Failed, all_tasks("idle"), "score() gave the unknown status 'failed'"),
            (Worthless, all_tasks("idle"), "score() gave success with reward 0.0, which contradict each other"),
            (NoReward, all_tasks("idle"), "score() gave failure with a reward that is None"),
            (NoVerdict, all_tasks("idle"), "idle play ends in judge_error with reward None"),
            (Mute, all_tasks("gold") | all_tasks("idle") | all_tasks("evidence"), "reset gave no messages"),
            (Silent, all_tasks("gold") | all_tasks("idle"), "answered with nothing"),
        ],
    )
    def test_each_fault_is_found(self, cls, expected, words):
        report = check(cls, seconds=0.05 if cls is Slow else 10.0)
        assert found(report) == expected
        assert any(words in f.text for f in report.findings)

    @pytest.mark.parametrize(
        ("cls", "expected", "words"),
        [
            (Nowhere, ("tools", "train/1"), NOWHERE + "#/nope, which is not there"),
            (Elsewhere, ("tools", "train/1"), NOWHERE + "https://example.org/schema.json, which is not there"),
            (Drawn, ("tasks", "*"), "each time they are asked for: train/0 has other contents"),
            (Reordered, ("tasks", "*"), "each time they are asked for: they are in another order"),
            (Renamed, ("tasks", "*"), "is not there any more"),
            (Unclosed, ("close", "train/1"), "OSError: close boom (tests/test_validate.py:"),
            (
                BrokenExceptions,
                ("idle", "*"),
                "idle_exceptions: RuntimeError: exceptions boom (tests/test_validate.py:",
            ),
            (UnknownExceptions, ("idle", "*"), "names 1 ids that are no tasks of the split, e.g. nope"),
            (OneException, ("idle", "*"), "gives one string; expected a set of ids"),
            (NoExceptions, ("idle", "*"), "idle_exceptions: TypeError"),
        ],
    )
    def test_a_fault_of_all_tasks_is_one_finding(self, cls, expected, words, monkeypatch):
        monkeypatch.chdir(pathlib.Path(__file__).parents[1])
        report = check(cls)
        assert [(f.check, f.task) for f in report.findings] == [expected]
        assert words in report.findings[0].text

    @pytest.mark.parametrize(
        ("cls", "words"),
        [
            (SaidInLetters, "check_evidence gives str, not a list of strings"),
            (NothingSaid, "check_evidence gives NoneType, not a list of strings"),
            (OneValue, "MalformedEvidence: the values of an Evidence are one string; expected a tuple: one value"),
            (BrokenEvidence, "AttributeError in evidence at {}:{}; its words may hold evidence"),
        ],
    )
    def test_what_is_wrong_with_the_evidence_is_one_finding_of_each_task(self, cls, words):
        line = inspect.getsourcelines(BrokenEvidence.evidence)[1] + 1
        report = check(cls)
        assert sorted((f.check, f.task) for f in report.findings) == sorted(all_tasks("evidence"))
        for finding in report.findings:
            assert words.format(os.path.relpath(__file__), line) in finding.text and "rusult" not in finding.text

    def test_references_that_lead_somewhere(self):
        assert check(Resolved).findings == ()

    def test_a_cancellation_of_its_own(self):
        report = check(Cancelled)
        assert found(report) == all_tasks("gold") | all_tasks("idle") | all_tasks("evidence")
        assert "step raised CancelledError, though nobody cancelled it" in report.findings[0].text

    def test_without_gold_play_the_rest_is_checked(self):
        seen = []
        tasks = Sum.tasks(None, "train")
        job = validate.check(source(WithoutGold), "train", tasks, advance=lambda: seen.append(1))
        assert asyncio.run(job) == validate.Report("train", 5, None, (), 5, ()) and len(seen) == 2 * len(tasks)

        class Generous(WithoutGold):
            score = AlwaysRight.score

        class Lying(WithoutGold):
            evidence = FalseEvidence.evidence

        assert found(check(Generous)) == all_tasks("idle") and found(check(Lying)) == all_tasks("evidence")

    def test_shared_state_shows_when_episodes_are_played_at_once(self):
        report = check(Shared)
        assert {f.check for f in report.findings} == {"isolation"} and report.gold == 5
        assert all("among others differs" in f.text for f in report.findings)

    def test_named_exceptions_are_listed_and_no_violation(self):
        report = check(Refusal)
        assert report.findings == () and report.idle == tuple(f"train/{i}" for i in range(1, 6))

    def test_as_many_at_once_as_the_environment_bears(self):
        running, most = set(), 0

        class Few(Sum):
            @classmethod
            def at_once(cls, config):
                return 3

            async def reset(self, task):
                nonlocal most
                running.add(self)
                most = max(most, len(running))
                return await super().reset(task)

            async def close(self):
                running.discard(self)

        assert check(Few).findings == () and most == 3

    def test_evidence_that_nothing_checks_is_not_called_true(self):
        class Unchecked(Sum):
            check_evidence = Environment.check_evidence

        assert check(Sum).checked and not check(Unchecked).checked

    def test_navigation_passes_and_false_evidence_there_is_found(self):
        config = EnvConfig(name="navigation", tools="short", places=[2, 3], train_tasks=12, test_tasks=12, candidates=2)
        navigation = environment_source(config)
        report = asyncio.run(validate.check(navigation, "train", navigation.tasks("train")))
        assert report.findings == () and report.gold == report.tasks

        class Lying(navigation.cls):
            def evidence(self):
                true = super().evidence()
                return Evidence(true.text.replace("| unique", "| ambiguous").replace("39.", "38."), true.values)

        lying = EnvironmentSource(Lying, navigation.config, navigation.max_turns)
        report = asyncio.run(validate.check(lying, "train", navigation.tasks("train")))
        assert {f.check for f in report.findings} == {"evidence"}


class TestCommand:
    def rti(self, tmp_path, cls, *arguments):
        path = tmp_path / "a.yaml"
        path.write_text(CONFIG % cls.__name__)
        return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["validate", str(path), *arguments])

    def test_a_table_and_exit_code_0(self, tmp_path):
        done = self.rti(tmp_path, Sum)
        assert done.exit_code == 0 and "in all: 10 tasks, gold play wins 10, doing nothing wins 0" in done.output
        assert "10, all as alone" in done.output and "episodes" in done.stderr

    def test_exit_code_1_and_a_line_for_each_violation(self, tmp_path):
        done = self.rti(tmp_path, FalseException)
        assert done.exit_code == 1
        assert "train: train/2: idle: named as won by doing nothing, but that ends in failure" in done.stdout

    def test_half_a_surrogate_pair_is_printed_as_an_escape(self, tmp_path):
        done = self.rti(tmp_path, HalfPair)
        assert done.exit_code == 1 and "RuntimeError: bad \\ud800" in done.stdout

    def test_no_slots_is_a_mistake_and_no_standstill(self, tmp_path):
        done = self.rti(tmp_path, NoSlots)
        assert done.exit_code == 2 and "NoSlots.at_once gives 0; expected a number of 1 or more" in done.stderr

    def test_no_gold_play_is_said(self, tmp_path):
        done = self.rti(tmp_path, WithoutGold)
        assert done.exit_code == 0 and "none defined" in done.output
        assert "in all: 10 tasks, doing nothing wins 0" in done.output

    def test_exceptions_are_listed(self, tmp_path):
        done = self.rti(tmp_path, Refusal, "env.split=test")
        assert done.exit_code == 0
        assert "test: doing nothing wins 5 of 5 tasks: test/1 test/2 test/3 test/4 test/5" in done.stdout

    def test_limit(self, tmp_path):
        assert "in all: 4 tasks" in self.rti(tmp_path, Sum, "--limit", "2").output

    def test_a_long_list_of_violations_is_cut(self, tmp_path, monkeypatch):
        monkeypatch.setattr(validate, "SHOWN", 2)
        done = self.rti(tmp_path, AlwaysRight)
        assert "train: idle: 3 more" in done.stdout and done.stdout.count("does not name this task") == 4
