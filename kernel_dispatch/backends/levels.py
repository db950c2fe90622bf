"""The levels O0-O3 under the name that this API has for them."""

from __future__ import annotations

import enum
from typing import Any

from lowering.levels import Level


class OptimizationLevel(str, enum.Enum):
    """A level; equal to its name, and ordered: O0 < O1 < O2 < O3."""

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: object) -> OptimizationLevel:
        """ "O0" to "O3", "none", "conservative", "balanced", "aggressive", in any case; also a
        `kernel_dispatch.Level` or a number. Anything else is a SettingError."""
        return cls(Level.parse(name).name)

    @property
    def level(self) -> Level:
        """The same level, as capability rows and reports have it."""
        return Level[self.value]

    # By their place, also against "balanced": as text, "balanced" would be above every level.
    def __lt__(self, other: Any) -> bool:
        return self.level < Level.parse(other)

    def __le__(self, other: Any) -> bool:
        return self.level <= Level.parse(other)

    def __gt__(self, other: Any) -> bool:
        return self.level > Level.parse(other)

    def __ge__(self, other: Any) -> bool:
        return self.level >= Level.parse(other)
