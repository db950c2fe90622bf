"""Random weights that keep the signal alive, as trained weights do.

Torch's own defaults let it fade with the depth, until a wrong layer would pass unseen.
"""

from __future__ import annotations

import torch
from torch import nn

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm2d)
RELU_GAIN = 2.0**0.5  # makes up for the half that a ReLU removes


@torch.no_grad()
def draw(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Draw every weight anew and return the model in eval mode.

    A module that has parameters of its own draws them in its method `draw_own`; a product with an
    attribute `gain` follows that.
    """
    for module in model.modules():
        if hasattr(module, "draw_own"):
            module.draw_own()
        elif isinstance(module, _PRODUCTS):
            _draw_product(module, getattr(module, "gain", gain))
        elif isinstance(module, _TABLES):
            module.weight.normal_(std=module.embedding_dim**-0.5)
        elif isinstance(module, _NORMS):
            _draw_norm(module)
        elif isinstance(module, nn.RNNBase):
            _draw_recurrent(module)
    return model.eval()


def _draw_product(module: nn.Linear | nn.Conv1d | nn.Conv2d, gain: float) -> None:
    fan_in = module.weight[0].numel()
    module.weight.normal_(std=gain * fan_in**-0.5)
    if module.bias is not None:
        module.bias.normal_(std=0.1)


def _draw_norm(module: nn.Module) -> None:
    module.weight.normal_(mean=1.0, std=0.1)
    if getattr(module, "bias", None) is not None:
        module.bias.normal_(std=0.1)
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.normal_(std=0.1)
        module.running_var.uniform_(0.5, 1.5)


def _draw_recurrent(module: nn.RNNBase) -> None:
    for weight in module.parameters():
        weight.normal_(std=weight.shape[1] ** -0.5 if weight.dim() == 2 else 0.1)
