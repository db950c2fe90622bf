"""Weights in the form that a library wants, made once and made again when one of them changed.

A packed form is keyed by the weight itself and checked on each use, with everything else that went
into it (bias, BatchNorm), against version counters, storage, sizes and strides: so
`load_state_dict`, an optimizer step, `weight.data = other` and `weight.data = weight.data.t()` all
show in the next output. Writes through `weight.data.mul_(2)` or a detached alias move none of them;
a sample of the words is compared as well (16 spread over the tensor; two that are not zero where
our kernels' library compares), which catches whole-tensor writes (not a write to a few single
elements).

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

    __slots__ = ("pointer", "sample", "sampled", "shape", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, gone: Callable[[Any], None]) -> None:
        self.tensor = weakref.ref(tensor, gone)
        self.version = tensor._version
        self.pointer = tensor.data_ptr()
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.sample = _sample(tensor)  # looks into its memory: only read while `pointer` is current
        self.sampled = memoryview(self.sample.tobytes()).cast("I")  # as `sample`: compared as words


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


class _Sources:
    """All tensors that went into a packed form."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], gone: Callable[[Any], None]) -> None:
        self._each = tuple(_Source(tensor, gone) for tensor in tensors)

    def are(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """In one piece: this runs in every call of every region."""
        if len(self._each) != len(tensors):
            return False
        for source, tensor in zip(self._each, tensors, strict=True):
            if (
                source.tensor() is not tensor
                or source.version != tensor._version
                or source.pointer != tensor.data_ptr()
                or source.stride != tensor.stride()
                or source.shape != tensor.shape
                or source.sample != source.sampled
            ):
                return False
        return True


class _ManySources:
    """The same, by the library of our kernels, which compares five in the time of one."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], gone: Callable[[Any], None]) -> None:
        from lowering.native import library

        self._alive = [weakref.ref(tensor, gone) for tensor in tensors]
        self._number = torch.ops.kernel_dispatch.watch(tensors)
        weakref.finalize(self, library.forget_watched, self._number)

    def are(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        unchanged: bool = torch.ops.kernel_dispatch.unchanged.default(self._number, tensors)
        return unchanged


_MANY = 4  # from here on the call itself pays


def _sources(
    tensors: tuple[torch.Tensor, ...], gone: Callable[[Any], None]
) -> _Sources | _ManySources:
    from lowering.native import library

    many = len(tensors) >= _MANY and library.is_loaded()
    many = many and all(tensor.device.type == "cpu" and tensor.nbytes >= 4 for tensor in tensors)
    return (_ManySources if many else _Sources)(tensors, gone)


@dataclass(frozen=True)
class _Entry:
    recipe: Hashable
    sources: _Sources | _ManySources
    packed: Any

    def holds(self, tensors: tuple[torch.Tensor, ...], recipe: Hashable) -> bool:
        return self.recipe == recipe and self.sources.are(tensors)


def out_in(weight: torch.Tensor, in_out: bool) -> torch.Tensor:
    """The matrix as (out, in), however it is stored; a view."""
    return weight.t() if in_out else weight


class Place:
    """A call in a graph, which mostly asks for the form that it asked for last."""

    __slots__ = ("_last", "_weights")

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights
        self._last: Callable[[], _Entry | None] = lambda: None  # keeps nothing alive

    def get(
        self, tensors: tuple[torch.Tensor, ...], recipe: Hashable, make: Callable[[], Any]
    ) -> Any:
        """The packed form of `tensors[0]`, which `make` builds from all of them."""
        last = self._last()
        if last is not None and last.holds(tensors, recipe):
            return last.packed
        entry = self._weights.entry(tensors, recipe, make)
        self._last = weakref.ref(entry)
        return entry.packed


class PackedWeights:
    """(weight, what was done to it) -> packed form, for one library."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._lock = threading.Lock()
        _all.add(self)
        self.packed = 0  # how often a weight was packed, for tests and reports

    def get(
        self, tensors: tuple[torch.Tensor, ...], recipe: Hashable, make: Callable[[], Any]
    ) -> Any:
        """The packed form of `tensors[0]`, which `make` builds from all of them."""
        return self.entry(tensors, recipe, make).packed

    def entry(
        self, tensors: tuple[torch.Tensor, ...], recipe: Hashable, make: Callable[[], Any]
    ) -> _Entry:
        key = (*map(id, tensors), recipe)
        found = self._entries.get(key)
        if found is not None and found.holds(tensors, recipe):
            return found
        if any(tensor.is_inference() for tensor in tensors):
            # No version counter: a change in place could not be seen, so this holds for nothing.
            return _Entry(recipe, _Sources((), lambda _: None), make())
        return self._make(key, tensors, recipe, make)

    def _make(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        recipe: Hashable,
        make: Callable[[], Any],
    ) -> _Entry:

        def gone(_: Any) -> None:
            self._entries.pop(key, None)

        entry = _Entry(recipe, _sources(tensors, gone), make())
        with self._lock:
            self.packed += 1
            self._entries[key] = entry
        return entry

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
