"""What it costs to go back and forth between backends whose code is compiled already.

The three figures of a group belong together: two calls of one backend, two of the other, and one
of each in turn. What the last one takes beyond the mean of the first two is the switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.workloads import WORKLOADS
from kernel_dispatch.bench.stepping import Step

PAIRS = {
    "unified-O2 and inductor": ({"backend": "unified"}, {"backend": "inductor"}),
    "unified-O0 and unified-O2": (
        {"backend": "unified", "options": {"level": "O0"}},
        {"backend": "unified", "options": {"level": "O2"}},
    ),
}


@pytest.mark.parametrize("turn", ("first twice", "second twice", "in turn"))
@pytest.mark.parametrize("pair", PAIRS)
def test_backend_switch(benchmark: Any, pair: str, turn: str) -> None:
    benchmark.group = f"switch {pair}"
    torch.manual_seed(0)
    step = Step(WORKLOADS["five-ops"].build(), training=False)
    first, second = (
        step.with_fn(torch.compile(step.case.fn, **arguments)) for arguments in PAIRS[pair]
    )
    some, other = {
        "first twice": (first, first),
        "second twice": (second, second),
        "in turn": (first, second),
    }[turn]
    expected = step.run()
    for one in (some, other):
        torch.testing.assert_close(one.run(), expected)
    benchmark(_both, some.run, other.run)


def _both(some: Callable[[], Any], other: Callable[[], Any]) -> None:
    some()
    other()
