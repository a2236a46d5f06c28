"""Turns as marked tokens, for the page of `rti view`: by reweighting ratio, by what was edited, by how sure."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rti_jax.reweight import copied_tokens, reasoning_shift_weights
from rti_jax.types import Turn

SURE = 0.9  # a sampled token with a probability of at least this stays unmarked
LEVELS = 3  # shades of a weight on either side of 1


class Piece(NamedTuple):
    """Text with its CSS classes and what a pointer on it says."""

    text: str
    css: str = ""
    title: str = ""


class Tokens:
    """Writes token ids of one run.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or None: then weights stand on ids.
      epsilon: reweight.epsilon_cal of the run.
    """

    def __init__(self, tokenizer: Any, epsilon: float):
        self.tokenizer = tokenizer
        self.epsilon = epsilon
        self._texts: dict[int, str] = {}

    def compared(self, ids: Sequence[int], other: Sequence[int], text: str, css: str) -> list[Piece]:
        """Tokens that the other turn has not are marked; plain text without a tokenizer."""
        if not self.tokenizer or not ids:
            return [Piece(text)]
        same = copied_tokens(other, ids)
        return _merged(Piece(t, "" if s else css) for t, s in zip(self.texts(ids), same, strict=True))

    def weighted(self, turn: Turn, text: str) -> list[Piece]:
        """A corrected turn's tokens, each with its weight if it was scored; those that y had not are marked.

        Without a tokenizer its ids come after its text.
        """
        before = [] if self.tokenizer else [Piece(text + "\n")]
        new = ~copied_tokens(turn.correction.original_ids, turn.response_ids)
        texts = self.texts(turn.response_ids)
        under = (turn.correction.rollout_logprobs, turn.correction.corrector_logprobs)
        if None in under or any(math.isnan(value) for values in under for value in values):
            return before + _merged(Piece(t, "new" if n else "") for t, n in zip(texts, new, strict=True))
        weights = reasoning_shift_weights(under[1], under[0], self.epsilon)
        pieces = []
        for token, changed, weight, rollout, corrector in zip(texts, new, weights, *under, strict=True):
            _, css = level(float(weight), self.epsilon)
            ratio = math.exp(min(corrector - rollout, 700.0))
            title = (
                f"weight {weight:.3f} (ratio {ratio:.3g}); probability {_probability(corrector)} as corrector, "
                f"{_probability(rollout)} as policy; {'edited' if changed else 'copied'}"
            )
            pieces.append(Piece(token, f"w {css}" + (" new" if changed else ""), title))
        return before + pieces

    def sampled(self, turn: Turn) -> list[Piece]:
        """A policy turn's tokens; those that were not sure have the probability with which they were sampled."""
        pieces = []
        for text, logprob in zip(self.texts(turn.response_ids), turn.sampler_logprobs, strict=True):
            sure = math.isnan(logprob) or logprob >= math.log(SURE)
            level = 1 + (logprob < math.log(0.5)) + (logprob < math.log(0.1))
            title = f"sampled with probability {_probability(logprob)}"
            pieces.append(Piece(text) if sure else Piece(text, f"p p{level}", title))
        return _merged(pieces)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; a character of several tokens stands with its last one."""
        if not self.tokenizer:
            return [f"{i} " for i in ids]
        texts, begun = [], []
        for i in ids:
            text = self.decode([*begun, i]) if begun else self._text(i)
            part = text.endswith("\ufffd") and len(begun) < 3
            begun = [*begun, i] if part else []
            texts.append("" if part else text)
        if begun:
            texts[-1] = "\ufffd"
        return texts

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.decode([token])
        return self._texts[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens included; "" without a tokenizer."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False) if self.tokenizer else ""


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind without a title of their own as one, so that a page stays small."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and not piece.title and merged[-1][1:] == piece[1:]:
            merged[-1] = merged[-1]._replace(text=merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return merged


def level(weight: float, epsilon: float) -> tuple[float, str]:
    """(weight, CSS class) by how far it is from 1 on its side of the clip range."""
    far = math.log(weight) / (math.log1p(epsilon) if weight > 1 else -math.log1p(-epsilon)) if epsilon else 0.0
    level = round(max(-1.0, min(1.0, far)) * LEVELS)
    return weight, f"{'up' if level > 0 else 'down'}{abs(level)}" if level else ""


def _probability(logprob: float) -> str:
    return f"{math.exp(min(logprob, 0.0)):.3g}"
