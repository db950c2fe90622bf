"""Sums over rows that are looked up by number: vectors of a row, not of the numbers.

Inductor (2.13) makes vectors along the innermost loop that reads neighbours anywhere. In a sum of
embeddings that is the loop over the numbers of the rows, so each row is read a number at a time:
twenty rows of 512 took one and a half times eager's time, which writes all rows out before. Along
the row it takes a thirtieth.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowering.replacing import replaced


@contextlib.contextmanager
def read_whole() -> Iterator[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen import cpp

    with (
        replaced(getattr(cpp, "TilingSelect", None), "_select_tiling_indices", _selecting),
        replaced(getattr(cpp, "CppVecKernel", None), "store_reduction", _storing),
    ):
        yield


def _selecting(select: Callable[..., Any]) -> Callable[..., Any]:
    def along_rows(self: Any, loops: Any, sizes: Any, count: int) -> Any:
        chosen = select(self, loops, sizes, count)
        outer, summed = max(sizes, key=lambda one: len(one[1]))
        if len(chosen) != 1 or not summed or chosen[0] < len(outer):
            return chosen
        found = _loop_along_rows(_indices(loops, sizes), len(outer), count)
        return chosen if found is None else [found]

    return along_rows


def _storing(store: Callable[..., Any]) -> Callable[..., Any]:
    """One result may be stored twice: Inductor names its halves by it alone, which C++ refuses."""

    def stored(self: Any, name: str, index: Any, value: Any) -> Any:
        from torch._inductor.codegen.common import DeferredLine
        from torch._inductor.virtualized import V

        vertical = self.tiling_idx < self.reduction_depth
        if vertical and V.graph.get_dtype(name) in (torch.bfloat16, torch.float16):
            own = f"{value}_{name}"
            self.reduction_suffix.writeline(DeferredLine(name, f"auto {own} = {value};"))
            value = own
        return store(self, name, index, value)

    return stored


def _indices(loops: Sequence[Any], sizes: Sequence[Any]) -> Iterator[Any]:
    """Of all memory that is read or written, in the counters `d0`, `d1` and so on."""
    from torch._inductor import dependencies

    for loop, each in zip(loops, sizes, strict=True):
        found = dependencies.extract_read_writes(loop, *each)
        yield from (access.index for access in itertools.chain(found.reads, found.writes))


def _loop_along_rows(indices: Iterator[Any], outer: int, count: int) -> int | None:
    """The loop around the sum whose steps are neighbours in what is looked up, and wherever else
    they make a difference."""
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    strides: dict[str, set[Any]] = {}
    in_rows: set[str] = set()
    for index in indices:
        looked_up = any(
            symbol_is_type(symbol, (SymT.TMP, SymT.INDIRECT)) for symbol in index.free_symbols
        )
        for symbol in index.free_symbols:
            stride = cpp.stride_at_vec_range(index, symbol, count)  # type: ignore[attr-defined]
            strides.setdefault(symbol.name, set()).add(stride)
            if looked_up and stride == 1:
                in_rows.add(symbol.name)
    fit = [loop for loop in range(outer) if f"d{loop}" in in_rows and strides[f"d{loop}"] <= {0, 1}]
    return fit[-1] if fit else None
