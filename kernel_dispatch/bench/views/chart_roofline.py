"""The roofline: what each row reached, below what memory and arithmetic of the machine allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_dispatch.bench.results import Limits, Row, Run
from kernel_dispatch.bench.views import figures, svg
from kernel_dispatch.bench.views.axis import Axis, around, labelled_ticks

GROUPS = ("model", "op")
_LEFT, _TOP, _KEY = 58.0, 14.0, 18.0


@dataclass(frozen=True)
class _Point:
    workload: str
    contender: str
    intensity: float  # FLOP per byte
    rate: float  # FLOP per second


def draw(run: Run, width: int, inline: bool) -> str:
    rows = [row for row in run.rows if row.group in GROUPS]
    points = [point for row in rows if (point := _point(row)) is not None]
    x, y = _axes(points, run.limits, width)
    below = y.start + 58
    keys = [*_keys(run, points, below, width)]
    height = below + sum(key.height for key in keys)
    body = [*_grid(x, y), *_roofs(run.limits, x, y), *_columns(points, run.limits, x, y)]
    body += [*_marks(run, points, x, y), *_numbers(points, x, y)]
    for key in keys:
        body += key.parts
    if not points:
        body.append(
            svg.text((x.start + x.end) / 2, y.end + 30, "no rows to draw", "muted", "middle")
        )
    return svg.document(width, height, "Roofline", _described(run, points, len(rows)), body, inline)


def _point(row: Row) -> _Point | None:
    """None for what a logarithmic plot cannot show: no time, no FLOPs, no bytes."""
    cost, times = row.roofline, row.times
    if row.status != "ok" or cost is None or times is None:
        return None
    if not (cost.flops > 0 and cost.bytes > 0 and 0 < times.median < math.inf):
        return None
    return _Point(row.workload, row.contender, cost.flops / cost.bytes, cost.flops / times.median)


def _axes(points: Sequence[_Point], limits: Limits, width: float) -> tuple[Axis, Axis]:
    ridge = _ridge(limits)
    low, high = around([*(p.intensity for p in points), *([ridge] if ridge else [])], 2)
    x = Axis(low, high, _LEFT, width - 14)
    low, high = around([*(p.rate for p in points), limits.gemm_flops], 2.5)
    return x, Axis(low, high, _TOP + min(380, width * 0.8), _TOP)


def _ridge(limits: Limits) -> float | None:
    """The intensity from which on arithmetic is what limits."""
    known = limits.gemm_flops > 0 and limits.read_bytes > 0
    return limits.gemm_flops / limits.read_bytes if known else None


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value, label in labelled_ticks(x, figures.short):
        at = x.at(value)
        yield svg.line(at, y.start, at, y.end, "grid")
        yield svg.text(at, y.start + 17, label, "small muted", "middle")
    for value in y.ticks():
        at = y.at(value)
        yield svg.line(x.start, at, x.end, at, "grid")
        yield svg.text(x.start - 7, at + 4, figures.short(value), "small muted", "end")
    yield svg.text(x.end, y.start + 36, "arithmetic intensity, FLOP/byte", "small muted", "end")
    yield svg.text(x.start + 6, y.end + 12, "FLOP/s", "small muted")


def _roofs(limits: Limits, x: Axis, y: Axis) -> Iterator[str]:
    flat, slope = limits.gemm_flops, limits.read_bytes
    if flat > 0:
        start = max(x.low, flat / slope if slope > 0 else x.low)
        yield svg.line(x.at(start), y.at(flat), x.end, y.at(flat), "roof")
        label = f"{figures.flops_rate(flat)} {limits.gemm_library}".strip()
        label = svg.fitted(label, (x.end - x.start) * 0.6, 11)
        yield svg.text(x.end, y.at(flat) - 6, label, "small", "end")
    if slope > 0:
        first = max(x.low, y.low / slope)
        last = min(x.high, (flat or y.high) / slope)
        if first < last:
            yield svg.line(x.at(first), y.at(first * slope), x.at(last), y.at(last * slope), "roof")
            yield _slanted(figures.bytes_rate(slope), slope, first, last, x, y)


def _slanted(label: str, slope: float, first: float, last: float, x: Axis, y: Axis) -> str:
    """Along the memory roof, in the middle of the part that is seen."""
    middle = math.sqrt(first * last)
    across = x.at(last) - x.at(first)
    turn = math.degrees(math.atan2(y.at(last * slope) - y.at(first * slope), across))
    place = f"translate({svg.number(x.at(middle))} {svg.number(y.at(middle * slope))})"
    inner = svg.text(0, -6, label, "small", "middle")
    return f'<g transform="{place} rotate({turn:.1f})">{inner}</g>'


def _columns(points: Sequence[_Point], limits: Limits, x: Axis, y: Axis) -> Iterator[str]:
    """A dotted line from each workload's points up to the roof."""
    for mine in _by_workload(points).values():
        intensity, rates = mine[0].intensity, [point.rate for point in mine]
        roof = min(limits.gemm_flops or math.inf, limits.read_bytes * intensity or math.inf)
        if math.isfinite(roof):
            at = x.at(intensity)
            yield svg.line(at, y.at(min(rates)), at, y.at(max(roof, *rates)), "dots")


def _numbers(points: Sequence[_Point], x: Axis, y: Axis) -> Iterator[str]:
    """Below each column the number under which the key has its workload."""
    taken: list[tuple[float, float]] = []
    for index, (workload, mine) in enumerate(_by_workload(points).items(), 1):
        low = y.at(min(point.rate for point in mine))
        place = _free(x.at(mine[0].intensity), low + 19, y.start - 4, taken)
        taken.append(place)
        yield svg.hinted(workload, [svg.text(*place, str(index), "small strong halo", "middle")])


def _free(
    x: float, top: float, bottom: float, taken: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """The nearest place below a column, then beside it, that no other number has."""
    downwards = max(1, int((bottom - top) // 12) + 1)
    return next(
        (x + side, top + 12 * step)
        for column in range(len(taken) + 1)
        for side in (16.0 * column, -16.0 * column)
        for step in range(downwards)
        if all(abs(x + side - a) >= 15 or abs(top + 12 * step - b) >= 12 for a, b in taken)
    )


def _by_workload(points: Sequence[_Point]) -> dict[str, list[_Point]]:
    found: dict[str, list[_Point]] = {}
    for point in points:
        found.setdefault(point.workload, []).append(point)
    return found


def _marks(run: Run, points: Sequence[_Point], x: Axis, y: Axis) -> Iterator[str]:
    for mine in _by_workload(points).values():
        for point, aside in _beside(mine, y):
            hint = f"{point.workload}, {point.contender}: {figures.flops_rate(point.rate)} at "
            hint += f"{figures.digits(point.intensity)} FLOP/byte"
            series = run.contenders().index(point.contender)
            at = x.at(point.intensity) + aside
            yield svg.hinted(hint, [svg.mark(series, at, y.at(point.rate), 4.5)])


def _beside(points: Sequence[_Point], y: Axis) -> Iterator[tuple[_Point, float]]:
    """Contenders of one workload share its intensity: those that would hide others step aside."""
    placed: list[tuple[float, float]] = []
    for point in points:
        height = y.at(point.rate)
        steps = (sign * step * 9.0 for step in range(len(points)) for sign in (1, -1))
        aside = next(
            step
            for step in steps
            if all(abs(step - a) >= 9 or abs(height - h) >= 9 for a, h in placed)
        )
        placed.append((aside, height))
        yield point, aside


@dataclass(frozen=True)
class _Key:
    parts: list[str]
    height: float


def _keys(run: Run, points: Sequence[_Point], top: float, width: float) -> Iterator[_Key]:
    """Below the plot: which shape is which contender, and which number is which workload."""
    contenders = [c for c in run.contenders() if any(p.contender == c for p in points)]
    entries = [(c, svg.mark(run.contenders().index(c), 6, -4, 4.5)) for c in contenders]
    shapes = _in_columns(entries, top, width)
    numbered = [
        (workload, svg.text(6, 0, str(index), "small strong", "middle"))
        for index, workload in enumerate(_by_workload(points), 1)
    ]
    yield shapes
    yield _in_columns(numbered, top + shapes.height + 6, width)


def _in_columns(entries: Sequence[tuple[str, str]], top: float, width: float) -> _Key:
    if not entries:
        return _Key([], 0)
    widest = min(max(svg.text_width(name) for name, _ in entries) + 34, width - 4)
    columns = max(1, min(len(entries), int(width // widest)))
    parts = []
    for index, (name, symbol) in enumerate(entries):
        x, y = (index % columns) * widest, top + (index // columns) * _KEY
        label = svg.text(18, 0, svg.fitted(name, widest - 20))
        parts.append(f'<g transform="translate({x + 6:.1f} {y:.1f})">{symbol}{label}</g>')
    return _Key(parts, math.ceil(len(entries) / columns) * _KEY + 4)


def _described(run: Run, points: Sequence[_Point], rows: int) -> str:
    limits = run.limits
    roofs = [f"{figures.flops_rate(limits.gemm_flops)} of arithmetic"] * (limits.gemm_flops > 0)
    roofs += [f"{figures.bytes_rate(limits.read_bytes)} of memory"] * (limits.read_bytes > 0)
    return (
        "FLOP/s reached against FLOP per byte, both logarithmic, for models and ops; "
        f"{len(points)} of {rows} rows are drawn (the others have no time or no FLOP count). "
        f"Roofs: {' and '.join(roofs) or 'not measured'}."
    )
