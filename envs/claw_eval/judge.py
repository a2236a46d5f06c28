"""The judge of the benchmark's graders: its prompts, in front of any OpenAI-compatible endpoint.

The benchmark's own judge builds the prompts and hands out the verdict; what it asks is our client. Of an answer, the
last JSON object with a score in [0, 1] is used; without one, or if any object of it is broken, it is asked for again,
and then the episode is a `judge_error`, never a score.
"""

import asyncio
import json
import math
from typing import Any, Protocol

from envs.base import JudgeError
from envs.claw_eval.bridge import Ask, Client, objects
from envs.claw_eval.checkout import Checkout
from envs.claw_eval.config import JudgeConfig
from envs.endpoint import Endpoint


class Answers(Protocol):
    """Where a judge's answers come from, and how often an unreadable one is asked for."""

    tries: int

    async def ask(self, messages: Any) -> str: ...


class EndpointAnswers:
    """A judge behind an endpoint; its thinking is cut off."""

    def __init__(self, config: JudgeConfig):
        self._endpoint = Endpoint(config, "judge", JudgeError)
        self.tries = config.retries + 1

    async def ask(self, messages: Any) -> str:
        return (await self._endpoint.ask(messages)).content or ""


class ConstantAnswers:
    """The same score for everything: for rehearsals, and to compare paths."""

    tries = 1

    def __init__(self, score: float):
        self._text = json.dumps({"score": score, "reasoning": "constant"})

    async def ask(self, messages: Any) -> str:
        return self._text


class Judge:
    """What a grader gets as `judge`: the benchmark's LLMJudge with another client; for one grade.

    `client` and `model_id` are there because two graders ask the client themselves.
    """

    model_id = "judge"

    def __init__(self, checkout: Checkout, ask: Ask, loop: asyncio.AbstractEventLoop, tries: int = 1):
        self.client = Client(ask, loop, tries)
        self.client.read = last_object
        official = checkout.module("graders.llm_judge").LLMJudge
        self._official = official.__new__(official)  # its constructor makes a client, which takes 30 ms
        vars(self._official).update(client=self.client, model_id=self.model_id, _call_log=[])

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._scored("evaluate", *args, **kwargs)

    def evaluate_actions(self, *args: Any, **kwargs: Any) -> Any:
        return self._scored("evaluate_actions", *args, **kwargs)

    def evaluate_visual(self, *args: Any, **kwargs: Any) -> Any:
        return self._scored("evaluate_visual", *args, **kwargs)

    def get_call_log(self) -> list[dict[str, Any]]:
        return self._official.get_call_log()

    def reset_call_log(self) -> None:
        self._official.reset_call_log()

    def _scored(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.client.read = verdict
        try:
            return getattr(self._official, method)(*args, **kwargs)
        finally:
            self.client.read = last_object


def verdict(text: str) -> str:
    """The last scored object of an answer, as the benchmark reads it.

    Raises:
      ValueError: there is none, or an object of the answer is broken.
    """
    for found in reversed(objects(text)):
        try:
            score = float(found["score"])
        except (KeyError, TypeError, ValueError):
            continue
        if not isinstance(found["score"], bool) and math.isfinite(score) and 0.0 <= score <= 1.0:
            # the benchmark looks for an object without braces inside
            reasoning = str(found.get("reasoning", "")).replace("{", "(").replace("}", ")")
            return json.dumps({"score": score, "reasoning": reasoning}, ensure_ascii=False)
    raise ValueError("no score between 0 and 1 in the judge's answer")


def last_object(text: str) -> str:
    """The last object of an answer, for a grader that asks for something else than a score."""
    if not (found := objects(text)):
        raise ValueError("no JSON object in the judge's answer")
    return json.dumps(found[-1], ensure_ascii=False)
