"""Sums beside few numbers: the threads share the loops around them, not each sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.support.compiling import compile_at, threads
from tests.support.modules import Of
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("few", [1, 3, 8, 15, 16, 40])
def test_threads_are_not_called_at_each_sum(few: int) -> None:
    def sums(model: object, x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * y).sum(1) * 0.5

    model = Of(sums)
    compiled = compile_at("O2", model)
    given = (torch.randn(2000, 16, few), torch.randn(16, few))
    with torch.no_grad(), no_cached_graphs():
        _, codes = run_and_get_code(compiled, *given)
    code = "\n".join(codes)
    assert 0 < code.index("#pragma omp parallel") < code.index("for(")
    torch._dynamo.reset()
    compiled = compile_at("O2", model)
    hold(compiled, model, *given)
    assert_ran_as_planned(compiled, "O2")
