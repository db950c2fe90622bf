"""What an optimizer hands back, and what it says it could do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernel_dispatch.backends.levels import OptimizationLevel


@dataclass
class OptimizationResult:
    """What was done to a model, as the report of its graphs proves it."""

    success: bool
    model: nn.Module
    level: OptimizationLevel
    # "region:provider" for each entry of the report that somebody else than eager computed
    optimizations_applied: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can carry it: the model by the name of its class."""
        return {
            "success": self.success,
            "model": type(self.model).__name__,
            "level": str(self.level),
            "optimizations_applied": list(self.optimizations_applied),
            "warnings": list(self.warnings),
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True)
class OptimizationStrategy:
    """One thing that may show up in `optimizations_applied`, under the same name."""

    name: str
    description: str
    # Measured on this machine (kernel-dispatch calibrate), against eager; None: not measured.
    speedup_estimate: float | None
    applicable_levels: tuple[OptimizationLevel, ...]
