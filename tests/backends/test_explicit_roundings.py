"""Floats that the user rounds to half precision, and goes on with, are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


FUNCTIONS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "there and back": lambda x: [x.to(torch.float16).to(torch.float32) * 1],
    "by name": lambda x: [x.half().float() * 1, x.bfloat16().double() * 1],
    "what is lost": lambda x: [(x.to(torch.bfloat16).float() - x).abs().max()],
    "by another's type": lambda x: [x.type(torch.bfloat16).type_as(x) * 1],
    "behind a view": lambda x: [x.bfloat16().flatten().view(-1, 2).float() * 1],
    "behind something computed": lambda x: [(x * 3).half().float() + 1],
    "and returned": lambda x: [half := x.half(), half.float().sum(1)],
    "with another dtype": lambda x: [x.to(dtype=torch.float16, copy=True).to(x) * 1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_done(dtype: torch.dtype) -> None:
    """All in one graph, each with numbers of its own."""

    def each(given: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        return {name: FUNCTIONS[name](x) for name, x in given.items()}

    given = {name: torch.randn(40, 50, dtype=dtype) for name in FUNCTIONS}
    compiled = compile_at("O2", each)
    with torch.no_grad():
        torch.testing.assert_close(compiled(given), each(given))
    assert_ran_as_planned(compiled, "O2")


def test_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin().half().float() * x).sum()

    compiled, x = compile_at("O2", function, options={"strict": True}), torch.randn(30, 40)
    found = []
    for run in (compiled, function):
        own = x.clone().requires_grad_()
        run(own).backward()
        found.append(own.grad)
    torch.testing.assert_close(*found)
    assert_ran_as_planned(compiled, "O2")


def test_transforms_are_left_alone() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.half().float() * x).sum()

    transformed = torch.func.vmap(torch.func.grad(function))
    compiled = compile_at("O2", lambda x: transformed(x) * 2, options={"strict": True})
    x = torch.randn(6, 5)
    torch.testing.assert_close(compiled(x), transformed(x) * 2, atol=1e-2, rtol=1e-2)


def test_what_stays_in_half_precision_is_one_loop() -> None:
    compiled = compile_at("O2", lambda x: (x * 2).bfloat16().sin() + 1)
    from torch._inductor.utils import run_and_get_code

    _, (source, *_) = run_and_get_code(compiled, torch.randn(40, 50))
    assert "kernel_dispatch.rounded" not in source
