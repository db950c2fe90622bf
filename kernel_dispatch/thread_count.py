"""A thread count of its own for one compiled callable, given back when the call ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def with_threads(run: Callable[..., Any], threads: int | None) -> Callable[..., Any]:
    """Run under a thread count of its own and put the caller's back, whatever happens."""
    if threads is None:
        return run

    def scoped(*args: Any) -> Any:
        before = _in_force.enter(threads)
        try:
            return run(*args)
        finally:
            _in_force.leave(threads, before)

    return scoped


class _InForce:
    """The counts that calls of ours hold at this moment.

    `torch.set_num_threads` writes two things: the calling thread's count, and the one that every
    later thread starts with. A thread that first meets torch while a call of ours runs elsewhere
    inherits that call's count; to give it back faithfully would keep it alive for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._start = 0
        self._seen = threading.local()

    def enter(self, threads: int) -> int:
        """Set the count; returns the one that belongs to the caller's thread."""
        with self._lock:
            before = torch.get_num_threads()
            if not self._held:
                self._start = before
            elif before in self._held and not hasattr(self._seen, "before"):
                before = self._start
            self._seen.before = before
            self._held.append(threads)
            torch.set_num_threads(threads)
            return before

    def leave(self, threads: int, before: int) -> None:
        with self._lock:
            self._held.remove(threads)
            torch.set_num_threads(before)


_in_force = _InForce()
