"""JSON that a policy wrote, as far as nothing behind it stumbles over it: finite and bounded.

That its text can be encoded is `envs.chat_api.encodable`'s part.
"""

import sys
from typing import Any

DEPTH = 32  # of nested arguments; every check and every writer of them recurses
VALUES = 5_000  # in the arguments of a call; checks may compare each with each


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
