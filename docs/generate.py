"""Writes docs/reference.md out of the code's own tables; `--check` fails when it is out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_dispatch.settings import MODES, OPTIONS
from lowering import providers, targets
from lowering.capability import CapabilityRow
from lowering.levels import CONTRACTS
from lowering.reasons import CODES

PAGE = Path(__file__).parent / "reference.md"

HEAD = """# Reference

This page is generated from the code by `python docs/generate.py`; `make check` fails when it is out
of date. Edit the tables in the code, not here.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def levels() -> str:
    rows = ((c.level, c.alias, c.may_do, c.numerics, c.compile_time) for c in CONTRACTS)
    modes = ", ".join(f"`{mode}` is {level}" for mode, level in MODES.items())
    head = ("level", "alias", "may do", "numerics", "compile time")
    return f"## Levels\n\n{table(head, rows)}\n\nTorch's `mode=` strings: {modes}.\n"


def options() -> str:
    rows = (
        (f"`{o.name}`", f"`{o.env}`" if o.env else "-", _default(o.default), o.accepted, o.summary)
        for o in OPTIONS
    )
    head = ("option", "environment", "default", "accepted", "meaning")
    return (
        "## Options\n\nAs `torch.compile(..., options={...})`, as `kernel_dispatch.configure(...)` "
        "or as an environment variable; in that order of precedence.\n\n"
        f"{table(head, rows)}\n"
    )


def _default(value: object) -> str:
    if value is None:
        return "none"
    return str(value) if not isinstance(value, (frozenset, tuple)) else "empty"


def target_table() -> str:
    rows = (
        (
            f"`{t.name}`",
            ", ".join(t.aliases) or "-",
            t.priority,
            t.summary,
            t.proven_on or "not stated",
        )
        for t in targets.ours()
    )
    head = ("target", "aliases", "priority", "what it is", "has run on")
    return f"## Targets\n\n{table(head, rows)}\n"


def provider_table() -> str:
    rows = ((f"`{p.name}`", p.summary, ", ".join(p.requires) or "torch") for p in providers.ours())
    return f"## Providers\n\n{table(('provider', 'what it does', 'needs'), rows)}\n"


def capabilities() -> str:
    rows = (
        (row.target, row.region, row.provider, row.level, row.priority, _limits(row), row.why)
        for target in targets.ours()
        for row in sorted(target.rows, key=lambda row: (row.region, -row.priority))
    )
    head = ("target", "region", "provider", "from", "priority", "limits", "why")
    return f"## Capability table\n\n{table(head, rows)}\n"


def _limits(row: CapabilityRow) -> str:
    """Everything in a row that can make it say no, in words."""
    limits = []
    if row.dtypes is not None:
        limits.append("only " + ", ".join(sorted(row.dtypes)))
    if row.refused_dtypes:
        limits.append("not " + ", ".join(sorted(row.refused_dtypes)))
    if row.refused_ops:
        limits.append("not " + ", ".join(sorted(row.refused_ops)))
    if row.refused_complex_ops:
        limits.append("of complex numbers not " + ", ".join(sorted(row.refused_complex_ops)))
    if row.features:
        limits.append("needs " + ", ".join(sorted(row.features)))
    kinds = ("training", "dynamic", "mutation", "subclasses")
    limits += [f"no {kind}" for kind in kinds if not getattr(row, kind)]
    if row.min_ops or row.min_bytes:
        limits.append(f"from {row.min_ops} ops or {row.min_bytes >> 10} KiB moved")
    if row.min_flops:
        limits.append(f"from {row.min_flops / 1e6:.1f} MFLOP")
    return "; ".join(limits) or "none"


def reasons() -> str:
    rows = ((f"`{code}`", text) for code, text in CODES.items())
    return (
        "## Reason codes\n\nStable: reports, warnings and `doctor` use them, and you may filter on "
        f"them.\n\n{table(('code', 'meaning'), rows)}\n"
    )


def page() -> str:
    parts = (levels, options, target_table, provider_table, capabilities, reasons)
    return "\n".join([HEAD, *(part() for part in parts)])


def main(arguments: Sequence[str]) -> int:
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text)
        return 0
    if not PAGE.exists() or PAGE.read_text() != text:
        print("docs/reference.md is out of date: run `python docs/generate.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
