"""Writes what the documentation takes from code and measurements; `--check`: is it current?"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton_kernels
from kernel_dispatch.bench import storing
from kernel_dispatch.bench.results import Run
from kernel_dispatch.bench.views import drawing
from kernel_dispatch.bench.views import table as results
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
        limits.append(f"from {row.min_ops} ops or {row.min_bytes >> 10} KiB moved")
    if row.min_flops:
        limits.append(f"from {row.min_flops / 1e6:.1f} MFLOP")
    if row.shape_classes is not None:
        limits.append("shapes: " + ", ".join(sorted(row.shape_classes)))
    if row.only_if_measured:
        limits.append("only where this machine was measured and it came first")
    return "; ".join(limits) or "none"


def kernels() -> str:
    """Every public function of `triton_kernels`, with the first words that it says of itself."""
    rows = [
        (f"`{name}`", " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()))
        for name in triton_kernels.__all__
        for function in [getattr(triton_kernels, name)]
    ]
    where = "`from triton_kernels import ...`; [GPUs](gpu.md) has the rules that all of them keep."
    return f"## Triton kernels\n\n{where}\n\n{table(('function', 'computes'), rows)}\n"


def reasons() -> str:
    rows = ((f"`{code}`", text) for code, text in CODES.items())
    return (
        "## Reason codes\n\nStable: reports, warnings and `doctor` use them, and you may filter on "
        f"them.\n\n{table(('code', 'meaning'), rows)}\n"
    )


def page() -> str:
    parts = (levels, options, target_table, provider_table, capabilities, kernels, reasons)
    return "\n".join([HEAD, *(part() for part in parts)])


# --- benchmark results ----------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- generated from docs/results -->", "<!-- end of the generated part -->"
_IN_README = "core.json"


def results_page() -> str:
    """One section per file in docs/results, in the order of their names."""
    head = (
        "# Benchmark results\n\nGenerated from the JSON files beside this page by `python "
        "docs/generate.py`. Milliseconds per call, and in\nparentheses the speed-up over eager of "
        "the same run. How to read and repeat them: [benchmarking](../benchmarking.md)."
    )
    sections = [_section(path) for path in sorted(RESULTS.glob("*.json"))]
    sections += [gpu_section(path) for path in sorted((RESULTS / "gpu").glob("*.json"))]
    return "\n\n".join([head, *sections]) + "\n"


def gpu_section(path: Path) -> str:
    """What `python -m benchmarks.gpu` wrote, as it shows it."""
    sys.path.insert(0, str(README.parent))  # the benchmarks are no installed package
    names = ("results", "tables", "command")
    stored, shown, command = (importlib.import_module(f"benchmarks.gpu.{name}") for name in names)
    found = stored.Results(path)
    tables = [shown.text(found, name) for name in command.COMMANDS if found.of(name)]
    return f"## {path.stem} (GPU)\n\n" + "\n\n".join(f"```\n{text}\n```" for text in tables)


def _section(path: Path) -> str:
    run = storing.load(str(path))
    alt = (
        f"Speed-ups over eager in {path.name}, with 95% intervals; the table below has the figures"
    )
    plot = f"![{alt}]({path.stem}.svg)"
    return f"## {path.stem}\n\n{_conditions(run)}\n\n{plot}\n\n{results.markdown(run)}"


def plots() -> dict[Path, str]:
    return {
        path.with_suffix(".svg"): drawing.speedup_bars(storing.load(str(path))) + "\n"
        for path in sorted(RESULTS.glob("*.json"))
    }


def _conditions(run: Run) -> str:
    machine, settings = run.machine, run.settings
    libraries = ", ".join(f"{k} {v}" for k, v in machine["libraries"].items() if k != "torch")
    gradients = "forward and backward" if settings["gradients"] else "inference without gradients"
    changed = ", with uncommitted changes" if run.commit["dirty"] else ""
    lines = [
        f"{machine['cpu']} ({machine['cpu_capability']}), {machine['threads']} threads of "
        f"{machine['cores']} cores; torch {machine['torch']}, {libraries}; Python "
        f"{machine['python']}; {gradients}.",
        f"Measured {run.started[:10]} at commit `{run.commit['id'][:10]}`{changed}, in "
        f"{run.seconds / 60:.0f} minutes. Limits measured beside it: "
        f"{run.limits.gemm_flops / 1e9:.0f} GFLOP/s ({run.limits.gemm_library}), "
        f"{run.limits.read_bytes / 1e9:.1f} GB/s read.",
    ]
    return "\n".join(lines)


def readme() -> str:
    """The README with the part between the two marks made anew."""
    text = README.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    run = storing.load(str(RESULTS / _IN_README))
    part = f"{_conditions(run)}\n\n{results.markdown(run)}"
    return f"{before}{_BEGIN}\n{part}\n{_END}{after}"


def main(arguments: Sequence[str]) -> int:
    made = {PAGE: page(), RESULTS / "README.md": results_page(), README: readme(), **plots()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(made[path])
        return 0
    for path in stale:
        print(f"{path.name} is out of date: run `python docs/generate.py`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
