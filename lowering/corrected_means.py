"""The mean of a row, put right by what is left when it is taken off.

Norms over up to 1024 numbers have their mean from one sum in Inductor on CPUs (2.13), and the
variance from a second. A sum of 768 times 0.1 is off by a few units in the last place, so a row
that is the same everywhere came out of a layer norm as 2e-5, and one of 12345.67 as 1; eager's are
0. The sum of what is left is a by-product of the second loop, and makes up for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lowering.replacing import replaced


@contextlib.contextmanager
def put_right() -> Iterator[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor import lowering

    with replaced(lowering, "var_mean_sum_", _corrected):
        yield


def _corrected(moments: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import lowering as do

    def corrected(x: Any, axis: Any, correction: Any, keepdim: bool, return_mean: bool) -> Any:
        # As norms ask for it: what is only a spread has no mean to be put right.
        if not return_mean or correction or x.get_device().type != "cpu":
            return moments(x, axis, correction, keepdim, return_mean)
        variance, mean = moments(x, axis, correction, True, True)
        left = do.mean(do.sub(x, mean), axis, keepdim=True)
        left.realize()
        variance = do.maximum(do.sub(variance, do.square(left)), 0.0)
        mean = do.add(mean, left)
        if keepdim:
            return variance, mean
        return do.squeeze(variance, axis), do.squeeze(mean, axis)

    return corrected
