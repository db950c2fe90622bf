"""Configuration as values: options for the backends, the file that enables them, their limits."""

from __future__ import annotations

from kernel_dispatch.config.backend_file import get_backend_macros, load_backend_config
from kernel_dispatch.config.dispatch import DispatchConfig, KernelPyTorchConfig
from kernel_dispatch.config.limits import LIMITS

__all__ = [
    "LIMITS",
    "DispatchConfig",
    "KernelPyTorchConfig",
    "get_backend_macros",
    "load_backend_config",
]
