"""Reductions over a few numbers, written out where that is faster than a loop.

Inductor (2.13) writes out those over up to seven, and makes vectors of longer ones, of which it
takes the numbers apart in the end: the place of the greatest of eight (the experts of a router)
takes seven times as long as written out, a sum of eight whole numbers twenty times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from lowering.replacing import replaced

FEW = 32
_BY_INDUCTOR = 7
_PLACES = ("argmax", "argmin", "argmax_with_value", "argmin_with_value")
_SIMPLE = ("sum", "prod", "max", "min", "any")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor import ir

    with (
        replaced(getattr(ir, "Reduction", None), "create", _creating),
        replaced(getattr(ir, "ArgReduction", None), "create", _creating),
    ):
        yield


def _creating(create: Any) -> Any:
    def created(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config

        most = _most(*args, **kwargs)
        if most < config.unroll_reductions_threshold:
            return create.__func__(cls, *args, **kwargs)
        with config.patch(unroll_reductions_threshold=most + 1):
            result = create.__func__(cls, *args, **kwargs)
        for one in result if isinstance(result, tuple) else (result,):
            if _is_written_out(one):
                one.realize()  # or each of its readers would compute it again
        return result

    return classmethod(created)


def _most(
    device: Any = None,
    dst_dtype: Any = None,
    src_dtype: Any = None,
    inner_fn: Any = None,
    ranges: Sequence[Any] = (),
    reduction_ranges: Sequence[Any] = (),
    reduction_type: str = "",
    *_: Any,
    **__: Any,
) -> int:
    """How many numbers are written out, if it is no more; 0 where Inductor does well."""
    known = all(getattr(size, "is_number", isinstance(size, int)) for size in reduction_ranges)
    if getattr(device, "type", "") != "cpu" or not known or src_dtype is None:
        return 0
    if not _BY_INDUCTOR < math.prod(map(int, reduction_ranges)) <= FEW:
        return 0
    whole, kind = not src_dtype.is_floating_point and not src_dtype.is_complex, reduction_type
    most = FEW if kind in _PLACES or (whole and kind in _SIMPLE) else 0
    if kind == "any":
        most = 16
    elif kind in _SIMPLE and src_dtype is torch.float32:
        most = 8
    if not most:
        return 0
    reads, neighbours = _reads(inner_fn, ranges, reduction_ranges)
    return most if neighbours and (whole or kind in _PLACES or reads == 1) else 0


def _reads(read: Any, ranges: Sequence[Any], reduction_ranges: Sequence[Any]) -> tuple[int, bool]:
    """How many tensors are read, and whether neighbours in one of them belong together."""
    from torch._inductor import ir
    from torch._inductor.dependencies import extract_read_writes

    with mock.patch.object(ir.FlexibleLayout, "allow_indexing", True):
        found = extract_read_writes(read, ranges, reduction_ranges)
    count = sum(int(size) != 1 for size in reduction_ranges)
    variables = list(found.range_vars or ())
    reduced = variables[len(variables) - count :]
    indices = [index for dep in found.reads if (index := getattr(dep, "index", None)) is not None]
    return len(indices), any(index.coeff(one) == 1 for index in indices for one in reduced)


def _is_written_out(result: Any) -> bool:
    from torch._inductor import ir

    return isinstance(getattr(getattr(result, "data", None), "data", None), ir.Pointwise)
