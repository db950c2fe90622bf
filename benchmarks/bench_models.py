"""Model families beside eager and Inductor. `kernel-dispatch bench core` runs all of them."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("contender", ("eager", "inductor", "unified-O2"))
@pytest.mark.parametrize("workload", ("llama-decode", "vision-transformer", "recommender"))
def test_models(timed: Any, workload: str, contender: str) -> None:
    timed(workload, contender)
