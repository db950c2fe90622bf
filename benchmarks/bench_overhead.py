"""Dispatch overhead: graphs so small that a backend can only lose."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.workloads import WORKLOADS

OVERHEAD = [name for name, workload in WORKLOADS.items() if workload.group == "overhead"]


@pytest.mark.parametrize("contender", ("eager", "inductor", "unified-O0", "unified-O2"))
@pytest.mark.parametrize("workload", OVERHEAD)
def test_dispatch_overhead(timed: Any, workload: str, contender: str) -> None:
    timed(workload, contender)
