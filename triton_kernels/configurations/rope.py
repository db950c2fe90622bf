"""Rotary embedding: how many heads of one token a program takes at once."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two


def forward(architecture: Architecture, heads: int, size: int) -> tuple[Config, ...]:
    """A tile is HEADS of one token."""
    return tuple(_tile(architecture, heads, size, warps, 16) for warps in (4, 8))


def backward(architecture: Architecture, heads: int, size: int) -> tuple[Config, ...]:
    """Of the rotation with a norm: more tensors at once, and sums for the norm's weights. With 8
    warps and 8 numbers for a lane, registers spill on sm80."""
    return tuple(_tile(architecture, heads, size, 4, numbers) for numbers in (8, 4))


def _tile(
    architecture: Architecture, heads: int, size: int, warps: int, numbers_per_lane: int
) -> Config:
    width = power_of_two(size, at_least=2)
    numbers = warps * 32 * numbers_per_lane
    several = power_of_two(heads, at_most=max(1, numbers // width))
    fewer = power_of_two(several * width // (numbers_per_lane * architecture.lanes), 1, warps)
    return Config({"HEADS": several}, fewer)


def programs_of_a_token(architecture: Architecture, tokens: int, tiles: int) -> int:
    """Few tokens alone would leave most of the card idle: then tiles of heads are shared out."""
    return max(1, min(tiles, 4 * architecture.units // max(1, tokens)))


def programs(architecture: Architecture, tokens: int) -> int:
    """How many share the tokens of a backward: each sums gradients of the norms' weights."""
    return max(1, min(tokens, architecture.units * 4))
