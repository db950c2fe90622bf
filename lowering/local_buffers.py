"""Loops of Inductor's that share a buffer of one row, kept from giving it to several rows at once.

Where several loops over the same rows are fused, Inductor (2.13) keeps what one writes for the next
in a buffer as long as a row. If the loop over the rows is tiled, as it is where one input lies in
columns, sixteen rows at a time are written there, and the last one is read for all of them: wrong
numbers, without a word (pytorch#185702). Such loops are not fused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lowering.replacing import replaced


def of_one_row() -> AbstractContextManager[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    def making(may_fuse: Callable[..., bool]) -> Callable[..., bool]:
        def checked(self: Any, nests: Sequence[Any], depth: int) -> bool:
            shared = getattr(V.local_buffer_context, "local_buffers", None)
            return may_fuse(self, nests, depth) and not (shared and _are_tiled(nests, depth))

        return checked

    loops = getattr(cpp, "OuterLoopFusedSchedulerNode", None)
    return replaced(loops, "check_outer_fusion_loop_level_attr", making)


def _are_tiled(nests: Sequence[Any], depth: int) -> bool:
    return any(level.steps != 1 for nest in nests for level in nest.loop_nest.loops[:depth])
