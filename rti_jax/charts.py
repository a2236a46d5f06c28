"""Line charts as inline SVG, written directly: a page of fifty takes milliseconds and needs no network."""

import html
import math
from collections.abc import Mapping, Sequence

COLORS = ("#1f6fb2", "#d1603d", "#3c8d5a", "#8458a6", "#a58a1c", "#5c6670")
WIDTH, HEIGHT = 380, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 26  # margins around the axes
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
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def line_chart(series: Series, title: str, xlabel: str = "step") -> str:
    """An `<svg>` element with one line for each label; labels, title and xlabel are plain text and are escaped."""
    points = [p for line in series.values() for p in line]
    (x0, x1), (y0, y1) = bounds([x for x, _ in points]), bounds([y for _, y in points])
    pad = 0.04 * (y1 - y0)
    y0, y1 = y0 - pad, y1 + pad

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [_label(LEFT, 14, title, "start", "bold"), _label(WIDTH - RIGHT, HEIGHT - 2, xlabel, "end")]
    for y in ticks(y0, y1):
        parts.append(f'<path d="M{LEFT} {py(y):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(_label(LEFT - 5, py(y) + 3.5, f"{y:.6g}", "end"))
    parts += [_label(px(x), HEIGHT - BOTTOM + 14, f"{x:.6g}", "middle") for x in ticks(x0, x1)]
    for i, (label, line) in enumerate(series.items()):
        parts += _line(label, [(px(x), py(y)) for x, y in line], COLORS[i % len(COLORS)])
    if len(series) > 1:
        parts += [_label(LEFT + 6, TOP + 10 + 13 * i, s, "start", color=COLORS[i % 6]) for i, s in enumerate(series)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
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


def _label(x: float, y: float, text: str, anchor: str, weight: str = "normal", color: str = "#444") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'
