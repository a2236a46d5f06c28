"""Asks map services: rate limit, retries with backoff, one request for all who ask the same, every answer stored.

A client is shared by all episodes of a process. Connections and the rate limit belong to an event loop, so there is one
set for each loop, which is given up with it; an episode owns and closes nothing here.
"""

import asyncio
import email.utils
import functools
import logging
import os
import ssl
import time
import urllib.parse
import weakref
from typing import Any

import aiolimiter
import httpx
import tenacity

from envs.navigation.config import ServiceConfig
from envs.navigation.services.request import ODD, Key, Request, ServiceError, Transient
from envs.navigation.services.store import Store
from envs.navigation.tools import ArgumentError

VARIABLES = ("AMAP_KEY", "NOMINATIM_KEY", "OSRM_KEY")
MIN_KEY = 8  # characters; a shorter text could not be taken out of answers without spoiling them


class _Line:
    """What belongs to one event loop."""

    def __init__(self, config: ServiceConfig, user_agent: str):
        self.http = httpx.AsyncClient(
            headers={"User-Agent": user_agent},
            # Waiting for a connection is nobody's fault. Redirects are not followed: a key must not go elsewhere.
            timeout=httpx.Timeout(config.timeout, pool=None),
            limits=httpx.Limits(max_connections=config.concurrency),
            follow_redirects=False,
            verify=_certificates(),
        )
        self.limiter = aiolimiter.AsyncLimiter(1, 1 / config.rate)  # evenly spaced, never a burst
        self.asked: dict[str, asyncio.Task[None]] = {}


class Client:
    """Asks for what the store does not hold.

    Args:
      user_agent: sent with every request.
    """

    def __init__(self, config: ServiceConfig, user_agent: str):
        self._config, self._user_agent = config, user_agent
        self.store = Store(config.cache, read_only=config.offline)
        self._lines: weakref.WeakKeyDictionary[Any, _Line] = weakref.WeakKeyDictionary()
        self._backoff = tenacity.wait_exponential_jitter(
            config.backoff, max=config.backoff_limit, jitter=min(config.backoff, config.backoff_limit)
        )
        logger = logging.getLogger("httpx")  # its INFO lines hold whole URLs
        if not any(isinstance(f, _HideKeys) for f in logger.filters):
            logger.addFilter(_HideKeys())

    async def ask(self, request: Request) -> None:
        """Sees to it that the store has the answer.

        Raises:
          ServiceError: the service cannot be used, or there is no recorded answer (offline). Nothing is stored then.
        """
        if self.store.get(request.name) is not None:
            return
        if self._config.offline:
            raise ServiceError("offline", f"{self._config.cache} has no answer to {request.name}")
        asked = self._line().asked
        if (task := asked.get(request.name)) is None:
            task = asked[request.name] = asyncio.create_task(self._fetch(request))
            task.add_done_callback(lambda done: (asked.pop(request.name), done.cancelled() or done.exception()))
        await asyncio.shield(task)  # an episode that is cancelled must not take the answer from the others

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines[loop] = _Line(self._config, self._user_agent)
        return self._lines[loop]

    async def _fetch(self, request: Request) -> None:
        """Asks until there is an answer, and stores it."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Transient),
            stop=tenacity.stop_after_attempt(self._config.retries + 1),
            wait=self._wait,
            reraise=True,
        )
        try:
            status, body = await retrying(self._send, request)
        except Transient as error:
            tries = self._config.retries + 1
            raise ServiceError(error.kind, f"{request.service}: {hide_keys(str(error))}, tried {tries} times") from None
        self.store.put(request.name, status, body)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds until the next try: exponential, or more where service or failure ask for it, up to the limit."""
        error = state.outcome.exception()
        after = max(error.after, error.backoffs * self._config.backoff)
        return max(self._backoff(state), min(after, self._config.backoff_limit))

    async def _send(self, request: Request) -> tuple[int, str]:
        """One try: (HTTP status, body without keys) of an answer that can be read."""
        line, params = self._line(), [*request.params, *_with_key(request)]
        await line.limiter.acquire()
        try:
            response = await line.http.get(request.url, params=params)
        except httpx.TransportError as error:
            raise Transient(f"{type(error).__name__} {error}".strip()) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError("setup", f"{request.service}: {type(error).__name__}") from None
        status, body = response.status_code, hide_keys(response.text)
        if status not in (200, 400):
            raise _failure(request.service, response)
        try:
            request.read(status, body)
        except ArgumentError:
            pass  # a refusal of the question is an answer to it
        except ODD:  # e.g. the page of a proxy
            raise Transient(f"HTTP {status} with an answer of another format") from None
        return status, body


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading them takes longer than many a request


@functools.lru_cache(maxsize=8)
def client(config: ServiceConfig, user_agent: str) -> Client:
    """The process's one client for these settings."""
    return Client(config, user_agent)


def key_of(key: Key) -> str:
    """The key from the environment, "" where an optional one is not set.

    Raises:
      ValueError: a required key is not set, or what is set is no key.
    """
    value = os.environ.get(key.variable, "").strip()
    if not value and key.required:
        raise ValueError(f"{key.variable} is not set: the map service needs a key")
    if value and len(value) < MIN_KEY:
        raise ValueError(f"{key.variable} has fewer than {MIN_KEY} characters, which is no key")
    return value


def hide_keys(text: str) -> str:
    """The text without any key of the environment, as it is or as it stands in a URL."""
    for value in (os.environ.get(v, "").strip() for v in VARIABLES):
        if len(value) >= MIN_KEY:
            for spelling in (value, urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value)):
                text = text.replace(spelling, "***")
    return text


class _HideKeys(logging.Filter):
    """Takes keys out of log lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = hide_keys(record.getMessage()), ()
        return True


def _with_key(request: Request) -> list[tuple[str, str]]:
    try:
        value = key_of(request.key)
    except ValueError as error:
        raise ServiceError("key", str(error)) from None
    return [(request.key.parameter, value)] if value else []


def _failure(service: str, response: httpx.Response) -> Exception:
    """What an HTTP status other than 200 and 400 means, for any service."""
    status = response.status_code
    if status == 429:
        return Transient("HTTP 429, too many requests", _retry_after(response), "quota")
    if status == 408 or status >= 500:
        return Transient(f"HTTP {status}", _retry_after(response))
    if status in (401, 402, 403):
        return ServiceError("key", f"{service}: HTTP {status}: its key, quota or usage policy refuses this client")
    return ServiceError("setup", f"{service}: HTTP {status}: is the base URL right?")


def _retry_after(response: httpx.Response) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without one."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
