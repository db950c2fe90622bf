"""The one place where tests name the backend.

`UNIFIED_TEST_BACKEND=inductor` (or the sweep's `--backend inductor`) replaces it by stock torch, to
tell which failures are torch's own: O0 is then "eager", O1 "aot_eager" and O2, O3 "inductor".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

BACKEND = os.environ.get("UNIFIED_TEST_BACKEND", "unified")
STOCK = {"O0": "eager", "O1": "aot_eager", "O2": "inductor", "O3": "inductor"}


def compile_at(level: str, function: Callable, *, backend: str = BACKEND, **kwargs: Any) -> Any:
    """`torch.compile` of a function or module at one level."""
    if backend == "inductor":
        return torch.compile(function, backend=STOCK[level], **kwargs)
    options = {"level": level} | kwargs.pop("options", {})
    return torch.compile(function, backend=backend, options=options, **kwargs)
