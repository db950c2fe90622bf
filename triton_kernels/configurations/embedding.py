"""Embedding: tiles of the look-up, and how its backward shares out the gradients of one id."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# A run of equal ids is summed in parts that end where a multiple of this many sorted ids does.
PART = 64


def forward(architecture: Architecture, ids: int, columns: int) -> tuple[Config, ...]:
    """Tile ROWS x BLOCK."""
    found = []
    for numbers_per_lane in (8, 16):
        numbers = 4 * architecture.lanes * numbers_per_lane
        block = power_of_two(columns, at_least=16, at_most=numbers)
        found.append(
            Config({"ROWS": power_of_two(ids, at_most=numbers // block), "BLOCK": block}, warps=4)
        )
    return tuple(found)


def backward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """ROWS gradients of one id at a time: most ids of a text come few times."""
    block = power_of_two(columns, at_least=16, at_most=8 * architecture.lanes)
    warps = power_of_two(block * 4 // (8 * architecture.lanes), at_most=4)
    return Config({"ROWS": 4, "BLOCK": block}, warps), Config({"ROWS": 8, "BLOCK": block}, warps)


def joining(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """ROWS parts of one long run at a time."""
    return (Config({"ROWS": 16, "BLOCK": power_of_two(columns, at_least=16, at_most=128)}, 4),)
