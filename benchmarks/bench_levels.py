"""The levels O0-O3 beside eager and Inductor: a text encoder, a CNN, an MLP and a tiny graph."""

from __future__ import annotations

from typing import Any

import pytest

LEVELS = ("unified-O0", "unified-O1", "unified-O2", "unified-O3")


@pytest.mark.parametrize("contender", ("eager", "inductor", *LEVELS))
@pytest.mark.parametrize("workload", ("text-encoder", "mobile-cnn", "mlp-swiglu", "five-ops"))
def test_levels(timed: Any, workload: str, contender: str) -> None:
    timed(workload, contender)
