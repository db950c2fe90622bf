"""Launches kernels, or writes down what would have been launched.

A launcher looks at sizes and strides only, so it can be run on fake tensors of an absent GPU:
inside `recorded()` nothing is launched and every launch is kept, with its configuration.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triton_kernels import architectures
from triton_kernels.configurations import Config


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel: everything that its compilation and its run depend on."""

    kernel: Any
    grid: tuple[int, ...]
    config: Config
    arguments: Mapping[str, Any]  # by name; tile sizes and options are in `config`

    @property
    def name(self) -> str:
        return name_of(self.kernel)


def name_of(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", kernel)).strip("_")


class _State(threading.local):
    records: list[Launch] | None = None  # instead of running
    names: list[str] | None = None  # beside running


_state = _State()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches on this thread are written down instead of run."""
    before, _state.records = _state.records, []
    try:
        yield _state.records
    finally:
        _state.records = before


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The names of the kernels that this thread launches inside of the block, in order."""
    before, _state.names = _state.names, []
    try:
        yield _state.names
    finally:
        if before is not None:
            before += _state.names
        _state.names = before


def launch(kernel: Any, grid: Sequence[int], config: Config, **arguments: Any) -> None:
    """Run `kernel` over `grid` with the arguments by name: tensors, numbers, compile-time flags.

    A grid without programs is not launched; the launcher has allocated an empty result then.
    """
    if not all(grid):
        return
    if _state.records is not None:
        _state.records.append(Launch(kernel, tuple(grid), config, arguments))
        return
    _demand_triton()
    device = next(_tensors(arguments.values())).device
    options = config.options(architectures.of(device))
    if _state.names is not None:
        _state.names.append(name_of(kernel))
    with _current(device):
        kernel[tuple(grid)](**arguments, **config.tiles, **options)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _demand_triton() -> None:
    from triton_kernels._triton import (
        ABSENT,
    )  # imports Triton, which launchers on paper do not need

    if ABSENT:
        raise RuntimeError(ABSENT)


def _current(device: torch.device) -> Any:
    """Triton launches on the current device, whatever device the tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def cdiv(size: int, part: int) -> int:
    return -(-size // part)
