"""Everything about one workload, behind its name: samples, reports, how each contender was run."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.views import drawing, figures, page_charts, page_header
from kernel_dispatch.bench.views.markup import escaped


def details(run: Run) -> str:
    return "".join(_one(run, number, name) for number, name in enumerate(run.workloads()))


def _one(run: Run, number: int, workload: str) -> str:
    rows = run.of(workload)
    passed = sum(row.status == "ok" for row in rows)
    reports = "".join(_report(row) for row in rows if row.report)
    contenders = "".join(_contender(run, row) for row in rows)
    return (
        f'<details class="workload" id="workload-{number}"><summary><strong>{escaped(workload)}'
        f"</strong> <small>{passed} of {len(rows)} ok</small></summary>{_samples(run, rows)}"
        f'<h3>How each contender was run</h3><dl class="runs">{contenders}</dl>{reports}'
        f"<h3>Settings</h3><p>{_conditions(rows)}. {page_header.settings(run)}.</p></details>"
    )


def _samples(run: Run, rows: Sequence[Row]) -> str:
    if not any(row.times and row.times.samples for row in rows):
        return "<p>No row of this workload was timed.</p>"
    strips = page_charts.both_widths(
        lambda width: drawing.samples(run, rows, width=width, inline=True)
    )
    return f"<figure>{strips}<figcaption>{_CAPTION}</figcaption></figure>"


_CAPTION = (
    "One dot per round, the first round on top; the line is the median, the band its 95% "
    "confidence interval."
)


def _contender(run: Run, row: Row) -> str:
    lines = [escaped(row.summary or "no summary recorded")]
    if row.version:
        lines.append(f"version {escaped(row.version)}")
    if row.times:
        lines.append(f"{len(row.times.samples)} samples of {row.times.calls} calls")
    if row.numerics:
        lines.append(f"the baseline's own error {figures.error(row.numerics.baseline_error)}")
    if row.compilation.prepare_s:
        lines.append(f"prepared in {figures.seconds(row.compilation.prepare_s)}")
    if row.status != "ok":
        lines.append(f"<strong>{escaped(row.status)}</strong>: {escaped(row.reason)}")
    name = f"{page_charts.key(run, row.contender)} {escaped(row.contender)}"
    return f"<div><dt>{name}</dt><dd>{'; '.join(lines)}</dd></div>"


def _report(row: Row) -> str:
    label = f'tabindex="0" role="region" aria-label="Report of {escaped(row.contender)}"'
    return f"<h3>Report of {escaped(row.contender)}</h3><pre {label}>{escaped(row.report)}</pre>"


def _conditions(rows: Sequence[Row]) -> str:
    return escaped("; ".join(dict.fromkeys(map(page_header.conditions, rows))))
