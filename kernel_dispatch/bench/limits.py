"""The machine's own limits, with the threads of the run: product rate and read bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_dispatch.bench.device import synchronize
from kernel_dispatch.bench.results import Limits

_SIZE = 1024  # large enough for the full rate, small enough to repeat
_READ_BYTES = 512 << 20  # past every cache
_REPEATS = 5


def measure(dtype: torch.dtype, device: str) -> Limits:
    """The best of several runs each: a limit is what was reached once, not what is usual."""
    flops = 2 * _SIZE**3
    best: tuple[float, str] = (0.0, "")
    for library, product in _products(dtype, device).items():
        seconds = _best_seconds(product, device)
        if seconds is not None:
            best = max(best, (flops / seconds, library))
    read = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    seconds = _best_seconds(read.sum, device)
    return Limits(*best, _READ_BYTES / seconds if seconds else 0.0)


def _products(dtype: torch.dtype, device: str) -> Mapping[str, Callable[[], Any]]:
    """Every library of this torch that multiplies matrices of this dtype, on operands it likes."""
    a = torch.randn(_SIZE, _SIZE, device=device).to(dtype)
    b = torch.randn(_SIZE, _SIZE, device=device).to(dtype)
    products: dict[str, Callable[[], Any]] = {"torch.mm": lambda: torch.mm(a, b)}
    if device == "cpu" and torch.backends.mkldnn.is_available() and dtype == torch.float32:
        operator: Any = torch.ops.mkldnn._linear_pointwise
        products["oneDNN"] = lambda: operator(a, b, None, "none", [], "")
    return products


def _best_seconds(run: Callable[[], Any], device: str) -> float | None:
    """None where it does not run at all: one library less, no reason to stop."""
    best = float("inf")
    try:
        run()
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run()
            synchronize(device)
            best = min(best, time.perf_counter() - start)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return best
