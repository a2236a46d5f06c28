"""What is asked of a map service, what it answers, and the kinds of failure.

A refusal of what the policy asked for is an `ArgumentError`, and as definite an answer as a result; what another try
may answer is `Transient`; everything else is a `ServiceError`, which ends the episode as an environment_error.
"""

import dataclasses
import urllib.parse
from collections.abc import Callable
from typing import Any, Literal

from envs.base import EnvironmentError
from envs.navigation.tools import ArgumentError

ODD = (ValueError, TypeError, KeyError, IndexError, AttributeError)  # what reading a body of another format raises
Kind = Literal["key", "quota", "unavailable", "setup", "offline", "cache"]


class ServiceError(EnvironmentError):
    """A map service cannot be used. `kind` says whose turn it is: the key, the quota, the service, the config, ..."""

    def __init__(self, kind: Kind, text: str):
        super().__init__(f"map service, {kind}: {text}")
        self.kind = kind


class Transient(Exception):
    """Another try may be answered.

    Attributes:
      after: seconds that the service asks to wait, if it says so.
      backoffs: the first wait in multiples of the configured backoff, where the failure is known to last longer.
    """

    def __init__(self, text: str, after: float = 0.0, kind: Kind = "unavailable", backoffs: float = 1.0):
        super().__init__(text)
        self.after, self.kind, self.backoffs = after, kind, backoffs


@dataclasses.dataclass(frozen=True)
class Found:
    """A place in an answer; coordinates in degrees, not rounded."""

    name: str
    region: str
    latitude: float
    longitude: float

    def __post_init__(self):
        if not (abs(self.latitude) <= 90 and abs(self.longitude) <= 180):
            raise ValueError("coordinates outside the globe")


@dataclasses.dataclass(frozen=True)
class Road:
    """A driving route: metres and seconds."""

    distance: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that goes with a request: the parameter it is sent in and the environment variable it is read from."""

    parameter: str
    variable: str
    required: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """One GET request. It never holds a key, so that neither the cache nor a message can.

    Attributes:
      service: its name in messages. url: without query. params: without the key.
      read: (HTTP status 200 or 400, body) → list of `Found`, or `Road`. Raises ArgumentError, Transient or
        ServiceError, and one of `ODD` where the body has another format.
    """

    service: str
    url: str
    params: tuple[tuple[str, str], ...]
    key: Key
    read: Callable[[int, str], Any] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The request in its one spelling: what its answer is stored under."""
        return f"{self.url}?{urllib.parse.urlencode(sorted(self.params))}"


def refusal(why: str) -> ArgumentError:
    """The service has no answer because of what is asked."""
    return ArgumentError(f"the map refuses this: {why}")


def text(value: Any) -> str:
    """A text field; AMap writes an empty one as []."""
    return value.strip() if isinstance(value, str) else ""
