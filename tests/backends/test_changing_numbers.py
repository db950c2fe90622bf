"""Python numbers that change from call to call: every call is computed with its own.

From the second value on Dynamo makes them symbols, and graphs that differ in such a number alone
have the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.compiling import compile_at
from tests.support.numerics import assert_bit_identical
from tests.support.reports import fallbacks_of

Tensor = torch.Tensor
NUMBERS = (0.25, 0.5, 0.75, 1.25, 1.5)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "returned": lambda x, s: (x * s, s * 2 + 1, s),
    "clamp": lambda x, s: x.clamp(max=s) + 1,
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s) * 2,
    "where": lambda x, s: torch.where(x > 0, x, s) + x,
    "leaky_relu": lambda x, s: F.leaky_relu(x, s) + x,
    "huber": lambda x, s: F.huber_loss(x, x * 2, delta=s, reduction="none") + x,
    "interpolate": lambda x, s: F.interpolate(x, scale_factor=s * 2) + 1,
    "int": lambda x, s: x + int(s * 4),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument(name: str, gradients: bool, level: str) -> None:
    function = FUNCTIONS[name]
    compiled = compile_at(level, function)
    x = torch.randn(2, 3, 8, 8).requires_grad_(gradients)
    for number in NUMBERS:
        got, own = compiled(x, number), function(x, number)
        torch.testing.assert_close(got, own, rtol=1e-6, atol=1e-6)
    assert not fallbacks_of(compiled)


class Decaying(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.rate
        self.rate = self.rate * 1.5 + 0.25
        return result


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_attribute_that_the_model_changes(level: str) -> None:
    model, twin = Decaying(), Decaying()
    compiled, x = compile_at(level, model), torch.ones(2, 3)
    for _ in range(6):
        assert_bit_identical(compiled(x), twin(x), "the result")
        assert model.rate == twin.rate
