"""Weights in the form that a library wants, made once and made again when the weight changed.

The packed form is keyed by the weight itself and checked on each use against its version counter
and its storage, so `load_state_dict`, an optimizer step and `weight.data = other` all show in the
next output. Writes through `weight.data.mul_(2)` or a detached alias move neither; a sample of the
weight's words, spread over all of it, is compared as well, which catches whole-tensor writes (not
a write to a few single elements). The check costs about two microseconds.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

_all: weakref.WeakSet[PackedWeights] = weakref.WeakSet()


def forget() -> None:
    """Drop every packed form; each is made again when it is needed."""
    for weights in list(_all):
        weights.clear()


@dataclass(frozen=True)
class _Entry:
    weight: weakref.ref[torch.Tensor]
    version: int
    pointer: int
    sample: memoryview  # looks into the weight's own memory: only read while `pointer` is current
    sampled: bytes
    packed: torch.Tensor


_SAMPLES = 16


def _sample(weight: torch.Tensor) -> memoryview:
    """A view of single words, evenly spread over the memory that the weight covers."""
    span = 1 + sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    words = span * weight.element_size() // 4
    memory = (ctypes.c_uint32 * words).from_address(weight.data_ptr())
    # An odd step, so that the samples do not all fall into one column.
    return memoryview(memory).cast("B").cast("I")[:: max(1, words // _SAMPLES) | 1]


class PackedWeights:
    """weight -> packed form, for one library."""

    def __init__(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pack = pack
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        _all.add(self)
        self.packed = 0  # how often a weight was packed, for tests and reports

    def get(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.is_inference():  # no version counter: a change in place could not be seen
            return weight
        found = self._entries.get(id(weight))
        if (
            found is not None
            and found.weight() is weight
            and found.version == weight._version
            and found.pointer == weight.data_ptr()
            and found.sample.tobytes() == found.sampled
        ):
            return found.packed
        return self._make(weight)

    def _make(self, weight: torch.Tensor) -> torch.Tensor:
        key = id(weight)
        sample = _sample(weight)
        entry = _Entry(
            weight=weakref.ref(weight, lambda _: self._entries.pop(key, None)),
            version=weight._version,
            pointer=weight.data_ptr(),
            sample=sample,
            sampled=sample.tobytes(),
            packed=self._pack(weight.detach()),
        )
        with self._lock:
            self.packed += 1
            self._entries[key] = entry
        return entry.packed

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
