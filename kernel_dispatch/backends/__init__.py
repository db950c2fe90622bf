"""One interface for every vendor's devices, over `torch.compile(backend="unified")`.

`get_backend()` gives the best one that is here; `prepare_model` a model that is compiled there.
"""

from __future__ import annotations

from kernel_dispatch.backends.amd import AMDBackend, AMDOptimizer
from kernel_dispatch.backends.backend_type import BackendType
from kernel_dispatch.backends.base import BaseBackend
from kernel_dispatch.backends.base_optimizer import BaseOptimizer
from kernel_dispatch.backends.cpu import CPUBackend, CPUOptimizer
from kernel_dispatch.backends.device_info import DeviceInfo
from kernel_dispatch.backends.factory import (
    BackendFactory,
    detect_best_backend,
    get_backend,
    get_optimizer,
    list_available_backends,
)
from kernel_dispatch.backends.intel import IntelBackend, IntelOptimizer
from kernel_dispatch.backends.levels import OptimizationLevel
from kernel_dispatch.backends.mps import MPSBackend, MPSOptimizer
from kernel_dispatch.backends.nvidia import NVIDIABackend, NVIDIAOptimizer
from kernel_dispatch.backends.results import OptimizationResult, OptimizationStrategy
from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from kernel_dispatch.backends.tpu import TPUBackend, TPUOptimizer
from lowering.errors import BackendNotAvailableError

__all__ = [
    "AMDBackend",
    "AMDOptimizer",
    "BackendFactory",
    "BackendNotAvailableError",
    "BackendType",
    "BaseBackend",
    "BaseOptimizer",
    "CPUBackend",
    "CPUOptimizer",
    "DeviceInfo",
    "IntelBackend",
    "IntelOptimizer",
    "MPSBackend",
    "MPSOptimizer",
    "NVIDIABackend",
    "NVIDIAOptimizer",
    "OptimizationLevel",
    "OptimizationResult",
    "OptimizationStrategy",
    "TPUBackend",
    "TPUOptimizer",
    "TargetBackend",
    "TargetOptimizer",
    "detect_best_backend",
    "get_backend",
    "get_optimizer",
    "list_available_backends",
]
