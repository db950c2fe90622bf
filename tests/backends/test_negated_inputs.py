"""Inputs that only say that they are negative: views whose sign is a bit of the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.reports import providers_of

Tensor = torch.Tensor


def _negated(*shape: int) -> Tensor:
    result = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert result.is_neg()
    return result


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_their_sign_counts(level: str) -> None:
    layer = nn.Linear(64, 64)

    def function(x: Tensor) -> Tensor:
        return (layer(x) * 2 + x).sin()

    compiled, x = compile_at(level, function), _negated(64, 64)
    plain = x.resolve_neg()
    with torch.no_grad():
        for given in (plain, x, plain):  # the kind of tensor is guarded
            got, own = compiled(given), function(plain)
            wide = (
                nn.functional.linear(plain.double(), layer.weight.double(), layer.bias.double()) * 2
                + plain.double()
            ).sin()
            assert_contract(got, own, wide, f"a negative view at {level}")
    if level == "O2":
        assert set(providers_of(compiled)) >= {"eager", "inductor"}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_they_are_written_where_they_lie(level: str) -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 + x.cos()

    x = _negated(64, 64)
    twin = x.clone()
    got, own = compile_at(level, function)(x), function(twin)
    torch.testing.assert_close(got, own)
    torch.testing.assert_close(x, twin)
