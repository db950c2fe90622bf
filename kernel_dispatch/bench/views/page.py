"""A run as one HTML file: no network, no framework, and readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from string import Template

from kernel_dispatch.bench.results import Run
from kernel_dispatch.bench.views import page_charts, page_details, page_header, page_table, palette
from kernel_dispatch.bench.views.markup import escaped, script_json

_FOLDER = Path(__file__).parent


def html(run: Run) -> str:
    script = _read("page.js")
    return Template(_read("page_template.html")).substitute(
        title=escaped(_title(run)),
        # Whatever a reason or a report holds: the browser runs this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_style(),
        facts=page_header.facts(run),
        groups=page_charts.groups(run),
        roofline=page_charts.roofline(run),
        filters=page_table.filters(run),
        table=page_table.table(run),
        details=page_details.details(run),
        baseline=escaped(run.baseline),
        data=script_json(run),
        script=script,
    )


def _title(run: Run) -> str:
    workloads, contenders = len(run.workloads()), len(run.contenders())
    return (
        f"Benchmark: {workloads} workload{'s' * (workloads != 1)}, "
        f"{contenders} contender{'s' * (contenders != 1)}"
    )


def _style() -> str:
    light, dark = palette.variables(palette.LIGHT), palette.variables(palette.DARK)
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{palette.rules()}{_read('page.css')}"
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
