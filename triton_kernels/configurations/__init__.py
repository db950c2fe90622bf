"""Launch configurations: how large a kernel's tiles are, and how many warps work on one.

One file for each family of kernels beside this one: data by architecture. A function there gives
the candidates for one problem, the best guess first; `tuning.choose` takes the one that was fastest
on this machine, where that was measured, else the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from triton_kernels.architectures import Architecture

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Config:
    """One way to launch one kernel. `tiles` are the kernel's compile-time sizes by name."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    # AMD only; None leaves it to the compiler.
    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    def __getitem__(self, tile: str) -> int:
        return self.tiles[tile]

    def options(self, architecture: Architecture) -> dict[str, int]:
        """As Triton's compiler takes them."""
        found = {"num_warps": self.warps, "num_stages": self.stages}
        if architecture.backend == "hip":
            more = {
                "waves_per_eu": self.waves_per_eu,
                "matrix_instr_nonkdim": self.matrix_instr_nonkdim,
            }
            found.update({name: value for name, value in more.items() if value is not None})
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "tiles": dict(self.tiles),
            "warps": self.warps,
            "stages": self.stages,
            "waves_per_eu": self.waves_per_eu,
            "matrix_instr_nonkdim": self.matrix_instr_nonkdim,
        }

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.tiles.items()]
        parts += [f"warps={self.warps}", f"stages={self.stages}"]
        for name in ("waves_per_eu", "matrix_instr_nonkdim"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name}={value}")
        return " ".join(parts)


def power_of_two(size: int, at_least: int = 1, at_most: int = 1 << 30) -> int:
    """The smallest power of two that holds `size`, within the two limits."""
    return max(at_least, min(at_most, 1 << max(0, size - 1).bit_length()))
