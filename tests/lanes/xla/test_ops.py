"""Common operators of torch's OpInfo database through XLA, forward and backward."""

from __future__ import annotations

import pytest

from tests.sweep.check import Result, run_case
from tests.sweep.samples import Case, cases, has_direction
from tests.sweep.test_sweep_sample import ALWAYS

DTYPES = ("float32", "int64")
# Sizes that the data decides are no program of XLA's: the whole graph is left to eager.
EAGER = frozenset({"nonzero"})
# Among equal numbers, of which samples of integers have many, it may give the places of any.
TIES = {("topk", "int64")}
CASES = [
    case
    for case in cases()
    if case.op in ALWAYS and case.dtype in DTYPES and (case.op, case.dtype) not in TIES
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case) -> None:
    results: list[Result] = []
    for direction in ("forward", "backward"):
        if has_direction(case, direction):
            results += run_case(case, direction, ("O1",))
    assert results
    for result in results:
        assert result.status == "pass", f"{result.label}: {result.detail}"
        wanted = "eager" if case.op in EAGER else "torch_xla"
        if result.graphs:
            assert wanted in result.providers, f"{result.label}: {result.fallbacks}"
