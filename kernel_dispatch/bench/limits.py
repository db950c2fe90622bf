"""The machine's own limits, with the threads of the run: product rate and read bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernel_dispatch.bench.device import synchronize
from kernel_dispatch.bench.results import Limits
from lowering import measuring

_SIZE = 1024  # large enough for the full rate, small enough to repeat


def measure(dtype: torch.dtype, device: str) -> Limits:
    """The best of several runs each: a limit is what was reached once, not what is usual."""
    flops = 2 * _SIZE**3
    best: tuple[float, str] = (0.0, "")
    wait = partial(synchronize, device)
    for library, product in _products(dtype, device).items():
        if rate := measuring.best_rate(flops, product, wait):
            best = max(best, (rate, library))
    memory = measuring.buffer(measuring.READ_BYTES, device)
    return Limits(*best, measuring.best_rate(memory.nbytes, memory.sum, wait))


def _products(dtype: torch.dtype, device: str) -> Mapping[str, Callable[[], Any]]:
    """Every library of this torch that multiplies matrices of this dtype, on operands it likes."""
    a = torch.randn(_SIZE, _SIZE, device=device).to(dtype)
    b = torch.randn(_SIZE, _SIZE, device=device).to(dtype)
    products: dict[str, Callable[[], Any]] = {"torch.mm": lambda: torch.mm(a, b)}
    if device == "cpu" and torch.backends.mkldnn.is_available() and dtype == torch.float32:
        operator: Any = torch.ops.mkldnn._linear_pointwise
        products["oneDNN"] = lambda: operator(a, b, None, "none", [], "")
    return products
