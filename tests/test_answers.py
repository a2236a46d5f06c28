"""What an environment may give and what is refused, in words: by runs and by `rti validate`, which drive it alike."""

import asyncio

import numpy as np
import pytest

from envs.base import AssistantTurn, Environment, EnvironmentError, Observation, Outcome, StepResult, Task
from rti_jax.config import ConfigError
from rti_jax.environments import EnvironmentSource
from rti_jax.supervised import Supervised

USER = {"role": "user", "content": "x"}


class Given(Environment):
    """Gives what it is told to."""

    def __init__(self, reset=None, step=None, score=None):
        super().__init__(self.Config(), 1)
        self.given = {"reset": reset, "step": step, "score": score}

    @classmethod
    def tasks(cls, config, split):
        return []

    async def reset(self, task):
        return self.given["reset"]

    async def step(self, turn):
        return self.given["step"]

    async def score(self):
        return self.given["score"]

    def evidence(self):
        raise NotImplementedError


def reset(value):
    return asyncio.run(Supervised(Given(reset=value), 5.0).reset(Task("t")))


def step(value):
    return asyncio.run(Supervised(Given(step=value), 5.0).step(AssistantTurn("x")))


def score(value):
    return asyncio.run(Supervised(Given(score=value), 5.0).score())


def tool(name="t", **function):
    return {"type": "function", "function": {"name": name, **function}}


def deep(levels=100_000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("call", "value", "words"),
    [
        (reset, None, "reset gave None, not an Observation"),
        (reset, [USER], "reset gave a list, not an Observation"),
        (reset, Observation([]), "reset gave no messages"),
        (reset, Observation("hello"), "reset gave as messages a str, not a list"),
        (reset, Observation(["hello"]), "reset gave as message 0 a str, not a dict"),
        (reset, Observation([USER, {"content": "x"}]), "reset gave as message 1 one with role None, which is none of"),
        (reset, Observation([{"role": "user"}]), "whose content is None, not text"),
        (reset, Observation([{"role": "user", "content": {1, 2}}]), "whose content is a set, not text"),
        (reset, Observation([USER | {"meta": {1, 2}}]), "reset gave messages that are no JSON"),
        (reset, Observation([USER | {"meta": deep()}]), "reset gave messages that are no JSON"),
        (reset, Observation([USER | {"tool_calls": [{"name": "t"}]}]), "with a tool call that is not"),
        (reset, Observation([USER], None), "reset gave as tools None, not a list"),
        (reset, Observation([USER], [{"name": "t"}]), "reset gave as tool 0 one without a name"),
        (reset, Observation([USER], [tool(5)]), "reset gave as tool 0 one without a name"),
        (reset, Observation([USER], [tool(), tool()]), "reset gave two tools with the name t"),
        (reset, Observation([USER], [tool(parameters={"default": print})]), "reset gave tools that are no JSON"),
        (step, None, "step gave None, not a StepResult"),
        (step, ([], True), "step gave a tuple, not a StepResult"),
        (step, StepResult("done", True), "step gave as messages a str"),
        (step, StepResult(["go on"]), "step gave as message 0 a str"),
        (step, StepResult([], "no"), "step gave as done a str, not a bool"),
        (score, None, "gave None, not an Outcome"),
        (score, 1.0, "gave a float, not an Outcome"),
        (score, Outcome("failed", 0.0), "unknown status 'failed'; known: success, failure"),
        (score, Outcome(["success"], 1.0), "unknown status"),
        (score, Outcome("success", "1.0"), "success with a reward that is a str, not a number"),
        (score, Outcome("failure", None), "failure with a reward that is None, not a number"),
        (score, Outcome("failure", float("nan")), "failure with reward nan"),
        (score, Outcome("success", 0.0), "success with reward 0.0, which contradict each other"),
        (score, Outcome("success", -1.0), "contradict"),
        (score, Outcome("failure", 1.0), "failure with reward 1.0, which contradict each other"),
        (score, Outcome("truncated", 1.0), "contradict"),
        (score, Outcome("success", 1.0, "because"), "gave as info a str, not a dict"),
        (score, Outcome("success", 1.0, {"seen": {1}}), "info that is no JSON: there is a set in it"),
    ],
)
def test_what_is_refused(call, value, words):
    with pytest.raises(EnvironmentError) as error:
        call(value)
    assert words in str(error.value)


def test_what_is_sound_comes_out_as_it_was():
    messages = [{"role": "system", "content": "Grüße 😀"}, USER, {"role": "assistant", "content": None}]
    start = Observation(messages, [tool("a"), tool("b", parameters={"type": "object"})])
    assert reset(start) == start and all(a is b for a, b in zip(reset(start).messages, messages, strict=True))
    assert step(StepResult([USER])) == StepResult([USER]) and step(StepResult([], True)).done
    assert score(Outcome("success", 1.0, {"n": 3, "why": ["ü"]})) == Outcome("success", 1.0, {"n": 3, "why": ["ü"]})
    assert score(Outcome("failure", 0.4)) == Outcome("failure", 0.4)  # a part of the way
    assert score(Outcome("truncated", 0)) == Outcome("truncated", 0.0)
    assert score(Outcome("judge_error", None)) == Outcome("judge_error", None)


def test_numbers_of_numpy_are_numbers():
    given = score(Outcome("success", np.float32(1), {"n": np.int64(3), "yes": np.bool_(True)}))
    assert given == Outcome("success", 1.0, {"n": 3, "yes": True}) and type(given.reward) is float


def test_text_without_utf8_is_replaced():
    bad = {"role": "user", "content": "a\ud800b"}
    assert reset(Observation([bad], [tool("a\udc00")])).messages == [{"role": "user", "content": "a\ufffdb"}]
    assert reset(Observation([USER], [tool("a\udc00")])).tools == [tool("a\ufffd")]
    assert step(StepResult([USER, bad])).messages[1]["content"] == "a\ufffdb"
    assert score(Outcome("failure", 0.0, {"reason": "\ud800"})).info == {"reason": "\ufffd"}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (["a"], "gives 'a'; expected an envs.base.Task"),
        ([Task(1)], "gave a task with id 1, not a text"),
        ([Task("")], "gave a task with id '', not a text"),
        ([Task("\ud800")], "not a text"),
        ([Task("a", kind=3)], "task a has the kind 3, not a text"),
    ],
)
def test_tasks_that_are_none(tasks, words):
    class Listed(Given):
        @classmethod
        def tasks(cls, config, split):
            return tasks

    with pytest.raises(ConfigError) as error:
        EnvironmentSource(Listed, Listed.Config(), 1).tasks("train")
    assert words in str(error.value)
