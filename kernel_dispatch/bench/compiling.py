"""What compiled while a contender ran: counts of torch's, and the report of `unified`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Recompiled(Exception):
    """It compiles again for the same case: its times would hold compilations."""


class Compiles:
    """`dynamo` False: this contender has nothing to do with torch.compile; all counts are None."""

    def __init__(self, dynamo: bool) -> None:
        self._dynamo = dynamo
        self._log: Any = None

    def count(self) -> int:
        """Frames that Dynamo worked on; only differences mean something."""
        counters = self._counters()
        return 0 if counters is None else int(counters["frames"]["total"])

    def reason(self) -> str:
        """The last guard that failed, as the end of a sentence; empty where torch tells none."""
        if self._log is None:
            return ""
        reasons = [frame.recompile_reason for frame in self._log.frames()]
        return next((f": {reason[:300]}" for reason in reversed(reasons) if reason), "")

    def summary(self, compiled: Callable[..., Any]) -> dict[str, Any]:
        counters = self._counters()
        if counters is None:
            return {}
        found: dict[str, Any] = {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "breaks": sum(counters["graph_break"].values()),
        }
        from kernel_dispatch.reporting import report

        graphs = report(compiled)
        if graphs:
            found["fallbacks"] = sum(len(graph.fallbacks) for graph in graphs)
            found["report"] = _places_from_here(graphs.text(verbose=True))
        return found

    def forget(self) -> None:
        """All compiled code and all counts, before the next case."""
        if self._counters() is None:
            return
        import torch
        from torch._dynamo.utils import counters

        from kernel_dispatch.dynamo import FrameLog

        torch._dynamo.reset()
        counters.clear()
        self._log = FrameLog()

    def _counters(self) -> Any:
        # Dynamo is not imported on behalf of a contender that does without it.
        if not self._dynamo or "torch._dynamo.utils" not in sys.modules:
            return None
        from torch._dynamo.utils import counters

        return counters


def _places_from_here(report: str) -> str:
    """Results are shared: they name files as seen from the folder that the benchmark ran in."""
    return report.replace(f"{Path.cwd()}{os.sep}", "")
