"""Is Triton here, and can it run kernels? Nothing in this file raises, compiles or starts a GPU."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import Any

OUR_DISTRIBUTION = "kernel-dispatch"


@dataclass(frozen=True)
class TritonStatus:
    """What was found. `reason` says why kernels cannot run; it is empty when they can."""

    importable: bool
    version: str
    has_driver: bool  # a GPU driver that Triton calls active
    interpreter: bool  # TRITON_INTERPRET=1: kernels run in Python on CPU tensors
    foreign_distribution: str  # another distribution that provides `triton_kernels`
    reason: str

    @property
    def usable(self) -> bool:
        return not self.reason


def status() -> TritonStatus:
    """Import Triton and look. Asked anew each time: TRITON_INTERPRET may change."""
    foreign = foreign_distribution()
    interpreter = interpreting()
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # noqa: BLE001  (a broken build can raise anything on import)
        reason = f"triton does not import: {type(error).__name__}: {error}"
        return TritonStatus(False, "", False, interpreter, foreign, reason)
    has_driver, no_driver = _driver()
    reason = _incomplete()
    if not reason and not has_driver and not interpreter:
        reason = f"{no_driver}, and TRITON_INTERPRET=1 is not set"
    version = str(getattr(triton, "__version__", ""))
    return TritonStatus(True, version, has_driver, interpreter, foreign, reason)


def interpreting() -> bool:
    """As Triton reads it: set before a kernel is defined, or it has no effect on that kernel."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "y", "yes")


def _driver() -> tuple[bool, str]:
    """Whether any backend calls its driver active, and if not, why not.

    `triton.runtime.driver.active` would compile a C helper first; the backends' own `is_active`
    answers without a compiler and without touching the device.
    """
    try:
        backends: dict[str, Any] = importlib.import_module("triton.backends").backends
        active = [name for name, backend in backends.items() if backend.driver.is_active()]
    except Exception as error:  # noqa: BLE001  (forks and other flavours: shape unknown)
        return False, f"triton's drivers cannot be asked: {type(error).__name__}: {error}"
    return bool(active), "" if active else "no GPU driver is active"


def _incomplete() -> str:
    """Inductor names its cached kernels by `triton_key`; a build without it breaks when compiling.

    It lives in `runtime.cache` from Triton 3.5 on and in `compiler.compiler` before.
    """
    tried = ""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        try:
            if hasattr(importlib.import_module(module), "triton_key"):
                return ""
        except Exception as error:  # noqa: BLE001  (same as above; kept for the reason)
            tried = f" ({type(error).__name__}: {error})"
    return f"this triton has no triton_key: it is incomplete or another flavour{tried}"


def foreign_distribution() -> str:
    """Another installed distribution that provides our top-level name, or an empty string.

    triton-lang publishes a `triton_kernels` of its own, which vLLM and SGLang load where they find
    it. Both cannot be installed into one environment: the later one overwrites files of the first.
    """
    return _foreign(packages_distributions)


@functools.lru_cache(maxsize=4)
def _foreign(installed: Callable[[], Mapping[str, list[str]]]) -> str:
    """Once per process: every distribution's records are read for it, which takes a while."""
    owners = installed().get("triton_kernels", [])
    others = {name for name in owners if _canonical(name) != OUR_DISTRIBUTION}
    return ", ".join(sorted(others))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
