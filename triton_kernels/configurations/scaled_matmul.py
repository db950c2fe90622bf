"""Quantisation of rows; the products themselves take the tiles of `matmul`."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# A row of up to this many numbers is read once; a longer one twice, this many at a time.
WIDEST = 16384


def quantise(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """Some 4 Ki numbers for each program, and 16 or 8 for each thread."""
    block = power_of_two(columns, at_least=16, at_most=WIDEST)
    rows = max(1, min(16, 4096 // block))
    most = 1024 // architecture.lanes
    warps = power_of_two(block * rows // (16 * architecture.lanes), 1, most)
    found = Config({"ROWS": rows, "BLOCK": block}, warps=warps)
    faster = Config({"ROWS": rows, "BLOCK": block}, warps=min(most, 2 * warps))
    return (found, faster) if faster != found else (found,)
