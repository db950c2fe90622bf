"""Random pictures."""

from __future__ import annotations

import torch


def random_picture(side: int) -> torch.Tensor:
    """Patches of colour under noise: of pure noise, a classifier sees the same mean every time."""
    patches = torch.randn(1, 3, 8, 8)
    for dimension in (2, 3):
        patches = patches.repeat_interleave(side // 8, dim=dimension)
    return patches + 0.5 * torch.randn(1, 3, side, side)
