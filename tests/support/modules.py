"""Small modules whose forward is a function, for tests of lowerings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Of(nn.Module):
    """forward(x, ...) = function(self, x, ...), with parts: modules, parameters, buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Beside(nn.Module):
    """Models that have nothing to do with each other, each with an input of its own."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        self.names, self.models = [*models], nn.ModuleList(models.values())

    def forward(self, *inputs: torch.Tensor) -> dict[str, Any]:
        each = zip(self.names, self.models, inputs, strict=True)
        return {name: model(x) for name, model, x in each}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / max(shape[-1], 1) ** 0.5)


def used(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """In eval mode, with running statistics that are not the initial ones."""
    with torch.no_grad():
        model.train()(*inputs)
    return model.eval()


def in_double(model: nn.Module, *inputs: Any) -> Any:
    """The same computation in float64, by eager."""
    wide = copy.deepcopy(model).double()
    return wide(
        *(
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in inputs
        )
    )


def mlp() -> nn.Module:
    """64 inputs, 32 outputs; two linear layers with something absorbable behind each."""
    layers = (nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32), nn.ReLU())
    return nn.Sequential(*layers).eval()
