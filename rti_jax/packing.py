"""Which row goes where: first-fit decreasing into lines of a few lengths, lines into micro-batches of static shape."""

import dataclasses
from collections.abc import Sequence

Shape = tuple[int, int]


@dataclasses.dataclass
class Line:
    """One line of a micro-batch while it is filled: its length (a bucket) and the indices of the rows in it."""

    bucket: int
    rows: list[int]
    used: int = 0


def plan_microbatches(
    lengths: Sequence[int], buckets: Sequence[int], longest_lines: int, multiple: int = 1, packing: bool = True
) -> list[tuple[Shape, list[list[int]]]]:
    """Micro-batches as (shape, rows of each line); a shape depends on its bucket alone, so few programs are compiled.

    Every micro-batch has about as many tokens: `longest_lines` lines of the longest bucket, more of a shorter one.

    Args:
      lengths: tokens of each row, none longer than the longest bucket.
      multiple: the number of lines is rounded up to a multiple of this.
      packing: False puts one row into each line.

    Returns:
      Shapes (lines, bucket) with at most that many lines of row indices; the remaining ones are padding.
    """
    sizes = sorted(set(buckets))
    counts = {b: -(-longest_lines * (sizes[-1] // b) // multiple) * multiple for b in sizes}
    lines = _promote(first_fit_decreasing(lengths, sizes, packing), sizes, counts, packing)
    plan = []
    for bucket in sizes:
        chosen = [line.rows for line in lines if line.bucket == bucket]
        for start in range(0, len(chosen), counts[bucket]):
            plan.append(((counts[bucket], bucket), chosen[start : start + counts[bucket]]))
    return plan


def first_fit_decreasing(lengths: Sequence[int], sizes: Sequence[int], packing: bool) -> list[Line]:
    """Each row, longest first, goes into the first line that has room, else opens one of the smallest size it fits."""
    lines: list[Line] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (line for line in lines if line.used + lengths[i] <= line.bucket) if packing else iter(())
        line = next(fits, None)
        if line is None:
            line = Line(next(b for b in sizes if b >= lengths[i]), [])
            lines.append(line)
        line.rows.append(i)
        line.used += lengths[i]
    return lines


def _promote(lines: list[Line], sizes: Sequence[int], counts: dict[int, int], packing: bool) -> list[Line]:
    """Moves the lines that would fill a last micro-batch only in part into free lines of the next larger bucket.

    Done where that saves the micro-batch: the larger bucket's own last one has to have the room anyway.
    """
    lines = list(lines)
    for small, large in zip(sizes, sizes[1:], strict=False):
        here = [line for line in lines if line.bucket == small]
        rest = here[len(here) - len(here) % counts[small] :]
        free = -sum(line.bucket == large for line in lines) % counts[large]
        each = large // small if packing else 1
        if not rest or len(rest) > free * each:
            continue
        lines = [line for line in lines if line not in rest]
        for start in range(0, len(rest), each):
            rows = [i for line in rest[start : start + each] for i in line.rows]
            lines.append(Line(large, rows))
    return lines
