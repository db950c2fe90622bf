"""After a pause, threads are woken where they can run, before the graph needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_dispatch.facts import GraphFacts
from lowering.native import library

# Below it a graph is computed by the calling thread, or is done before others are awake.
_LEAST_FLOPS, _LEAST_BYTES = 1_000_000, 1 << 18


def waking_threads(run: Callable[..., Any], target: str, facts: GraphFacts) -> Callable[..., Any]:
    """On the CPU, where a graph has work for several threads and our kernels are loaded."""
    wake = library.waker()
    if target != "cpu" or wake is None:
        return run
    if facts.flops < _LEAST_FLOPS and facts.bytes_moved < _LEAST_BYTES:
        return run

    def awake(*args: Any) -> Any:
        wake()
        return run(*args)

    return awake
