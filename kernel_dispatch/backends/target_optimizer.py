"""An optimizer over one of our targets: prepare, run the sample, read the report."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from kernel_dispatch import reporting, settings
from kernel_dispatch.backends import preparing, proof, strategies
from kernel_dispatch.backends.base import LevelLike
from kernel_dispatch.backends.base_optimizer import BaseOptimizer
from kernel_dispatch.backends.levels import OptimizationLevel
from kernel_dispatch.backends.results import OptimizationResult, OptimizationStrategy
from kernel_dispatch.backends.sampling import without_trace
from kernel_dispatch.backends.target_backend import TargetBackend, by_factory
from kernel_dispatch.config.dispatch import DispatchConfig


class TargetOptimizer(BaseOptimizer):
    """What the vendors share; a subclass names its backend."""

    BACKEND: ClassVar[type[TargetBackend]]

    def __init__(self, config: DispatchConfig | None = None) -> None:
        with by_factory():
            self.backend = self.BACKEND(config)

    def optimize(
        self, model: nn.Module, level: LevelLike = None, sample_input: Any = None
    ) -> tuple[nn.Module, OptimizationResult]:
        """`prepare_model`, then one call with the sample (a tensor, a tuple, a dict).

        A model in evaluation mode is compiled for inference, one in training mode as it is called.
        The sample leaves no trace: buffers and the random state are put back. Where the call
        raises, `success` is False, the error is among the warnings, and the model is the caller's.
        """
        prepared = self.backend.prepare_model(model, level)
        effective = self._level(prepared)
        if sample_input is None:
            result = OptimizationResult(True, prepared, effective, warnings=[_NO_SAMPLE])
            return prepared, result
        try:
            with without_trace(prepared, self.backend.device):
                self.backend.call(prepared, sample_input)
        except Exception as error:  # noqa: BLE001  (whatever a model raises is told, not thrown)
            own = preparing.plain(model)
            told = f"{type(error).__name__}: {error}"
            return own, OptimizationResult(False, own, effective, warnings=[told])
        return prepared, _told(prepared, effective)

    def _level(self, prepared: nn.Module) -> OptimizationLevel:
        how = preparing.how(prepared)
        assert how is not None
        return OptimizationLevel.from_string(settings.resolve(None, how.options).level)

    def get_available_strategies(self) -> list[OptimizationStrategy]:
        """What this vendor's target can do, by the rows that the compiler chooses by."""
        return strategies.of(self.backend._target())


def _told(prepared: nn.Module, level: OptimizationLevel) -> OptimizationResult:
    graphs = reporting.report(prepared)
    return OptimizationResult(
        success=True,
        model=prepared,
        level=level,
        optimizations_applied=proof.applied(graphs),
        warnings=proof.fallen_back(graphs) or ([] if graphs else [_NO_GRAPH]),
        metrics=proof.counted(graphs),
    )


_NO_SAMPLE = "nothing was compiled yet: no sample_input was given; the first call compiles"
_NO_GRAPH = "nothing was compiled: Dynamo handed over no graph; kernel_dispatch.explain tells why"
