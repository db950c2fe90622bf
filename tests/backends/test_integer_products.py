"""Products of bytes (`_int_mm`) are exact, however their operands lie in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowering import integer_products
from tests.support.compiling import compile_at
from tests.support.reports import fallbacks_of


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.quick
@pytest.mark.parametrize("sizes", [*itertools.product((1, 4), (1, 64), (1, 48))], ids=str)
def test_however_operands_lie(sizes: tuple[int, int, int]) -> None:
    rows, depth, columns = sizes
    memory = _bytes(4000)
    for left in ((depth, 1), (0, 1), (1, 1), (7 * depth, 1), (1, rows), (1, 0), (3, 2)):
        for right in ((columns, 1), (1, depth), (0, 1), (1, 0), (5, 3)):
            a = memory.as_strided((rows, depth), left)
            b = memory.as_strided((depth, columns), right)
            expected = (a.double() @ b.double()).int()
            assert torch.equal(integer_products.product(a, b), expected), (left, right)


def _one_token(x: Tensor, weight: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    """As a layer does that quantises its input."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    whole = (x / scale).round().to(torch.int8)
    return multiply(whole.view(-1, x.shape[-1]), weight.t()) * scale.view(-1, 1)


def _of_parts(x: Tensor, weight: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    return multiply((x[0] * 20).to(torch.int8), weight[:, ::2].t()[:384])


@pytest.mark.parametrize(
    ("function", "weight"),
    [(_one_token, (32, 384)), (_of_parts, (32, 768))],
    ids=["token", "parts"],
)
def test_of_what_generated_code_hands_over(
    function: Callable[..., Tensor], weight: tuple[int, int]
) -> None:
    given = torch.randn(1, 1, 384), _bytes(*weight)
    compiled = compile_at("O2", lambda *given: function(*given, torch._int_mm))
    expected = function(*given, lambda a, b: (a.double() @ b.double()).int())
    assert torch.equal(compiled(*given), expected)
    assert not fallbacks_of(compiled)


def _in_a_branch(x: Tensor, weight: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    either = lambda x: _one_token(x, weight, multiply)  # noqa: E731
    return torch.cond(x.sum() > -1e9, either, lambda x: either(-x), (x,))


def test_in_the_graphs_of_branches() -> None:
    given = torch.randn(1, 1, 384), _bytes(32, 384)
    compiled = compile_at("O2", lambda *given: _in_a_branch(*given, torch._int_mm))
    with torch.no_grad():
        got = compiled(*given)
    assert torch.equal(got, _one_token(*given, lambda a, b: (a.double() @ b.double()).int()))
    assert not fallbacks_of(compiled)
