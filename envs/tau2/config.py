"""The keys of τ²-bench under `env:` in a config."""

import os
from typing import Any, Literal

import pydantic

from envs.base import EnvironmentConfig


class EndpointConfig(pydantic.BaseModel):
    """An OpenAI-compatible endpoint. What is left empty comes from environment variables, the key always does."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = ""  # base URL, with /v1; empty = the environment variable
    model: str = ""  # name there; empty = the environment variable, else the endpoint's first model
    temperature: float | None = pydantic.Field(0.0, ge=0)  # τ²'s default; null leaves it to the endpoint
    max_tokens: int | None = pydantic.Field(None, ge=1)  # of a reply, thinking included; null leaves it to the endpoint
    timeout: float = pydantic.Field(60.0, gt=0)  # seconds, of one request
    retries: int = pydantic.Field(2, ge=0)  # of a failed request, and of a reply that cannot be used
    concurrency: int = pydantic.Field(128, ge=1)  # requests at once
    extra_body: dict[str, Any] = {}  # more fields of the request, e.g. {chat_template_kwargs: {enable_thinking: false}}


class UserConfig(EndpointConfig):
    """The user simulator: $RTI_USER_URL, $RTI_USER_MODEL, $RTI_USER_API_KEY (else $OPENAI_API_KEY)."""

    max_calls: int = pydantic.Field(20, ge=1)  # calls of device tools within one turn of the user


class Tau2Config(EnvironmentConfig):
    """Keys of τ²-bench beside `name`, `split` and `max_turns`."""

    domain: Literal["airline", "retail", "telecom", "mock"]
    max_errors: int = pydantic.Field(10, ge=1)  # τ²'s: so many failed tool calls end the episode, with reward 0
    user: UserConfig = UserConfig()
    judge: EndpointConfig = EndpointConfig()  # $RTI_JUDGE_URL ...: only where assertions in words are in the reward


def resolve(config: EndpointConfig, role: str) -> tuple[str, str, str]:
    """(url, model, key) of an endpoint: config first, then $RTI_<ROLE>_URL, _MODEL and _API_KEY; url may be empty."""
    prefix = f"RTI_{role.upper()}"
    key = os.environ.get(f"{prefix}_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    return config.url or os.environ.get(f"{prefix}_URL", ""), config.model or os.environ.get(f"{prefix}_MODEL", ""), key
