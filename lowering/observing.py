"""Region kernels tell here that they ran; whoever runs a graph listens, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowering.native import library


class Listener(Protocol):
    def region_ran(self, region: str, provider: str, times: int = 1) -> None: ...


class _Current(threading.local):
    listener: Listener | None = None


_current = _Current()


def region_ran(region: str, provider: str, times: int = 1) -> None:
    if (listener := _current.listener) is not None:
        listener.region_ran(region, provider, times)


def listened(listener: Listener, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `run`, and tell `listener` of every region kernel that ran meanwhile.

    Kernels called from Python tell one by one; those in C++ count, and are read before and after.
    """
    outer, _current.listener = _current.listener, listener
    before = library.counts()
    try:
        return run(*args)
    finally:
        _current.listener = outer
        after = library.counts()
        if after != before:
            _tell(listener, before or (0,) * len(after), after)


def _tell(listener: Listener, before: Sequence[int], after: Sequence[int]) -> None:
    for (region, provider), first, last in zip(library.COUNTED, before, after, strict=True):
        if last != first:
            listener.region_ran(region, provider, last - first)
