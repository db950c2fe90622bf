"""A BatchNorm in inference as a factor and a shift for each channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def factor_and_shift(
    bias: torch.Tensor | None, norm: Sequence[torch.Tensor | None], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a convolution's weight is multiplied by and its bias becomes, in float64."""
    gain, offset, mean, var = (None if t is None else t.detach().double() for t in norm)
    assert mean is not None and var is not None
    factor = (var + eps).rsqrt() if gain is None else gain / (var + eps).sqrt()
    shift = ((0.0 if bias is None else bias.detach().double()) - mean) * factor
    return factor, shift if offset is None else shift + offset
