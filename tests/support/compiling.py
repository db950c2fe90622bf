"""The one place where tests name the backend.

`UNIFIED_TEST_BACKEND=inductor` (or the sweep's `--backend inductor`) replaces it by stock torch, to
tell which failures are torch's own: O0 is then "eager", O1 "aot_eager" and O2, O3 "inductor".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

BACKEND = os.environ.get("UNIFIED_TEST_BACKEND", "unified")
STOCK = {"O0": "eager", "O1": "aot_eager", "O2": "inductor", "O3": "inductor"}


def compile_at(level: str, function: Callable, *, backend: str = BACKEND, **kwargs: Any) -> Any:
    """`torch.compile` of a function or module at one level."""
    if backend == "inductor":
        return torch.compile(function, backend=STOCK[level], **kwargs)
    options = {"level": level} | kwargs.pop("options", {})
    return torch.compile(function, backend=backend, options=options, **kwargs)


def size_limits_lifted() -> AbstractContextManager[None]:
    """Let every graph and region, however small, go to the provider that would take a large one.

    The capability table leaves tiny graphs to eager, where a compiled call costs more than it
    saves. Test inputs are tiny: with the limits in force a test of the lowerings would compare
    eager with eager and prove nothing.
    """
    return _rows_of_the_cpu(**_WITHOUT_LIMITS)


def every_row_applies() -> AbstractContextManager[None]:
    """As `size_limits_lifted`, and on every processor, also where a library is slow."""
    return _rows_of_the_cpu(**_WITHOUT_LIMITS, features=frozenset())


_WITHOUT_LIMITS: dict[str, Any] = {
    "min_ops": 0,
    "min_bytes": 0,
    "min_flops": 0,
    "shape_classes": None,
    "refused_alone": frozenset(),
    "before_measured": False,
}


@contextmanager
def _rows_of_the_cpu(**changes: Any) -> Iterator[None]:
    from kernel_dispatch import devices
    from lowering import targets
    from lowering.targets import cpu

    shipped = cpu.TARGET

    def install(target: Any) -> None:
        cpu.TARGET = target
        targets.known.cache_clear()
        devices.forget()

    install(replace(shipped, rows=tuple(replace(row, **changes) for row in shipped.rows)))
    try:
        with mock.patch("lowering.regions.rows.stands_alone", return_value=False):
            yield  # nor is any convolution left to torch for where its images lie
    finally:
        install(shipped)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """What Inductor generates depends on it; a test process may have one thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
