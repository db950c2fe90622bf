"""Rows as text: what was measured beside what would be good enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.results import ABSENT, OK, Results, Row
from benchmarks.gpu.rivals import OURS
from benchmarks.gpu.settings import CPU_NOTE


def text(results: Results, command: str) -> str:
    rows = [row for row in results.of(command) if "contenders" not in row]
    compared = [row for row in results.of(command) if "contenders" in row]
    parts = [_heading(results)]
    if rows:
        parts.append(_groups(rows))
    if compared:
        parts += [_contenders(compared), _targets(compared)]
    parts.append(_summary(results.of(command)))
    return "\n\n".join(part for part in parts if part)


def _heading(results: Results) -> str:
    run = results.record["runs"][-1]
    commit = (run.get("commit") or {}).get("id", "")[:10]
    card = run["card"]
    line = f"{card}; torch {run['torch']}, triton {run['triton']}; commit {commit}"
    return line if card != CPU_NOTE else f"{line}\nTimes are of the CPU and of an interpreter."


def _groups(rows: Sequence[Row]) -> str:
    """A line for each case or model; what is not as it should be is listed in the summary."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["key"].split("/")[1], []).append(row)
    cells = []
    for name, some in groups.items():
        shares = [row["share"] for row in some if "share" in row]
        worst = _share(max(shares)) if shares else ""
        told = next((row["remark"] for row in reversed(some) if "remark" in row), "")
        cells.append((name, _counts(some), worst, "" if worst else told))
    return _table(("what", "rows", "of the allowed error", ""), cells)


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def _contenders(rows: Iterable[Row]) -> str:
    head = (
        "row",
        "contender",
        "device us",
        "of copy",
        "of product",
        "x ours",
        "wall us",
        "host us",
        "peak MiB",
        "",
    )
    cells = []
    for row in rows:
        ours = row["contenders"].get(OURS, {}).get("device_us")
        name = row["key"].partition("/")[2]
        for contender, one in row["contenders"].items():
            note = one.get("reason", "") or _unusual(one)
            cells.append((name, contender, *_figures(one, ours), note))
            name = ""
    return _table(head, cells)


def _figures(one: dict[str, Any], ours: float | None) -> tuple[str, ...]:
    device = one.get("device_us")
    peak = one.get("peak_bytes")
    return (
        _number(device),
        _share(one.get("copy_share")),
        _share(one.get("product_share")),
        f"{device / ours:.2f}" if device and ours else "",
        _number(one.get("wall_us")),
        _number(one.get("host_us")),
        "" if peak is None else f"{peak / (1 << 20):.1f}",
    )


def _unusual(one: dict[str, Any]) -> str:
    return "not in a graph" if one.get("how") == "events" else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _targets(rows: Iterable[Row]) -> str:
    cells = []
    for row in rows:
        for one in row.get("targets", ()):
            limit = f">= {one['at_least']:.3g}" if "at_least" in one else f"<= {one['at_most']:.3g}"
            verdict = "met" if one["met"] else "NOT MET"
            name = row["key"].partition("/")[2]
            cells.append((verdict, name, one["what"], f"{one['value']:.3g}", limit))
    return _table(("target", "row", "what", "found", "wanted"), cells) if cells else ""


def _summary(rows: Sequence[Row]) -> str:
    other = [row for row in rows if row["status"] != OK]
    lines = [f"  {row['status']} {row['key']}: {row.get('reason', '')}" for row in other]
    return "\n".join([f"{len(rows)} rows: {_counts(rows)}", *lines])


def is_good(rows: Iterable[Row]) -> bool:
    return all(row["status"] in (OK, ABSENT) for row in rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
