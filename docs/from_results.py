"""What is made from stored measurements: the page of results, its plots, the README's table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from kernel_dispatch.bench import storing
from kernel_dispatch.bench.results import Run
from kernel_dispatch.bench.views import drawing
from kernel_dispatch.bench.views import table as results

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- generated from docs/results -->", "<!-- end of the generated part -->"
_IN_README = "zen5.json"


def page() -> str:
    """One section per file in docs/results, in the order of their names."""
    head = (
        "# Benchmark results\n\nGenerated from the JSON files beside this page by `python "
        "docs/generate.py`. Milliseconds per call, and in\nparentheses the speed-up over eager of "
        "the same run. How to read and repeat them: [benchmarking](../benchmarking.md)."
    )
    sections = [_section(path) for path in sorted(RESULTS.glob("*.json"))]
    sections += [_gpu_section(path) for path in sorted((RESULTS / "gpu").glob("*.json"))]
    return "\n\n".join([head, *sections]) + "\n"


def _gpu_section(path: Path) -> str:
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
    table = results.markdown(run).partition("\n\n")[0]  # why a row has no time is in the results
    part = f"{_conditions(run)}\n\n{table}"
    return f"{before}{_BEGIN}\n{part}\n{_END}{after}"
