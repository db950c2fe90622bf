"""What tlparse and TORCH_COMPILE_DEBUG=1 get to see: plan, graph before and after, a reproducer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from torch import fx

from kernel_dispatch.reporting import GraphReport


def trace(gm: fx.GraphModule, record: GraphReport) -> None:
    """Structured trace artefacts for every graph; the debug folder where torch writes its own."""
    _artifact("unified_plan", lambda: _plan(record))
    if record.fallbacks:
        fallbacks = [fallback.as_dict() for fallback in record.fallbacks]
        _artifact("unified_fallbacks", lambda: json.dumps(fallbacks))
    if enabled():
        write_folder(gm, record)


def _artifact(name: str, payload: Callable[[], str]) -> None:
    """One file for tlparse, under the compile id in work; free when no trace is being written."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload
    )


def enabled() -> bool:
    return os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1"


def _plan(record: GraphReport) -> str:
    return json.dumps(record.as_dict(), indent=2, default=str)


def folder_of(record: GraphReport) -> Path:
    """`<torch's debug folder of this run>/unified/graph_<n>`."""
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir()) / "unified" / f"graph_{record.index}"


def write_folder(gm: fx.GraphModule, record: GraphReport) -> Path:
    from kernel_dispatch.reproducer import reproducer

    folder = folder_of(record)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "before.py").write_text(gm.print_readable(print_output=False))
    (folder / "plan.json").write_text(_plan(record))
    (folder / "report.txt").write_text(record.text(verbose=True) + "\n")
    (folder / "repro.py").write_text(reproducer(gm, record))
    record.notes.append(f"debug folder: {folder}")
    return folder
