"""The keys of τ²-bench under `env:` in a config."""

from typing import Literal

import pydantic

from envs.base import EnvironmentConfig
from envs.endpoint import EndpointConfig


class UserConfig(EndpointConfig):
    """The user simulator: $RTI_USER_URL, $RTI_USER_MODEL, $RTI_USER_API_KEY (else $OPENAI_API_KEY)."""

    max_calls: int = pydantic.Field(20, ge=1)  # calls of device tools within one turn of the user


class Tau2Config(EnvironmentConfig):
    """Keys of τ²-bench beside `name`, `split` and `max_turns`."""

    domain: Literal["airline", "retail", "telecom", "mock"]
    max_errors: int = pydantic.Field(10, ge=1)  # τ²'s: so many failed tool calls end the episode, with reward 0
    user: UserConfig = UserConfig()
    judge: EndpointConfig = EndpointConfig()  # $RTI_JUDGE_URL ...: only where assertions in words are in the reward
