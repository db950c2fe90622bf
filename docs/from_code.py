"""Pages that are made from the code's own tables: settings, capabilities, reasons, kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import triton_kernels
from kernel_dispatch.options import OPTIONS
from kernel_dispatch.settings import MODES
from lowering import providers, targets
from lowering.capability import CapabilityRow
from lowering.contract import Target
from lowering.levels import CONTRACTS
from lowering.reasons import CODES

_GENERATED = "Generated from the code by `python docs/generate.py`: edit the tables there."


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _page(title: str, about: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", f"{about} {_GENERATED}", *parts]) + "\n"


# --- settings -------------------------------------------------------------------------------------


def settings() -> str:
    about = (
        "What `unified` can be told, and what each level may do. `python -m kernel_dispatch "
        "options` and `levels` print the same."
    )
    return _page("Settings", about, _options(), _levels())


def _options() -> str:
    rows = (
        (f"`{o.name}`", f"`{o.env}`" if o.env else "-", _default(o.default), o.accepted, o.summary)
        for o in OPTIONS
    )
    head = ("option", "environment", "default", "accepted", "meaning")
    return (
        "## Options\n\nAs `torch.compile(..., options={...})`, as `kernel_dispatch.configure(...)` "
        "or as an environment\nvariable; in that order of precedence. A name or a value that does "
        f"not exist is an error that names the\nnearest one.\n\n{table(head, rows)}"
    )


def _default(value: object) -> str:
    if value is None:
        return "none"
    return str(value) if not isinstance(value, (frozenset, tuple)) else "empty"


def _levels() -> str:
    rows = ((c.level, c.alias, c.may_do, c.numerics, c.compile_time) for c in CONTRACTS)
    modes = ", ".join(f"`{mode}` is {level}" for mode, level in MODES.items())
    head = ("level", "alias", "may do", "numerics", "compile time")
    more = "How results are compared, and what moves them: [numerics](numerics.md)."
    return f"## Levels\n\n{table(head, rows)}\n\nTorch's `mode=` strings: {modes}.\n\n{more}"


# --- capabilities ---------------------------------------------------------------------------------


def capabilities() -> str:
    about = (
        "Which provider may compute what, where and from which level on. Of the rows that take a "
        "graph or a\nregion the one with the highest priority wins, or the fastest where the "
        "machine was measured\n([how](performance.md#how-the-choice-is-made)); `report()` shows "
        "every row that said no, with its [reason](reasons.md)."
    )
    rows = [_rows_of(target) for target in targets.ours()]
    return _page("Capability table", about, _targets(), _providers(), *rows)


def _targets() -> str:
    rows = (
        (
            f"[`{t.name}`](targets/{t.name}.md)",
            ", ".join(t.aliases) or "-",
            t.priority,
            t.summary,
            t.proven_on or "not stated",
        )
        for t in targets.ours()
    )
    head = ("target", "aliases", "priority", "what it is", "has run on")
    return f"## Targets\n\n{table(head, rows)}"


def _providers() -> str:
    rows = ((f"`{p.name}`", p.summary, ", ".join(p.requires) or "torch") for p in providers.ours())
    return f"## Providers\n\n{table(('provider', 'what it does', 'needs'), rows)}"


def _rows_of(target: Target) -> str:
    rows = (
        (row.region, f"`{row.provider}`", row.level, row.priority, _limits(row), row.why)
        for row in sorted(target.rows, key=lambda row: (row.region, -row.priority))
    )
    head = ("region", "provider", "from", "priority", "limits", "why")
    return f"## Rows of {target.name}\n\n{table(head, rows)}"


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
    if row.refused_alone:
        limits.append("not by themselves in float32: " + ", ".join(sorted(row.refused_alone)))
    limits += [f"{name} only with {has}" for name, has in sorted(row.dtype_features)]
    limits += [f"{op} only with {has}: {why}" for op, has, why in sorted(row.op_features)]
    if row.features:
        limits.append("needs " + ", ".join(sorted(row.features)))
    if row.needs:
        limits.append("needs the provider " + ", ".join(sorted(row.needs)))
    if row.error:
        limits.append(f"`tolerance` of {row.error:g} or more")
    kinds = ("training", "dynamic", "mutation", "subclasses")
    limits += [f"no {kind}" for kind in kinds if not getattr(row, kind)]
    if row.min_ops or row.min_bytes:
        training = row.min_bytes_training
        more = "" if training is None else f" ({training >> 10} KiB in training)"
        limits.append(f"from {row.min_ops} ops or {row.min_bytes >> 10} KiB moved{more}")
    if row.min_flops:
        limits.append(f"from {row.min_flops / 1e6:.1f} MFLOP")
    if row.shape_classes is not None:
        limits.append("shapes: " + ", ".join(sorted(row.shape_classes)))
    if row.only_if_measured:
        limits.append("only where this machine was measured and it came first")
    if row.before_measured:
        limits.append("before what was measured")
    return "; ".join(limits) or "none"


# --- reasons and kernels --------------------------------------------------------------------------


def reasons() -> str:
    about = (
        "Every fallback, refusal and warning carries one of these codes. They are stable: you may "
        "filter on them.\nWhat to do about each: [troubleshooting](troubleshooting.md)."
    )
    rows = ((f"`{code}`", text) for code, text in CODES.items())
    return _page("Reason codes", about, table(("code", "meaning"), rows))


def kernels() -> str:
    """Every public function of `triton_kernels`, with the first words that it says of itself."""
    about = (
        "`from triton_kernels import ...`. [GPUs](gpu.md#triton-kernels) has an example, and the "
        "rules that all of them keep."
    )
    rows = [
        (f"`{name}`", " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()))
        for name in triton_kernels.__all__
        for function in [getattr(triton_kernels, name)]
    ]
    return _page("Triton kernels", about, table(("function", "computes"), rows))
