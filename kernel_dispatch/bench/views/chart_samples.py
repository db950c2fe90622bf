"""Every sample of one workload: time across, rounds from top to bottom, so that drift is seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kernel_dispatch.bench.results import Row, Run, Times
from kernel_dispatch.bench.views import figures, svg
from kernel_dispatch.bench.views.axis import Axis, around, labelled_ticks

_STRIP, _TICKS = 46.0, 40.0


def draw(run: Run, rows: Sequence[Row], width: int, inline: bool) -> str:
    timed = [(row, row.times) for row in rows if row.times is not None]
    left = min(max((svg.text_width(r.contender) for r, _ in timed), default=0) + 32, width * 0.34)
    values = [v for _, times in timed for v in (*times.samples, times.median)]
    low, high = around(values, 1.02)
    axis = Axis(low, high, left, width - 10)
    bottom = len(timed) * _STRIP + 6
    body = [*_grid(axis, bottom)]
    for index, (row, times) in enumerate(timed):
        series = run.contenders().index(row.contender)
        body += _strip(row, times, series, axis, 4 + index * _STRIP)
    title = f"Samples of {timed[0][0].workload}" if timed else "Samples"
    return svg.document(width, bottom + _TICKS, title, _described(timed), body, inline)


def _grid(axis: Axis, bottom: float) -> Iterator[str]:
    for value, label in labelled_ticks(axis, _tick):
        x = axis.at(value)
        yield svg.line(x, 0, x, bottom, "grid")
        if label:
            yield svg.text(x, bottom + 15, label, "small muted", "middle")
    yield svg.text(axis.end, bottom + 32, "time per call (log scale)", "small muted", "end")


def _tick(value: float) -> str:
    """`2 ms` rather than `2.00 ms`."""
    number, unit = figures.seconds(value).split(" ")
    return f"{float(number):g} {unit}"


def _strip(row: Row, times: Times, series: int, axis: Axis, y: float) -> Iterator[str]:
    middle, inner = y + _STRIP / 2, _STRIP - 16
    yield svg.mark(series, 8, middle, 5)
    yield svg.text(18, middle + 4, svg.fitted(row.contender, axis.start - 26))
    usable = [value for value in times.samples if math.isfinite(value) and value > 0]
    step = inner / max(len(usable) - 1, 1)
    dots = "".join(
        f"M{svg.number(axis.at(value))} {svg.number(y + 8 + step * index)}h0"
        for index, value in enumerate(usable)
    )
    yield svg.path(dots, f"samples {svg.stroke(series)}") if dots else ""
    if not all(math.isfinite(v) and v > 0 for v in (times.low, times.median, times.high)):
        return
    low, high = axis.at(times.low), axis.at(times.high)
    yield svg.rect(low, y + 4, high - low, _STRIP - 8, "band")
    yield svg.line(axis.at(times.median), y + 3, axis.at(times.median), y + _STRIP - 3, "one")


def _described(timed: Sequence[tuple[Row, Times]]) -> str:
    parts = [
        f"{row.contender}: median {figures.seconds(times.median)} of {len(times.samples)} samples"
        for row, times in timed
    ]
    return "; ".join(parts) or "No row of this workload was timed."
