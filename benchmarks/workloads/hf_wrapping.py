"""Models of `transformers` as plain callables: tensors in by position, tensors out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Plain(nn.Module):
    """Names the inputs, and returns the named outputs: one tensor, or a tuple of them."""

    def __init__(
        self, model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...], **options: Any
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs, self.options = model, inputs, outputs, options
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        named = dict(zip(self.inputs, tensors, strict=True))
        result = self.model(**named, **self.options)
        chosen = tuple(getattr(result, name) for name in self.outputs)
        return chosen[0] if len(chosen) == 1 else chosen


class StaticDecoding(nn.Module):
    """One token with a `StaticCache`; every call decodes the same position again.

    The cache's tensors are buffers, so that they follow the model to another dtype or device, which
    the cache itself would not.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        config = model.config
        head_width = config.hidden_size // config.num_attention_heads
        cache.early_initialization(
            1, config.num_key_value_heads, head_width, torch.float32, torch.device("cpu")
        )
        # Gradients would flow into the cache, and from call to call.
        self.model, self.cache = model.requires_grad_(False), cache
        for index, layer in enumerate(cache.layers):
            self.register_buffer(f"keys_{index}", layer.keys.normal_())
            self.register_buffer(f"values_{index}", layer.values.normal_())

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.cache.layers):
            layer.keys = self.get_buffer(f"keys_{index}")
            layer.values = self.get_buffer(f"values_{index}")
            layer.cumulative_length = position.clone()
            layer.device = position.device
        return self.model(
            input_ids=token, position_ids=position[None], past_key_values=self.cache
        ).logits


def freeze(model: nn.Module, *endings: str) -> nn.Module:
    """Take out of the training what has no gradient in exact arithmetic, only rounding noise."""
    for name, parameter in model.named_parameters():
        if name.endswith(endings):
            parameter.requires_grad_(False)
    return model
