"""Which server gets a request: the one that has the least left to do, what it need not prefill again counted in.

A server keeps the keys and values of prompts that it has answered, so the next turn of an episode is cheapest where the
turns before it were. The cost of a place is

    tokens of the requests that it has running  +  tokens of this prompt whose prefix it has not seen

A request goes where that is least: to its prefix while servers are about equally busy, elsewhere once that pays.
"""

import collections
from collections.abc import Hashable, Iterator, Sequence

BLOCK = 64  # tokens; vLLM's own blocks are smaller or equal
MOST_BLOCKS = 200_000  # remembered; the longest unused are forgotten


class PrefixTable:
    """What prefixes each server has seen, in blocks of tokens; a guess at its cache, never more."""

    def __init__(self, most: int = MOST_BLOCKS):
        self._most = most
        self._seen: collections.OrderedDict[int, set[Hashable]] = collections.OrderedDict()

    def add(self, tokens: Sequence[int], server: Hashable) -> None:
        """`server` has computed `tokens`."""
        for block in _blocks(tokens):
            self._seen.setdefault(block, set()).add(server)
            self._seen.move_to_end(block)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def lengths(self, tokens: Sequence[int], servers: Sequence[Hashable]) -> dict[Hashable, int]:
        """Leading tokens that each of `servers` has seen, in whole blocks."""
        found, left = dict.fromkeys(servers, 0), set(servers)
        for count, block in enumerate(_blocks(tokens), 1):
            left &= self._seen.get(block, set())
            if not left:
                break
            found |= dict.fromkeys(left, count * BLOCK)
        return found

    def forget(self, server: Hashable) -> None:
        """`server` has lost its cache."""
        for block in list(self._seen):
            self._seen[block].discard(server)
            if not self._seen[block]:
                del self._seen[block]

    def clear(self) -> None:
        """Every server has lost its cache, as after new weights."""
        self._seen.clear()


def cheapest(tokens: Sequence[int], work: dict[Hashable, int], table: PrefixTable) -> tuple[Hashable, int]:
    """The server for a prompt, and how many leading tokens it has seen.

    Args:
      work: tokens that each server has left to do; among equals the first one wins.
    """
    seen = table.lengths(tokens, list(work))
    server = min(work, key=lambda s: work[s] - seen[s])
    return server, seen[server]


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """A hash of each prefix that ends at a whole block."""
    prefix = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        prefix = hash((prefix, tuple(tokens[start : start + BLOCK])))
        yield prefix
