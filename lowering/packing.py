"""Weights in the form that a library wants, made once and made again when the weight changed.

The packed form is keyed by the weight itself and checked on each use against its version counter
and its storage, so `load_state_dict`, an optimizer step and `weight.data = other` all show in the
next output. The check costs well under a microsecond.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

_all: weakref.WeakSet[PackedWeights] = weakref.WeakSet()


def forget() -> None:
    """Drop every packed form; each is made again when it is needed."""
    for weights in list(_all):
        weights.clear()


class PackedWeights:
    """weight -> packed form, for one library."""

    def __init__(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pack = pack
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor]] = {}
        self._lock = threading.Lock()
        _all.add(self)
        self.packed = 0  # how often a weight was packed, for tests and reports

    def get(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.is_inference():  # no version counter: a change in place could not be seen
            return weight
        found = self._entries.get(id(weight))
        version, pointer = weight._version, weight.data_ptr()
        if (
            found is not None
            and found[0]() is weight
            and found[1] == version
            and found[2] == pointer
        ):
            return found[3]
        return self._make(weight, version, pointer)

    def _make(self, weight: torch.Tensor, version: int, pointer: int) -> torch.Tensor:
        key = id(weight)
        packed = self._pack(weight.detach())
        with self._lock:
            self.packed += 1
            forget = weakref.ref(weight, lambda _: self._entries.pop(key, None))
            self._entries[key] = (forget, version, pointer, packed)
        return packed

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
