"""Inductor's patterns of attention, held to what is written: dimensions, masks, numbers.

Its patterns come ready made (torch 2.13) and are then compared without their constants: a softmax
over queries or heads becomes attention over keys, and a score that is filled with -1 one that is
hidden, without a word (pytorch#195320). Inductor can trace a pattern anew with the tensors that it
was found with, as it does for patterns of others; that is what is asked for here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

from lowering.replacing import replaced

_READY_MADE = "search_fn_pattern"  # of the function that looks at a match once more


class _Emptied:
    lock = threading.RLock()
    users = 0
    cells: list[tuple[CellType, Any]] = []  # noqa: RUF012  one for the process, as the patterns are


@contextlib.contextmanager
def compared_whole() -> Iterator[None]:
    """For the time in which Inductor looks for patterns."""
    from torch._inductor.fx_passes import joint_graph

    def making(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            _empty(joint_graph.patterns)
            return result

        return prepared

    with _Emptied.lock:
        _Emptied.users += 1
    try:
        with replaced(joint_graph, "lazy_init", making):
            yield
    finally:
        with _Emptied.lock:
            _Emptied.users -= 1
            while _Emptied.cells and not _Emptied.users:
                cell, before = _Emptied.cells.pop()
                cell.cell_contents = before


def _empty(patterns: Any) -> None:
    with _Emptied.lock:
        for cell in list(_ready_made(patterns)):
            if cell.cell_contents is not None:
                _Emptied.cells.append((cell, cell.cell_contents))
                cell.cell_contents = None


def _ready_made(patterns: Any) -> Iterator[CellType]:
    for entries in patterns.patterns.values():
        for entry in entries:
            check = getattr(entry, "extra_check", None)
            names = getattr(getattr(check, "__code__", None), "co_freevars", ())
            if check is not None and _READY_MADE in names:
                yield check.__closure__[names.index(_READY_MADE)]
