"""Lanes: other torches than the main one, each with a virtual environment and tests of its own.

`python -m tests.lanes NAME`, by way of `make lane-NAME`. Standard library only: this runs before
anything is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Lane:
    """An environment that one library or one end of the window of torches wants for itself."""

    name: str
    torch: str  # the minor version, or in words which
    requirements: tuple[str, ...]  # pip's arguments; the versions of extras are in pyproject.toml
    beside: tuple[str, str] | None = None  # the distribution that it is for, its minor version
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.name}"

    @property
    def tests(self) -> Path:
        """What only this lane can run."""
        return ROOT / "tests" / "lanes" / self.name

    @property
    def wants(self) -> str:
        """In words, for the skips where it is not there."""
        parts = [f"torch {self.torch}"] + ([" ".join(self.beside)] if self.beside else [])
        return f"{' and '.join(parts)}: make lane-{self.name}"


LANES = (
    Lane("xla", "2.9", (".[test,xla]",), ("torch_xla", "2.9"), {"PJRT_DEVICE": "CPU"}),
    Lane("ipex", "2.8", (".[test,ipex]",), ("intel-extension-for-pytorch", "2.8")),
    Lane("torch211", "2.11", (".[test]", "torch==2.11.*")),
    # An index may not have the last one yet, or be held back: then it is the newest that it gives.
    Lane("newest", "up to 2.15", (".[test]", "torch<2.16")),
)
BY_NAME = {lane.name: lane for lane in LANES}

# The part of the main suite that runs under every torch, each line as a run of its own.
MAIN = (
    ("-m", "quick", "tests"),
    (
        "-m",
        "not wide",
        "tests/lanes/window",
        *(
            f"tests/backends/test_{name}.py"
            for name in (
                "semantics",
                "torch_integration",
                "fallback_and_guard",
                "weights_stay_fresh",
                "linear_regions",
                "gpu_regions",
            )
        ),
    ),
    (
        "-m",
        "not wide",
        "tests/models/test_models.py",
        "-k",
        "(decoder or cnn) and not encoder and not o3",
    ),
)
SHORT = (MAIN[0], ("tests/lanes/window",))
