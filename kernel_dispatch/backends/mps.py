"""Apple GPUs, through torch's Metal device."""

from __future__ import annotations

import torch

from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer


class MPSBackend(TargetBackend):
    BACKEND_NAME = "mps"
    TARGET = "mps"

    def synchronize(self) -> None:
        self._demand()
        torch.mps.synchronize()


class MPSOptimizer(TargetOptimizer):
    BACKEND = MPSBackend
