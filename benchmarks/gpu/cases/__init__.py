"""Every kernel, with its inputs, its rivals and its shapes: this table is what is run."""

from __future__ import annotations

from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import attention, copies, gated, losses, norms, products

ALL: tuple[Case, ...] = (
    *norms.CASES,
    *losses.CASES,
    *products.CASES,
    *attention.CASES,
    *gated.CASES,
    *copies.CASES,
)
BY_NAME = {case.name: case for case in ALL}
