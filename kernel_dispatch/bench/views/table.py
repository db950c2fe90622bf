"""A run as text for a terminal, and as Markdown for a README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kernel_dispatch.bench.comparing import Comparison
from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.views import figures, means
from kernel_dispatch.terminal import Style

_HEAD = ("", "median", "95%", "speed-up", "95%", "limit", "error", "first", "again", "memory")
_EXPLAINED = (
    "median and its 95% interval over rounds that interleave all contenders; speed-up over "
    "{baseline} from pairs within a round; limit: share of what this machine's product rate or "
    "bandwidth allow; error: largest, against float64; first: first call with empty caches; again: "
    "first call in a second process; memory: peak above the process without the case."
)


def text(run: Run, style: Style) -> str:
    blocks = [_heading(run)]
    for workload in run.workloads():
        rows = run.of(workload)
        lines = _aligned([_HEAD, *map(_cells, rows)])
        head = f"{workload}  {_conditions(rows[0])}"
        blocks.append("\n".join([style.bold(head), *lines, *_reasons(rows, style)]))
    blocks += ["\n".join(_standings(run, group, style)) for group in _groups_to_sum_up(run)]
    blocks.append(_EXPLAINED.format(baseline=run.baseline))
    return "\n\n".join(blocks)


def markdown(run: Run, contenders: Sequence[str] | None = None) -> str:
    """Milliseconds and speed-ups, one line per workload; a dash has its reason below the table."""
    names = [one for one in contenders or run.contenders() if one in run.contenders()]
    lines = [f"| workload | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    reasons: list[str] = []
    for workload in run.workloads():
        rows = {row.contender: row for row in run.of(workload)}
        shown = [_milliseconds(rows.get(name)) for name in names]
        lines.append(f"| {workload} | {' | '.join(shown)} |")
        reasons += [
            f"- {workload}, {name}: {rows[name].status}: {rows[name].reason}"
            for name in names
            if name in rows and rows[name].times is None
        ]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def _groups_to_sum_up(run: Run) -> list[str]:
    """A mean over one workload says nothing new, and one over models and tiny graphs nothing."""
    workloads = {row.workload: row.group for row in run.rows}
    return [g for g in dict.fromkeys(workloads.values()) if [*workloads.values()].count(g) > 1]


def _standings(run: Run, group: str, style: Style) -> Iterator[str]:
    found = means.standings([row for row in run.rows if row.group == group], run.baseline)
    count = len(found.common_cases)
    yield style.bold(
        f"geometric means of speed-ups, over the {count} {group} cases that all passed"
    )
    for one in found.standings:
        if one.contender != run.baseline:
            mean = f"{one.common:.2f}" if one.common is not None else "-"
            yield f"{one.contender}: {mean}, passed {one.passed} of {one.rows}"


def comparison(found: Comparison, style: Style) -> str:
    marks = {"slower": "problem", "broken": "problem", "gone": "problem", "faster": "ok"}
    lines = [
        f"{style.mark(marks.get(one.verdict, 'info'))} {one.workload}  {one.contender}  "
        f"{one.verdict}"
        + (f"  {one.text}" if one.text else f"  {one.factor:.3f} x the time before")
        for one in found.changes
    ]
    slower = sum(one.verdict == "slower" for one in found.changes)
    broken = sum(one.verdict in ("broken", "gone") for one in found.changes)
    by = "time relative to the baseline of its run" if found.by == "ratio" else "seconds"
    end = (
        f"{slower} slower, {broken} broken or gone, of {len(found.changes)} rows; slower means "
        f"more than {found.limit:.1%} in {by} and intervals that do not touch."
    )
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes), end])


def _heading(run: Run) -> str:
    machine, limits = run.machine, run.limits
    commit = str(run.commit.get("id", ""))[:10]
    parts = [
        f"{machine.get('cpu', '')} ({machine.get('cpu_capability', '')})",
        f"{machine.get('threads', '?')} threads",
        f"torch {machine.get('torch', '?')}",
        f"kernel-dispatch at {commit}{' with changes' if run.commit.get('dirty') else ''}"
        if commit
        else "",
    ]
    reached = (
        f"limits, measured beside it: {limits.gemm_flops / 1e9:.0f} GFLOP/s "
        f"({limits.gemm_library}), "
        f"{limits.read_bytes / 1e9:.1f} GB/s read"
        if limits.gemm_flops
        else ""
    )
    return "\n".join(filter(None, [", ".join(filter(None, parts)), reached]))


def _conditions(row: Row) -> str:
    gradients = "forward and backward" if row.training else "no gradients"
    return f"({row.dtype}, {row.device}, {gradients})"


def _cells(row: Row) -> tuple[str, ...]:
    if row.times is None:
        return (row.contender, row.status)
    times, speedup, compilation = row.times, row.speedup, row.compilation
    return (
        row.contender,
        figures.seconds(times.median),
        f"{figures.seconds(times.low)} to {figures.seconds(times.high)}",
        f"{speedup.value:.2f}" if speedup else "-",
        f"{speedup.low:.2f} to {speedup.high:.2f}" if speedup else "-",
        _optional(row.limit_fraction, "{:.0%}".format),
        f"{row.numerics.error:.1e}" if row.numerics else "-",
        _optional(compilation.first_call_s, figures.seconds),
        _optional(compilation.second_process_s, figures.seconds),
        _optional(row.peak_memory_bytes, figures.bytes_),
    )


def _optional(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _reasons(rows: Iterable[Row], style: Style) -> list[str]:
    return [
        f"{style.mark('info' if row.status in ('ok', 'missing') else 'warn')} {row.contender}: "
        f"{row.reason}"
        for row in rows
        if row.reason
    ]


def _milliseconds(row: Row | None) -> str:
    if row is None or row.times is None:
        return "-"
    speedup = f" ({row.speedup.value:.2f}x)" if row.speedup is not None else ""
    return f"{row.times.median * 1e3:.3g}{speedup}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = max(len(row) for row in rows)
    widths = [max((len(r[i]) for r in rows if len(r) > i), default=0) for i in range(columns)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
