"""Region kernels tell here that they ran; whoever runs a graph listens, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowering.native import library
from lowering.reasons import Reason


class Listener(Protocol):
    @property
    def tolerance(self) -> float: ...

    keeps_memory: bool

    def region_ran(self, region: str, provider: str, times: int = 1) -> None: ...

    def kernels_ran(self, ran: int) -> None:
        """As `regions_of` in native/library.py takes it apart."""

    def region_demoted(self, region: str, provider: str, reason: Reason) -> None: ...


class _Current(threading.local):
    listener: Listener | None = None


_current = _Current()


def region_ran(region: str, provider: str, times: int = 1) -> None:
    if (listener := _current.listener) is not None:
        listener.region_ran(region, provider, times)


def region_demoted(region: str, provider: str, reason: Reason) -> None:
    """It was tried and was not good enough: plain torch computes it from now on."""
    if (listener := _current.listener) is not None:
        listener.region_demoted(region, provider, reason)


def tolerance() -> float:
    """How far off a layer in fewer bits may be, as the user of the graph that runs wants it."""
    return _NOT_TOLD if _current.listener is None else _current.listener.tolerance


_NOT_TOLD = 1e-2


def listened(listener: Listener, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `run`, and tell `listener` of every region kernel that ran meanwhile.

    Kernels called from Python tell one by one; those in C++ count, and are read before and after.
    """
    outer, _current.listener = _current.listener, listener
    before = library.snapshot()
    depth = library.pool_depth()
    outside = depth.value
    depth.value = outside + listener.keeps_memory
    try:
        return run(*args)
    finally:
        depth.value = outside
        _current.listener = outer
        if ran := library.snapshot() - before:
            listener.kernels_ran(ran)
