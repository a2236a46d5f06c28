"""The judge of assertions in words: upstream's retail tasks have them in the reward, the registry's release does not.

The prompt is that of tau2/evaluator/evaluator_nl_assertions.py (MIT, Sierra Research), which τ² itself sends to a fixed
model through litellm.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from envs.base import JudgeError
from envs.endpoint import Endpoint, EndpointConfig

SYSTEM = """\
TASK
- You will be given a list of expected outcomes and a conversation that was collected during a test case run.
- The conversation is between an agent and a customer.
- Your job is to evaluate whether the agent satisfies each of the expected outcomes.
- Grade each expected outcome individually.

FORMAT
- Your response should be a JSON object with the following fields:
- `reasoning`: a short explanation for your classification
- `metExpectation`: `true` if the agent satisfies the expected outcomes, `false` otherwise
- `expectedOutcome`: repeat the expectation from the input that you are grading

Example response structure:
{
    "results": [
        {
            "expectedOutcome": "<one of the expected outcomes from the input>",
            "reasoning": "<reasoning trace>",
            "metExpectation": <false or true>,
        }
    ]
}"""


class Judge(Protocol):
    """Judges a dialogue, τ²'s messages, by assertions in words."""

    async def hold(self, assertions: Sequence[str], trajectory: Sequence[Any]) -> bool: ...


class EndpointJudge:
    """A judge behind an endpoint."""

    def __init__(self, config: EndpointConfig):
        self._endpoint = Endpoint(config, "judge", JudgeError)
        self._tries = config.retries + 1

    async def hold(self, assertions: Sequence[str], trajectory: Sequence[Any]) -> bool:
        """Whether all assertions hold. Raises JudgeError where the endpoint fails or gives no readable verdict."""
        conversation = "\n".join(f"{m.role}: {m.content}" for m in trajectory)
        question = f"conversation:\n{conversation}\n\nexpectedOutcomes:\n{list(assertions)}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for _ in range(self._tries):
            reply = await self._endpoint.ask(messages)
            verdicts = read(reply.content or "")
            if verdicts is not None and len(verdicts) == len(assertions):
                return all(verdicts)
        raise JudgeError(f"no readable verdict on {len(assertions)} assertions")


def read(text: str) -> list[bool] | None:
    """The verdicts of an answer, in its order; None if they cannot be read."""
    try:
        results = json.loads(text[text.index("{") : text.rindex("}") + 1])["results"]
        verdicts = [r["metExpectation"] for r in results]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return verdicts if all(isinstance(v, bool) for v in verdicts) else None
