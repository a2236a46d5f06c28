"""Which row goes where: first-fit decreasing into lines of a few lengths, lines into micro-batches of static shape."""

import dataclasses
from collections.abc import Iterator, Sequence

Shape = tuple[int, int]

# From so many tokens in a micro-batch on, what counts is their padding; below, their number.
LARGE = 2**15
REST = 8  # the smaller shape for what is left over has this fraction of the lines: half of it is padding on average


@dataclasses.dataclass
class Line:
    """One line of a micro-batch while it is filled: its length (a bucket) and the indices of the rows in it."""

    bucket: int
    rows: list[int]
    used: int = 0


def plan_microbatches(
    lengths: Sequence[int], buckets: Sequence[int], longest_lines: int, multiple: int = 1, packing: bool = True
) -> list[tuple[Shape, list[list[int]]]]:
    """Micro-batches as (shape, rows of each line), of at most two shapes for each bucket, so few programs are compiled.

    Every micro-batch has about as many tokens: `longest_lines` lines of the longest bucket, more of a shorter one. If
    these are many, what is left over of a bucket may go into smaller ones (`rest_lines`), and lines that a micro-batch
    has to have anyway are filled before a shorter one is opened.

    Args:
      lengths: tokens of each row, none longer than the longest bucket.
      multiple: devices that share the lines, each an equal block of them. Their number is rounded up to a multiple of
        it, and devices get lines of about the same attention cost.
      packing: False puts one row into each line.

    Returns:
      Shapes (lines, bucket) with at most that many lines of row indices; empty and remaining ones are padding.
    """
    sizes = sorted(set(buckets))
    counts = line_counts(sizes, longest_lines, multiple)
    rests = {b: rest_lines(n, b, multiple) for b, n in counts.items()}
    if longest_lines * sizes[-1] >= LARGE:
        lines = fill_from_the_longest(lengths, sizes, counts, rests, packing)
    else:
        lines = _promote(first_fit_decreasing(lengths, sizes, packing), sizes, counts, packing)
    plan = []
    for bucket in sizes:
        chosen = [line.rows for line in lines if line.bucket == bucket and line.rows]
        if multiple > 1:
            chosen.sort(key=lambda rows: -attention_cost(rows, lengths))
        start = 0
        for count in _counts(len(chosen), counts[bucket], rests[bucket]):
            plan.append(((count, bucket), deal(chosen[start : start + count], count, multiple)))
            start += count
    return plan


def line_counts(buckets: Sequence[int], longest_lines: int, multiple: int) -> dict[int, int]:
    """Lines of a full micro-batch of each bucket."""
    return {b: -(-longest_lines * (max(buckets) // b) // multiple) * multiple for b in buckets}


def rest_lines(count: int, bucket: int, multiple: int) -> int:
    """Lines of the smaller shape beside (count, bucket); `count` itself where there is none."""
    return -(-count // REST // multiple) * multiple if count * bucket >= LARGE else count


def attention_cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """(query, key) pairs within the rows of a line, up to a factor: what causal attention by segment has to compute."""
    return sum(lengths[i] ** 2 for i in rows)


def _counts(lines: int, count: int, rest: int) -> Iterator[int]:
    """Sizes of the micro-batches that hold so many lines: full ones, then one or some smaller ones if that is less."""
    yield from [count] * (lines // count)
    if left := lines % count:
        small = -(-left // rest)
        yield from [rest] * small if small * rest < count else [count]


def deal(lines: list[list[int]], count: int, devices: int) -> list[list[int]]:
    """Lines, heaviest first, to and fro over the devices; each device's are a block of `count / devices` places."""
    if devices == 1:
        return lines
    blocks: list[list[list[int]]] = [[] for _ in range(devices)]
    for i, line in enumerate(lines):
        turn, place = divmod(i, devices)
        blocks[place if turn % 2 == 0 else devices - 1 - place].append(line)
    return [line for block in blocks for line in block + [[]] * (count // devices - len(block))]


def fill_from_the_longest(
    lengths: Sequence[int], sizes: Sequence[int], counts: dict[int, int], rests: dict[int, int], packing: bool
) -> list[Line]:
    """First-fit decreasing, bucket by bucket from the longest, with all lines that its micro-batches have.

    Rows that need a bucket open as many lines of it as whole micro-batches hold; shorter rows fill those before a line
    of a shorter bucket is opened.
    """
    lines: list[Line] = []
    rows = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for bucket, shorter in zip(sizes[::-1], [*sizes[-2::-1], 0], strict=True):
        for i in (i for i in rows if shorter < lengths[i] <= bucket):
            free = (line for line in lines if line.used + lengths[i] <= line.bucket and (packing or not line.rows))
            line = next(free, None)
            if line is None:
                line = Line(bucket, [])
                lines.append(line)
            line.rows.append(i)
            line.used += lengths[i]
        opened = sum(line.bucket == bucket for line in lines)
        lines += [Line(bucket, []) for _ in range(sum(_counts(opened, counts[bucket], rests[bucket])) - opened)]
    return lines


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
