"""The keys of Claw-Eval under `env:` in a config."""

import contextlib
import datetime
from typing import Literal

import pydantic

from envs.base import EnvironmentConfig
from envs.endpoint import EndpointConfig


class JudgeConfig(EndpointConfig):
    """The judge that graders ask: $RTI_JUDGE_URL, $RTI_JUDGE_MODEL, $RTI_JUDGE_API_KEY (else $OPENAI_API_KEY)."""

    max_tokens: int | None = pydantic.Field(8192, ge=1)  # of an answer, thinking included; the benchmark's
    timeout: float = pydantic.Field(120.0, gt=0)  # seconds, of one request
    concurrency: int = pydantic.Field(64, ge=1)  # requests at once


class UserConfig(EndpointConfig):
    """The simulated user of `multi_turn` tasks: $RTI_USER_URL, $RTI_USER_MODEL, $RTI_USER_API_KEY."""

    temperature: float | None = pydantic.Field(0.7, ge=0)  # the benchmark's


class ClawEvalConfig(EnvironmentConfig):
    """Keys of Claw-Eval beside `name`, `split` and `max_turns`."""

    root: str = ""  # the checkout of the Claw-Eval repository; empty = $CLAW_EVAL_ROOT
    commit: str = ""  # the checkout's commit (or its first digits) that a run insists on; empty = any, recorded
    subset: str = ""  # file of the hard tasks' ids, one a line or a YAML or JSON list; `rti select` writes one
    variants: str = ""  # folder of training tasks in the benchmark's format: the split `train`
    repair: bool = False  # mend the benchmark's known faults (docs/claw_eval.md); false scores as it does
    clock: str = ""  # what time services take it to be, e.g. "2026-03-02T09:00:00+00:00"; empty = the real time
    web: bool = False  # tasks whose services fetch from the internet, in this process; see docs before you turn it on
    prompt: Literal["full", "no_schemas", "plain"] = (
        "full"  # the benchmark's system prompt; without schemas; its short one
    )
    call_timeout: float = pydantic.Field(30.0, gt=0)  # seconds, of one tool call; the benchmark's
    score_timeout: float = pydantic.Field(900.0, gt=0)  # seconds, of grading with all its questions to the judge
    instances: int = pydantic.Field(256, ge=1)  # of one service at once; further episodes wait for a free one
    evidence_chars: int = pydantic.Field(8000, ge=500)  # budget of the evidence's text
    judge: JudgeConfig = JudgeConfig()
    user: UserConfig = UserConfig()

    @pydantic.field_validator("clock")
    @classmethod
    def _moment(cls, text: str) -> str:
        with contextlib.suppress(ValueError):
            if not text or datetime.datetime.fromisoformat(text).tzinfo:
                return text
        raise ValueError(f"env.clock={text} is no time with its zone, e.g. 2026-03-02T09:00:00+00:00")
