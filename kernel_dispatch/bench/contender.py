"""Who is timed: a way to make a case fast, as its own users would ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_dispatch.bench.workload import Case


def _nothing_missing() -> str:
    return ""


class ContenderWarning(UserWarning):
    """What a reader of the row has to know: part of it ran elsewhere, say. Its text is shown."""


@dataclass(frozen=True)
class Contender:
    """One row of a comparison. It runs in a process of its own, which does nothing else.

    `prepare` is called once per case, before the first call, and returns what is called instead of
    `case.fn`, with the same arguments. It may raise: the row then says why. `missing` answers in
    that process too, so it may import what it asks about.
    """

    name: str
    summary: str  # how its users run it: shown beside the figures
    prepare: Callable[[Case], Callable[..., Any]]
    missing: Callable[[], str] = _nothing_missing
    version: Callable[[], str] = _nothing_missing
    environment: Mapping[str, str] = field(default_factory=dict)
    # An interpreter with a torch of its own, for peers that exist for one torch only.
    python: Callable[[], str] = _nothing_missing
    # How many times eager's own error it may reach: 2 is the contract of O1 and O2, 10 tells a
    # wrong result from another order of rounding.
    error_factor: float = 10.0
    # A number: it may lower the precision, up to this relative error.
    tolerance: float | None = None
    trains: bool = True
    compiles_with_dynamo: bool = True  # False: torch's compile counters say nothing about it
