"""Values that eager refuses are refused in compiled graphs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

NAN = float("nan")
MANY = 30_000  # enough for a loop that threads share


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with size_limits_lifted(), no_cached_graphs():
        yield
    torch.set_num_threads(before)


def asserted(*message: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 0, *message)
        return x * 2

    return function


def entropy(x: Tensor) -> Tensor:
    return functional.binary_cross_entropy(x, torch.ones_like(x)) * 2


def of_each(x: Tensor) -> Tensor:
    ones = torch.ones_like(x)
    return functional.binary_cross_entropy(input=x, target=ones, reduction="none") * 2


# Each with a value that it takes, and some that it does not.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, list[float]]] = {
    "binary cross-entropy": (entropy, 0.25, [1.5, -0.5, NAN]),
    "of each": (of_each, 0.25, [1.5]),
    "as a module": (lambda x: nn.BCELoss()(x, torch.ones_like(x)) * 2, 0.25, [1.5]),
    "bernoulli": (lambda x: torch.bernoulli(x) * 2, 1.0, [1.5, NAN]),
    "bernoulli of a tensor": (lambda x: x.bernoulli() * 2, 1.0, [-0.5]),
    "normal": (lambda x: torch.normal(x, x) * 2, 0.0, [-1.0]),
    "normal around a number": (lambda x: torch.normal(3.0, x) * 2, 0.0, [-1.0]),
    "by name": (lambda x: torch.normal(mean=x, std=x) * 2, 0.0, [-1.0]),
    "an assertion": (asserted(), 1.0, [-1.0, NAN]),
    "with a message": (asserted("wrong"), 1.0, [-1.0]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_eagers_error(name: str, dynamic: bool) -> None:
    function, right, wrong = FUNCTIONS[name]
    compiled = compile_at("O2", function, dynamic=dynamic)
    x = torch.full((MANY,), right)
    with torch.no_grad():
        assert_contract(compiled(x), function(x), function(x.double()), name)
        for value in wrong:
            other = x.clone()
            other[7] = value
            if "assert" in name or "message" in name:
                other.fill_(value)
            with pytest.raises(RuntimeError) as eager:
                function(other)
            with pytest.raises(RuntimeError) as got:
                compiled(other)
            assert str(got.value).split("\n")[0] == str(eager.value).split("\n")[0]
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize(
    "function",
    [lambda x: x.bernoulli(0.5), lambda x: torch.bernoulli(x, 0.5), lambda x: torch.normal(x, 1.0)],
)
def test_what_is_only_a_shape_or_a_mean_may_be_anything(function: Any) -> None:
    compiled = compile_at("O2", lambda x: function(x) * 2)
    assert compiled(torch.full((50,), -3.0)).shape == (50,)
    assert_ran_as_planned(compiled, "O2")


def test_nothing_is_within_any_range() -> None:
    compiled = compile_at("O2", of_each)
    assert compiled(torch.empty(0)).shape == (0,)


def test_gradients() -> None:
    def loss(x: Tensor) -> Tensor:
        return entropy(x.sigmoid())

    compiled, x = compile_at("O2", loss, options={"strict": True}), torch.randn(300)
    found = []
    for function in (compiled, loss):
        own = x.clone().requires_grad_()
        function(own).backward()
        found.append(own.grad)
    exact = x.double().requires_grad_()
    loss(exact).backward()
    assert_contract(*found, exact.grad, "gradient")


@pytest.mark.parametrize(
    "transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))]
)
def test_transforms_are_left_alone(transform: Any) -> None:
    def loss(x: Tensor) -> Tensor:
        return entropy(x.sigmoid()).sum()

    x = torch.randn(6, 5)
    compiled = compile_at("O2", lambda x: transform(loss)(x) * 2, options={"strict": True})
    torch.testing.assert_close(compiled(x), transform(loss)(x) * 2)
