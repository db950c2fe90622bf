"""Weights in the form that a library wants, made once and made again when one of them changed.

A packed form is keyed by the weight itself and checked on each use, with everything else that went
into it (bias, BatchNorm), against version counters and storage: so `load_state_dict`, an optimizer
step and `weight.data = other` all show in the next output. Writes through `weight.data.mul_(2)` or
a detached alias move neither; a sample of the words, spread over the tensor, is compared as well,
which catches whole-tensor writes (not a write to a few single elements).

This is for libraries that are called from Python; `native/weights.h` does the same for ours.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

_all: weakref.WeakSet[PackedWeights] = weakref.WeakSet()


def forget() -> None:
    """Drop every packed form; each is made again when it is needed."""
    from lowering.native import library

    library.forget()
    for weights in list(_all):
        weights.clear()


_SAMPLES = 16


class _Source:
    """One tensor that went into a packed form, as it was then."""

    __slots__ = ("pointer", "sample", "sampled", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, gone: Callable[[Any], None]) -> None:
        self.tensor = weakref.ref(tensor, gone)
        self.version = tensor._version
        self.pointer = tensor.data_ptr()
        self.sample = _sample(tensor)  # looks into its memory: only read while `pointer` is current
        self.sampled = self.sample.tobytes()

    def unchanged(self, tensor: torch.Tensor) -> bool:
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.pointer == tensor.data_ptr()
            and self.sample.tobytes() == self.sampled
        )


def _sample(tensor: torch.Tensor) -> memoryview:
    """A view of single words, evenly spread over the memory that the tensor covers.

    Empty for memory of a GPU: reading it would wait for all that runs there.
    """
    if tensor.device.type != "cpu":
        return memoryview(b"")
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    words = span * tensor.element_size() // 4 if tensor.numel() else 0
    memory = (ctypes.c_uint32 * words).from_address(tensor.data_ptr())
    # An odd step, so that the samples do not all fall into one column.
    return memoryview(memory).cast("B").cast("I")[:: max(1, words // _SAMPLES) | 1]


@dataclass(frozen=True)
class _Entry:
    sources: tuple[_Source, ...]
    packed: Any


class PackedWeights:
    """(weight, what was done to it) -> packed form, for one library."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Hashable], _Entry] = {}
        self._lock = threading.Lock()
        _all.add(self)
        self.packed = 0  # how often a weight was packed, for tests and reports

    def get(
        self, tensors: tuple[torch.Tensor, ...], recipe: Hashable, make: Callable[[], Any]
    ) -> Any:
        """The packed form of `tensors[0]`, which `make` builds from all of them."""
        key = (id(tensors[0]), recipe)
        found = self._entries.get(key)
        if (
            found is not None
            and len(found.sources) == len(tensors)
            and all(map(_Source.unchanged, found.sources, tensors))
        ):
            return found.packed
        if any(tensor.is_inference() for tensor in tensors):
            return make()  # no version counter: a change in place could not be seen
        return self._make(key, tensors, make)

    def _make(
        self,
        key: tuple[int, Hashable],
        tensors: tuple[torch.Tensor, ...],
        make: Callable[[], Any],
    ) -> Any:

        def gone(_: Any) -> None:
            self._entries.pop(key, None)

        sources = tuple(_Source(tensor, gone) for tensor in tensors)
        entry = _Entry(sources, make())
        with self._lock:
            self.packed += 1
            self._entries[key] = entry
        return entry.packed

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
