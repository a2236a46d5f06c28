"""Line charts as inline SVG, written directly: a page of fifty takes milliseconds and needs no network."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

COLORS = ("#1f6fb2", "#d1603d", "#3c8d5a", "#8458a6", "#a58a1c", "#5c6670")
WIDTH, HEIGHT = 380, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 26  # margins around the axes
LEGEND_LINE, CHARACTER = 13, 5.4  # height of a line of the legend; width of a character, about
TITLE_CHARACTERS = 62  # longer ones are squeezed
MARKERS_UP_TO = 40  # points

Series = Mapping[str, Sequence[tuple[float, float]]]  # label -> points (x, y) in the order of x


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis: the values' own, or a little around them where they are all equal."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        return low, high
    pad = abs(low) * 0.1
    return (low - pad, high + pad) if pad else (0.0, 1.0)


def line_chart(series: Series, title: str, xlabel: str = "step") -> str:
    """An `<svg>` element with one line for each label; labels, title and xlabel are plain text and are escaped."""
    points = [p for line in series.values() for p in line]
    (x0, x1), (y0, y1) = bounds([x for x, _ in points]), bounds([y for _, y in points])
    pad = 0.04 * (y1 - y0)
    y0, y1 = y0 - pad, y1 + pad
    legend, rows = _legend(series) if len(series) > 1 else ([], 0)
    top, height = TOP + LEGEND_LINE * rows, HEIGHT + LEGEND_LINE * rows

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return height - BOTTOM - (y - y0) / (y1 - y0) * (height - top - BOTTOM)

    squeezed = f'textLength="{WIDTH - 16}" lengthAdjust="spacingAndGlyphs"' if len(title) > TITLE_CHARACTERS else ""
    parts = [_label(8, 14, title, "start", f'font-weight="bold" {squeezed}'), *legend]
    parts += [_label(WIDTH - RIGHT, height - 2, xlabel, "end")]
    for y in ticks(y0, y1):
        parts.append(f'<path d="M{LEFT} {py(y):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(_label(LEFT - 5, py(y) + 3.5, f"{y:.6g}", "end"))
    parts += [_label(px(x), height - BOTTOM + 14, f"{x:.6g}", "middle") for x in ticks(x0, x1)]
    for i, (label, line) in enumerate(series.items()):
        parts += _line(label, [(px(x), py(y)) for x, y in line], COLORS[i % len(COLORS)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="10" fill="#444">'
        + "".join(parts)
        + "</svg>"
    )


def _line(label: str, points: Sequence[tuple[float, float]], color: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"><title>{html.escape(label)}</title>'
        "</polyline>"
    ]
    if len(points) <= MARKERS_UP_TO:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{color}"/>' for x, y in points]
    return parts


def _legend(labels: Iterable[str]) -> tuple[list[str], int]:
    """The labels in their colours, side by side under the title; and the lines that they take."""
    parts, x, line = [], LEFT, 0
    for i, label in enumerate(labels):
        width = 14 + CHARACTER * len(label)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, line = LEFT, line + 1
        y, color = TOP + 2 + LEGEND_LINE * line, COLORS[i % len(COLORS)]
        parts.append(f'<path d="M{x:.1f} {y - 3.5:.1f}h9" stroke="{color}" stroke-width="2"/>')
        parts.append(_label(x + 12, y, label, "start", f'fill="{color}"'))
        x += width + 8
    return parts, line + 1


def _label(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    style = f" {style.strip()}" if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'
