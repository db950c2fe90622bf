"""Rotary position embedding, in the half-rotated form of Llama."""

from __future__ import annotations

import torch
from torch import nn


class RotaryTable(nn.Module):
    """Cosines and sines of every position, made once."""

    def __init__(self, positions: int, head_width: int, base: float = 10000.0) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_width, 2).double() / head_width)
        angles = torch.outer(torch.arange(positions).double(), frequencies).repeat(1, 2)
        self.register_buffer("cosines", angles.cos().float())
        self.register_buffer("sines", angles.sin().float())

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cosines[positions], self.sines[positions]


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
