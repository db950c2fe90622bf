"""One workload per kind of region, at the sizes that it has in a transformer or a CNN."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.workloads import WORKLOADS

OPS = [name for name, workload in WORKLOADS.items() if workload.group == "op"]


@pytest.mark.parametrize("contender", ("eager", "inductor", "unified-O2"))
@pytest.mark.parametrize("workload", OPS)
def test_ops(timed: Any, workload: str, contender: str) -> None:
    timed(workload, contender)
