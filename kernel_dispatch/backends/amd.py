"""AMD GPUs, through a ROCm build of torch, which calls its devices "cuda"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_dispatch.backends import gpu
from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from lowering.contract import Probe


class AMDBackend(TargetBackend):
    BACKEND_NAME = "amd"
    TARGET = "rocm"

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        return gpu.properties(found, known)


class AMDOptimizer(TargetOptimizer):
    BACKEND = AMDBackend
