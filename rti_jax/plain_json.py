"""JSON that a policy or an environment wrote, made such that nothing behind it stumbles: encodable, finite, bounded."""

import json
import sys
from typing import Any, TypeVar

DEPTH = 32  # of nested arguments; every check and every writer of them recurses
VALUES = 5_000  # in the arguments of a call; checks may compare each with each
T = TypeVar("T")


def encodable(text: str) -> str:
    """The text with every lone surrogate, which has no UTF-8, replaced by U+FFFD; any other text as it is.

    JSON can write such a thing ("\\ud800"), and neither tokenizers nor files take it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encodable_json(value: T) -> T:
    """`encodable` for all text in a JSON value; the very same object where there is nothing to replace.

    Raises:
      TypeError, ValueError, RecursionError: for what is no JSON.
    """
    text = json.dumps(value, ensure_ascii=False)
    replaced = encodable(text)
    return value if replaced is text else json.loads(replaced)


def unbounded(arguments: dict[str, Any]) -> str | None:
    """Why the arguments of a call are beyond all reason, or None: too deep, too many, or numbers that are none."""
    level: list[Any] = [arguments]
    count = 0
    for _ in range(DEPTH + 1):
        count += len(level)
        if count > VALUES:
            return f"the arguments hold more than {VALUES} values"
        if any(isinstance(v, int | float) and not abs(v) <= sys.float_info.max for v in level):
            return "the arguments hold a number that is not finite, or too large"
        level = [inner for v in level for inner in _within(v)]
        if not level:
            return None
    return f"the arguments are nested more than {DEPTH} deep"


def _within(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
