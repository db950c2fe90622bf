"""Bars of speed-up over the baseline, one per workload and contender, with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernel_dispatch.bench.results import Row, Run, Speedup
from kernel_dispatch.bench.views import figures, svg
from kernel_dispatch.bench.views.axis import Axis, around, labelled_ticks
from kernel_dispatch.bench.views.means import usable_speedup

_BAR, _HEADING, _GAP, _TICKS, _VALUE = 19.0, 21.0, 7.0, 44.0, 78.0


def draw(run: Run, rows: Sequence[Row], width: int, inline: bool) -> str:
    """Bars start at 1 on a logarithmic axis: twice as fast and half as fast are equally long."""
    shown = [row for row in rows if row.contender != run.baseline]
    workloads = list(dict.fromkeys(row.workload for row in shown))
    names = [_name(row, shown) for row in shown]
    left = min(max((svg.text_width(n) for n in names), default=0) + 32, width * 0.36)
    axis = _axis(shown, left, width - _VALUE)
    top = _TICKS - 8
    bottom = top + len(workloads) * (_HEADING + _GAP) + len(shown) * _BAR
    body = [*_grid(axis, run.baseline, top, bottom, width), *_rows(run, shown, axis, top, width)]
    title = f"Speed-up over {run.baseline}"
    return svg.document(width, bottom + _TICKS, title, _described(run, shown), body, inline)


def _axis(rows: Sequence[Row], start: float, end: float) -> Axis:
    values = [value for row in rows if (value := usable_speedup(row)) is not None]
    low, high = around([*values, 1.0])
    # An interval may reach far beyond all values: the axis follows it by a factor, not for ever.
    ends = [
        end for row in rows if usable_speedup(row) and row.speedup for end in _ends(row.speedup)
    ]
    nearby = [each for each in ends if low / 1.5 <= each <= high * 1.5]
    low, high = around([*values, *nearby, 1.0], 1.03)
    return Axis(min(low, 0.97), max(high, 1.03), start, end)


def _ends(speedup: Speedup) -> tuple[float, float]:
    return speedup.low, speedup.high


def _grid(axis: Axis, baseline: str, top: float, bottom: float, width: float) -> Iterator[str]:
    for value, label in labelled_ticks(axis, figures.ratio_tick, keep=1.0):
        x = axis.at(value)
        yield svg.line(x, top, x, bottom, "one" if value == 1 else "grid")
        if label:
            yield svg.text(x, top - 7, label, "small muted", "middle")
            yield svg.text(x, bottom + 16, label, "small muted", "middle")
    title = f"times as fast as {svg.fitted(baseline, width / 4)} (log scale)"
    yield svg.text(axis.end, bottom + 34, title, "small muted", "end")


def _rows(run: Run, rows: Sequence[Row], axis: Axis, top: float, width: float) -> Iterator[str]:
    y = top
    for workload in dict.fromkeys(row.workload for row in rows):
        y += _GAP
        yield svg.text(0, y + 14, svg.fitted(workload, axis.at(1) - 8, 12.6), "strong")
        y += _HEADING
        mine = [row for row in rows if row.workload == workload]
        for row in mine:
            series = run.contenders().index(row.contender)
            hint = f"{workload}, {_name(row, rows)}: {_said(row)}"
            yield svg.hinted(hint, _row(row, _name(row, rows), series, axis, y, width))
            y += _BAR


def _row(row: Row, name: str, series: int, axis: Axis, y: float, width: float) -> Iterator[str]:
    middle, one = y + _BAR / 2, axis.at(1)
    yield svg.mark(series, 8, middle, 5)
    yield svg.text(18, middle + 4, svg.fitted(name, axis.start - 26))
    value = usable_speedup(row)
    if value is None or row.speedup is None:
        if row.status not in ("ok", "missing"):
            yield svg.cross(one, middle)
        yield svg.text(
            width, middle + 4, svg.fitted(_status(row), _VALUE, 11), "small muted", "end"
        )
        return
    x = axis.at(value)
    yield svg.rect(min(x, one), y + 3, abs(x - one), _BAR - 6, f"bar {svg.fill(series)}")
    if row.speedup.low <= row.speedup.high:  # false for NaN
        low, high = (axis.at(end) for end in _ends(row.speedup))
        yield svg.line(low, middle, high, middle, "whisker")
        yield svg.line(low, middle - 3.5, low, middle + 3.5, "whisker")
        yield svg.line(high, middle - 3.5, high, middle + 3.5, "whisker")
    yield svg.text(width, middle + 4, figures.ratio(value), anchor="end")


def _name(row: Row, rows: Sequence[Row]) -> str:
    """With what tells them apart where a contender has several rows of one workload."""
    same = [r for r in rows if (r.workload, r.contender) == (row.workload, row.contender)]
    if len(same) == 1:
        return row.contender
    return f"{row.contender} {row.device} {row.dtype}{' training' if row.training else ''}"


def _status(row: Row) -> str:
    return row.status if row.status != "ok" else "no pair"


def _said(row: Row) -> str:
    value = usable_speedup(row)
    if value is None or row.speedup is None:
        return f"{row.status} {row.reason}".strip()
    return f"{figures.ratio(value)} (95%: {figures.ratio_range(*_ends(row.speedup))})"


def _described(run: Run, rows: Sequence[Row]) -> str:
    parts = []
    for contender in dict.fromkeys(row.contender for row in rows):
        mine = [row for row in rows if row.contender == contender]
        values = [value for row in mine if (value := usable_speedup(row)) is not None]
        span = f"{figures.ratio(min(values))} to {figures.ratio(max(values))}, " if values else ""
        parts.append(f"{contender}: {span}{len(values)} of {len(mine)} rows have a speed-up")
    head = f"Horizontal bars from 1, {run.baseline}'s speed, with 95% intervals. "
    return head + ("; ".join(parts) or "There are no rows to draw") + "."
