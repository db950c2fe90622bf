"""Loops of Inductor's that share a buffer of one row, kept from giving it to several rows at once.

Where several loops over the same rows are fused, Inductor (2.13) keeps what one writes for the next
in a buffer as long as a row. If the loop over the rows is tiled, as it is where one input lies in
columns, sixteen rows at a time are written there, and the last one is read for all of them: wrong
numbers, without a word (pytorch#185702). Such loops are not fused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock


@contextlib.contextmanager
def of_one_row() -> Iterator[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    loops = getattr(cpp, "OuterLoopFusedSchedulerNode", None)
    may_fuse: Callable[..., bool] | None = getattr(loops, _CHECK, None)
    if may_fuse is None:
        yield
        return

    def checked(self: Any, nests: Sequence[Any], depth: int) -> bool:
        shared = getattr(V.local_buffer_context, "local_buffers", None)
        return may_fuse(self, nests, depth) and not (shared and _are_tiled(nests, depth))

    with mock.patch.object(loops, _CHECK, checked):
        yield


_CHECK = "check_outer_fusion_loop_level_attr"


def _are_tiled(nests: Sequence[Any], depth: int) -> bool:
    return any(level.steps != 1 for nest in nests for level in nest.loop_nest.loops[:depth])
