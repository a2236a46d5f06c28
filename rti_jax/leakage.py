"""The deterministic leak guard: no value that only the evidence holds may appear in a corrected turn.

It looks for the evidence's values (ids, numbers, coordinates, names) in the replacement, thinking included, and lets
pass what stands in the visible history, the original turn, the tool schemas or the environment's public text. Text is
compared without regard to case, accents and white space, numbers by their value; both match whole words only. Numbers
of fewer than three significant digits are exempt: turn counts, list positions and small sums are derived, not leaked.

It complements the LLM verifier, which sees paraphrases that no string comparison can see, and is counted apart.
"""

import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal

# A number that is not part of a word or of a longer number: -89.6501, 1,234, 39., .5
_END = r"(?:(?=[nsew]\b)|(?!\w|\.\d))"  # a compass letter may follow, another digit group may not
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?" + _END + r"|(?<![\w.])\.\d+" + _END, re.IGNORECASE
)
_ID = re.compile(r"(?<![^\W_])(?=[\w-]*\d)(?=[\w-]*[^\W\d_])[\w-]{4,}(?![^\W_])")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
EXEMPT_DIGITS = 3


def leaks(replacement: str, values: Iterable[str], visible: Iterable[str], evidence_text: str = "") -> tuple[str, ...]:
    """The privileged values that a replacement reveals, in the order of the evidence; empty if there are none.

    Args:
      replacement: the turn as plain text, thinking and tool calls included.
      values: what the environment declares as privileged (`Evidence.values`).
      visible: texts whose values are not privileged: history, original turn, tool schemas, public text.
      evidence_text: `Evidence.text`, whose numbers and ids (mixed letters and digits) are privileged too.
    """
    written, shown = _Text([replacement]), _Text(visible)
    found = [v for v in values if _leaked(v, written, shown)]
    found += [v for v in (*_number_strings(evidence_text), *_ID.findall(evidence_text)) if _leaked(v, written, shown)]
    return tuple(dict.fromkeys(found))


class _Text:
    """Texts prepared for comparison: their numbers, and one folded string."""

    def __init__(self, texts: Iterable[str]):
        self.folded = " \0 ".join(map(_fold, texts))
        self.numbers = numbers(self.folded)

    def has_words(self, folded: str) -> bool:
        """Whether `folded` stands here as whole words."""
        before = r"(?<!\w)" if folded[0].isalnum() else ""
        after = r"(?!\w)" if folded[-1].isalnum() else ""
        return folded in self.folded and re.search(before + re.escape(folded) + after, self.folded) is not None


def _leaked(value: str, written: _Text, shown: _Text) -> bool:
    folded = _fold(value)
    if re.search(r"[^\W\d_]", folded):  # a name or an id
        return len(folded) > 1 and written.has_words(folded) and not shown.has_words(folded)
    privileged = {n for n in numbers(folded) if not exempt(n)}
    return bool((privileged & written.numbers) - shown.numbers)


def numbers(text: str) -> set[Decimal]:
    """The numbers of a text by value: 1,234 is 1234, 39.50 is 39.5, and a sign does not matter."""
    return {Decimal(s.replace(",", "")).normalize() for s in _number_strings(text)}


def exempt(number: Decimal) -> bool:
    """True for a number of fewer than three significant digits (zeros of an integer count: 100 has three)."""
    return len(f"{number:f}".replace(".", "").lstrip("0")) < EXEMPT_DIGITS


def _number_strings(text: str) -> list[str]:
    return _NUMBER.findall(text)


def _fold(text: str) -> str:
    """Lower case, no accents, single spaces; JSON escapes of letters are undone first."""
    plain = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), text)
    decomposed = unicodedata.normalize("NFKD", plain).casefold()
    return " ".join("".join(c for c in decomposed if not unicodedata.combining(c)).split())
