"""Secrets (API keys, passwords, tokens) kept out of whatever is printed, logged or written.

Two kinds of rule. Values that are known, from environment variables named like a key and from the config, are replaced
wherever they stand. Forms that give a secret away whatever its value (user:password@ and ?key=... in URLs, bearer
tokens, the keys of well-known services) are replaced in messages only: in what a policy read and wrote they may be the
task's, and a trajectory is played again from its file.
"""

import contextlib
import functools
import logging
import os
import pathlib
import re
import string
import traceback
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # characters of a secret; what is shorter stands in ordinary text too
PLACEHOLDERS = {"changeme", "dummy-key", "no-key-needed", "not-needed", "placeholder", "undefined"}

_NAME = re.compile(
    r"(?:^|[_.-])(?:api[_-]?key|access[_-]?key(?:[_-]id)?|key|token|secret|password|passwd|pat|authorization|cookie"
    r"|credentials?)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"(?:^|[_.-])(?:(?:eos|bos|pad|unk|mask|sep|cls|end|stop|image|video|audio)_token"
    r"|(?:answer|cache|dict|group|index|lookup|map|primary|sort)_key)$",
    re.IGNORECASE,
)
_URLS = (
    (re.compile(r"(://)[^/\s:@'\"]+(?::[^/\s@'\"]*)?@"), r"\1" + HIDDEN + "@"),
    (
        re.compile(
            r"([?&](?:key|api[_-]?key|[a-z_]*token|secret|password|passwd|sig|signature|x-amz-[a-z-]+)=)[^&\s'\"<>]+",
            re.IGNORECASE,
        ),
        r"\1" + HIDDEN,
    ),
)
_FORMS = (
    *_URLS,
    (re.compile(r"\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{8,}"), r"\1 " + HIDDEN),
    (
        re.compile(
            r"\b(?:sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|gh[a-z]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"
            r"|glpat-[A-Za-z0-9_-]{20,}|xox[a-z]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16})"
        ),
        HIDDEN,
    ),
)

_known: set[str] = set()


def learn(values: Iterable[str]) -> None:
    """Makes values known; those that are too short or stand for no key are left out."""
    _known.update(v for v in map(str.strip, values) if len(v) >= SHORTEST and v.lower() not in PLACEHOLDERS)
    _pattern.cache_clear()


def learn_environment(names: Iterable[str] = ()) -> None:
    """The values of environment variables whose name says that they hold a secret, and of `names`."""
    named = set(names)
    values = [v for k, v in os.environ.items() if (k in named or names_secret(k)) and not os.path.exists(v)]
    learn(values)


def learn_config(config: Mapping[str, Any]) -> None:
    """The secrets that a config holds, and those of the environment variables that it names."""
    learn_environment(name for _, key, value in _leaves(config) for name in _variables(key, value))
    learn(secret for _, key, value in _leaves(config) for secret in _secrets(key, value))


def names_secret(name: str) -> bool:
    """Whether a variable, a key or a header of this name holds a secret."""
    return bool(_NAME.search(name)) and not _NO_SECRET.search(name)


def known_hidden(text: str) -> str:
    """A text without the values that are known."""
    pattern = _pattern()
    return pattern.sub(HIDDEN, text) if pattern else text


def redact(text: str) -> str:
    """A message without known values and without whatever has the form of a secret."""
    return _without(_FORMS, known_hidden(text))


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as it may be shown and written: values of keys that hold a secret, and secrets in URLs, are hidden."""
    return {key: _shown(str(key), value) for key, value in config.items()}


def hidden_keys(config: Mapping[str, Any]) -> list[str]:
    """Dotted keys of a config that was written without their secrets."""
    return [p for p, key, value in _leaves(config) if HIDDEN in value and (names_secret(key) or "://" in value)]


def guard_logs() -> None:
    """From now on no log line of this process has a secret, whichever handler writes it, traceback included."""
    make = logging.getLogRecordFactory()
    if getattr(make, "hides_secrets", False):
        return

    def record(*args, **kwargs) -> logging.LogRecord:
        made = make(*args, **kwargs)
        try:
            made.msg, made.args = redact(made.getMessage()), ()
        except Exception:  # a message that does not fit its arguments: the handler says so
            return made
        if made.exc_info and made.exc_info[0]:
            made.exc_text = redact("".join(traceback.format_exception(*made.exc_info)).rstrip())
        return made

    record.hides_secrets = True
    logging.setLogRecordFactory(record)


@functools.cache
def _pattern() -> re.Pattern | None:
    """Matches every known value, as it is and as it stands in a URL, the longest first."""
    quoted = (urllib.parse.quote(v, safe="") for v in _known), (urllib.parse.quote_plus(v) for v in _known)
    spellings = sorted({*_known, *quoted[0], *quoted[1]}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return described(value)
    if isinstance(value, list | tuple):
        return [_shown(key, v) for v in value]
    if not isinstance(value, str):
        return value
    if _holds_secret(key, value):
        return HIDDEN
    return _without(_URLS, known_hidden(value))


def _without(forms: Iterable[tuple[re.Pattern, str]], text: str) -> str:
    for pattern, instead in forms:
        text = pattern.sub(instead, text)
    return text


def _holds_secret(key: str, value: str) -> bool:
    """A literal under a key like `Authorization`; "$NAME" and "Bearer $NAME" hold none."""
    return names_secret(key) and bool(value) and not list(_templates(value))


def _secrets(key: str, value: str) -> Iterator[str]:
    if _holds_secret(key, value):
        yield value
        yield value.rpartition(" ")[2]  # of "Bearer TOKEN": servers echo it alone
    if "://" in value:
        with contextlib.suppress(ValueError):  # no URL after all
            parts = urllib.parse.urlsplit(value)
            yield urllib.parse.unquote(parts.password or "")
            yield from (v for k, v in urllib.parse.parse_qsl(parts.query) if names_secret(k))


def _variables(key: str, value: str) -> Iterator[str]:
    """Environment variables that a value names: `key_variable: NAME`, `"Bearer $NAME"`."""
    if key.endswith(("key_variable", "key_env")):
        yield value
    yield from _templates(value)


def _templates(value: str) -> Iterator[str]:
    for match in string.Template.pattern.finditer(value):
        if name := match["named"] or match["braced"]:
            yield name


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, its last part, value) of every text; the parts of a list have the list's key."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, path)
    elif isinstance(value, str | pathlib.PurePath):
        yield path, path.rpartition(".")[2], str(value)
