"""Loops over few numbers, kept from sending Inductor's threads to the innermost loop.

Inductor (2.13) lets the threads share a sum instead of the loops around it where those have few
steps, and counts a loop over 8 numbers, of which one vector holds 16, as none. So whatever is
around it, threads are called and waited for at each sum: a capsule network's gradients took twice
eager's time. Such a loop has one step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lowering.replacing import replaced


def counted_right() -> AbstractContextManager[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen import cpp

    def making(depth_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(self: Any) -> Any:
            short = [level for level in self.loops or () if _is_less_than_a_step(level)]
            steps = [level.steps for level in short]
            for level in short:
                level.steps = level.size
            try:
                return depth_of(self)
            finally:
                for level, before in zip(short, steps, strict=True):
                    level.steps = before

        return counted

    return replaced(getattr(cpp, "LoopNest", None), "max_parallel_depth", making)


def _is_less_than_a_step(level: Any) -> bool:
    sizes = (level.size, level.steps)
    numbers = all(getattr(one, "is_number", isinstance(one, int)) for one in sizes)
    return numbers and 0 < level.size < level.steps
