"""How much memory of freed tensors compiled graphs keep for their next call."""

from __future__ import annotations

from kernel_dispatch.settings import Settings
from lowering import machine
from lowering.native import library

_MOST = 2 << 30  # what gradients and activations of a model of 100 million weights take


def arrange(settings: Settings, training: bool) -> None:
    """Once our kernels are loaded; without them torch's own allocator stays as it is."""
    if settings.keep_memory != 0:
        size = settings.keep_memory
        library.keep_memory(_by_default() if size is None else size, training)


def _by_default() -> int:
    cpu = machine.cpu()
    there = min(cpu.memory_bytes, cpu.memory_limit_bytes or cpu.memory_bytes)
    return min(there // 16, _MOST)
