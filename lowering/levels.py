"""The levels O0-O3: a contract on numerics and compile time, and the names users give them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lowering.errors import unknown


class Level(enum.IntEnum):
    """Ordered, so that a capability row can say "from O2 on"."""

    O0 = 0
    O1 = 1
    O2 = 2
    O3 = 3

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, value: object, source: str = "") -> Level:
        """`"O2"`, `"o2"`, `2`, `"balanced"` or a Level; anything else is a SettingError."""
        if isinstance(value, cls):
            return value
        name = str(value).strip().lower()
        if name in ALIASES and isinstance(value, (str, int)) and not isinstance(value, bool):
            return ALIASES[name]
        raise unknown("level", value, [level.name for level in cls] + list(_WORDS), source)


_WORDS = {
    "none": Level.O0,
    "conservative": Level.O1,
    "balanced": Level.O2,
    "aggressive": Level.O3,
}
ALIASES = (
    _WORDS
    | {level.name.lower(): level for level in Level}
    | {str(int(level)): level for level in Level}
)


@dataclass(frozen=True)
class Contract:
    """What a level promises, in the words of the documentation and of `levels`."""

    level: Level
    alias: str
    may_do: str
    numerics: str
    compile_time: str


CONTRACTS = (
    Contract(
        Level.O0,
        "none",
        "placement and report only",
        "bit-identical to eager on that target",
        "about 0",
    ),
    Contract(
        Level.O1,
        "conservative",
        "library calls and prepacked weights; needs no C++ compiler; same dtype",
        "error against float64 at most 2x eager's own + 4 eps, per output",
        "seconds",
    ),
    Contract(
        Level.O2,
        "balanced",
        "all of O1, kernels of ours and Inductor code generation where a compiler works",
        "as O1",
        "Inductor default's, cached across processes",
    ),
    Contract(
        Level.O3,
        "aggressive",
        "all of O2, and max-autotune; CUDA graphs on CUDA and ROCm",
        "as O1, except 3x3 convolutions through NNPACK (Winograd, error some 1e-5), where it was "
        "measured to be the fastest, and on GPUs linear layers in int8 or 8-bit floats, where each "
        "was within `tolerance` (relative L2 error, 0.01) on its first inputs",
        "minutes, cached across processes",
    ),
)
