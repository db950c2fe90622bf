"""What is timed: a model or a function with its inputs, built anew in every process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GROUPS = ("model", "op", "overhead")


@dataclass(frozen=True)
class Case:
    """Something to call, and what to call it with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """A named recipe of a case.

    `build` draws weights and inputs from torch's generator only, so that every process, after
    `torch.manual_seed`, builds the same case; the harness compares fingerprints and refuses a
    comparison of different ones. A module comes in the mode (train or eval) it is to run in.
    """

    name: str
    build: Callable[[], Case]
    summary: str
    group: str = "model"
    needs: tuple[str, ...] = ()  # packages beyond torch
    # "": any. A workload with integer inputs only, or a fixed dtype inside, names what it is.
    dtypes: tuple[str, ...] = ()
    trains: bool = True  # has gradients worth a training step

    def missing(self) -> str:
        """Why it cannot be built here; empty if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"needs {', '.join(absent)}: pip install {' '.join(absent)}" if absent else ""
