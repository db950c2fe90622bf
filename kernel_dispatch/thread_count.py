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
        before = torch.get_num_threads()
        if before == threads:
            return run(*args)
        _set_for_this_thread(threads, others=before)
        try:
            return run(*args)
        finally:
            torch.set_num_threads(before)

    return scoped


def _set_for_this_thread(threads: int, others: int) -> None:
    """`torch.set_num_threads` also sets the count that every later thread starts with.

    A thread that first meets torch while a call of ours runs would inherit that call's count and
    keep it; Dynamo's guards on the count would fail there. What threads start with is put back at
    once, from a thread of its own, since setting it here would undo ours.
    """
    with _lock:
        torch.set_num_threads(threads)
        helper = threading.Thread(target=torch.set_num_threads, args=(others,))
        helper.start()
        helper.join()


_lock = threading.Lock()
