"""The table of all rows. Cells carry what they sort by; the page's script does the sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kernel_dispatch.bench.results import STATUSES, Row, Run
from kernel_dispatch.bench.views import figures, page_charts
from kernel_dispatch.bench.views.markup import escaped
from kernel_dispatch.bench.views.page_header import conditions

_LONG_REASON = 240


@dataclass(frozen=True)
class _Column:
    title: str
    meaning: str
    sorts_by: Callable[[Row], float | str | None]
    shown: Callable[[Row], str]
    numeric: bool = True


def table(run: Run) -> str:
    columns = _columns(run)
    heads = "".join(
        f'<th scope="col" title="{escaped(each.meaning)}"'
        f"{_NUMERIC if each.numeric else ''}>{escaped(each.title)}</th>"
        for each in columns
    )
    bodies = "".join(_body(row, columns, run) for row in run.rows)
    return f'<table id="rows"><thead><tr>{heads}</tr></thead>{bodies}</table>'


def filters(run: Run) -> str:
    """Hidden until the script that makes them work shows them."""
    statuses = list(dict.fromkeys(row.status for row in run.rows))
    return (
        '<form id="filters" hidden><label>Workload <input type="search" name="workload" '
        'autocomplete="off" placeholder="part of its name"></label>'
        f"{_choice('contender', run.contenders())}{_choice('status', statuses)}"
        '<output id="shown" aria-live="polite"></output></form>'
    )


def _choice(name: str, values: list[str]) -> str:
    options = "".join(
        f'<option value="{escaped(value)}">{escaped(value)}</option>' for value in values
    )
    return (
        f'<label>{name.capitalize()} <select name="{name}"><option value="">all</option>'
        f"{options}</select></label>"
    )


_NUMERIC = ' class="number" data-numeric'


def _columns(run: Run) -> tuple[_Column, ...]:
    varied = len({conditions(row) for row in run.rows}) > 1
    return (
        _Column("Workload", "What ran", lambda r: r.workload, _workload(run, varied), False),
        _Column("Contender", "Who ran it", lambda r: r.contender, _contender(run), False),
        _Column("Status", "What became of the row", lambda r: r.status, _status, False),
        _Column("Median", "Time per call", _median, lambda r: figures.seconds(_median(r))),
        _Column("95% of median", "Sorted by its width", _spread, _median_range),
        _Column("Speed-up", f"Over {run.baseline}, with 95% interval", _speedup, _speedup_shown),
        _Column("Of limit", "Share of what the machine allows", lambda r: r.limit_fraction, _limit),
        _Column("Error", "Largest, against float64", _error, lambda r: figures.error(_error(r))),
        _Column("Allowed", "Error allowed", _allowed, lambda r: figures.error(_allowed(r))),
        _seconds("First call", "Cold: with empty caches", "first_call_s"),
        _seconds("Second process", "Warm: with the caches the first one left", "second_process_s"),
        _Column("Peak memory", "Above the process alone", lambda r: r.peak_memory_bytes, _memory),
        _count("Graphs", "graphs"),
        _count("Breaks", "breaks"),
        _count("Recompiles", "recompiles"),
        _count("Fallbacks", "fallbacks"),
    )


def _seconds(title: str, meaning: str, field: str) -> _Column:
    def value(row: Row) -> float | None:
        found: float | None = getattr(row.compilation, field)
        return found

    return _Column(title, meaning, value, lambda row: figures.seconds(value(row)))


def _count(title: str, field: str) -> _Column:
    def value(row: Row) -> int | None:
        found: int | None = getattr(row.compilation, field)
        return found

    return _Column(title, f"{title} of the compiled case", value, lambda r: figures.count(value(r)))


def _workload(run: Run, varied: bool) -> Callable[[Row], str]:
    places = {name: number for number, name in enumerate(run.workloads())}

    def shown(row: Row) -> str:
        told = f"<small>{escaped(conditions(row))}</small>" if varied else ""
        return f'<a href="#workload-{places[row.workload]}">{escaped(row.workload)}</a>{told}'

    return shown


def _contender(run: Run) -> Callable[[Row], str]:
    return lambda row: f"{page_charts.key(run, row.contender)} {escaped(row.contender)}"


def _status(row: Row) -> str:
    kind, sign = ("good", "\u2713") if row.status == "ok" else ("bad", "\u2717")
    if row.status == "missing":
        kind, sign = "absent", "\u2013"
    meaning = escaped(STATUSES.get(row.status, ""))
    return f'<span class="{kind}" title="{meaning}">{sign} {escaped(row.status)}</span>'


def _median(row: Row) -> float | None:
    return row.times.median if row.times else None


def _spread(row: Row) -> float | None:
    times = row.times
    return (times.high - times.low) / times.median if times and times.median else None


def _median_range(row: Row) -> str:
    return figures.seconds_range(row.times.low, row.times.high) if row.times else figures.NONE


def _speedup(row: Row) -> float | None:
    return row.speedup.value if row.speedup else None


def _speedup_shown(row: Row) -> str:
    if row.speedup is None:
        return figures.NONE
    between = figures.ratio_range(row.speedup.low, row.speedup.high)
    return f"{figures.ratio(row.speedup.value)} <small>({between})</small>"


def _limit(row: Row) -> str:
    return figures.percent(row.limit_fraction)


def _error(row: Row) -> float | None:
    return row.numerics.error if row.numerics else None


def _allowed(row: Row) -> float | None:
    return row.numerics.allowed if row.numerics else None


def _memory(row: Row) -> str:
    return figures.bytes_(row.peak_memory_bytes)


def _body(row: Row, columns: tuple[_Column, ...], run: Run) -> str:
    """A body of its own for each row, so that a reason stays with its row when they are sorted."""
    first, *rest = columns
    cells = f'<th scope="row"{_sort_key(first, row)}>{first.shown(row)}</th>'
    cells += "".join(
        f"<td{_NUMERIC.split(' data')[0] if each.numeric else ''}{_sort_key(each, row)}>"
        f"{each.shown(row)}</td>"
        for each in rest
    )
    kind = "baseline" if row.contender == run.baseline else "compared"
    told = {"workload": row.workload, "contender": row.contender, "status": row.status}
    data = "".join(f' data-{name}="{escaped(value)}"' for name, value in told.items())
    return f'<tbody class="{kind}"{data}><tr>{cells}</tr>{_reason(row, len(columns))}</tbody>'


def _sort_key(column: _Column, row: Row) -> str:
    """None for what is missing, which sorts last either way."""
    value = column.sorts_by(row)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and math.isinf(value):
        value = "Infinity" if value > 0 else "-Infinity"
    return f' data-sort="{escaped(value)}"'


def _reason(row: Row, columns: int) -> str:
    if not row.reason and row.status == "ok":
        return ""
    text = row.reason.strip() or f"no reason was recorded ({STATUSES.get(row.status, row.status)})"
    inner = f"<p>{escaped(text)}</p>"
    if len(text) > _LONG_REASON:
        head = escaped(text[:_LONG_REASON].splitlines()[0])
        inner = f"<details><summary>{head} \u2026</summary>{inner}</details>"
    return f'<tr class="reason"><td colspan="{columns}"><div>{inner}</div></td></tr>'
