"""The interface of every optimizer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from kernel_dispatch.backends.base import LevelLike
from kernel_dispatch.backends.results import OptimizationResult, OptimizationStrategy


class BaseOptimizer(ABC):
    """Compiles a model and says what was done to it."""

    @abstractmethod
    def optimize(
        self, model: nn.Module, level: LevelLike = None, sample_input: Any = None
    ) -> tuple[nn.Module, OptimizationResult]:
        """The model, compiled, and what the report of its graphs proves."""

    @abstractmethod
    def get_available_strategies(self) -> list[OptimizationStrategy]:
        """What can show up in `optimizations_applied`."""

    def optimize_legacy(
        self, model: nn.Module, level: LevelLike = None, sample_input: Any = None
    ) -> nn.Module:
        """`optimize` as it was once: gives the model only."""
        warnings.warn(
            "optimize_legacy() gives the model only: use `model, result = optimize(...)`, which "
            "also says what was done.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.optimize(model, level, sample_input)[0]
