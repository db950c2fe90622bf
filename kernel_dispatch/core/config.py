"""Where `KernelPyTorchConfig` was imported from once."""

from __future__ import annotations

import warnings

from kernel_dispatch.config.dispatch import KernelPyTorchConfig

__all__ = ["KernelPyTorchConfig"]

warnings.warn(
    "kernel_dispatch.core.config is the old place of this class: "
    "use `from kernel_dispatch.config import DispatchConfig`.",
    DeprecationWarning,
    stacklevel=2,
)
