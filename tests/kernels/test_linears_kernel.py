"""openmp_linears, called directly: several layers of one input give what they give one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowering.native import library
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_bit_identical
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor
NONE, SILU, GELU = (list(ACTIVATIONS).index(name) for name in ("none", "silu", "gelu_erf"))
# Rows of the input, values of a row, values after each layer: tails, blocks of rows and columns,
# rows whose addresses crowd the cache, and nothing at all.
SIZES = [
    (1, 64, (48, 17, 100)), (130, 77, (600, 40, 1)), (37, 1024, (512, 530, 16)),
    (400, 96, (1100, 24, 33)), (8, 64, (64, 64, 64)),
    (0, 8, (4, 5, 6)), (3, 0, (4, 5, 6)), (3, 5, (0, 5, 7)),
]  # fmt: skip


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = getattr(torch, request.param)
    if found is not torch.float32 and not library.multiplies(found):
        pytest.skip(f"the kernels do not multiply {found}")
    return found


def one(x: Tensor, *tensors: Tensor | None, act: int = NONE, in_out: bool = False) -> Tensor:
    name = "openmp_linear" + ("" if x.dtype is torch.float32 else "_half")
    return getattr(kernels(), name)(x, *tensors, act, 0.0, 0.0, in_out)


def several(x: Tensor, *layers: tuple[Any, ...]) -> list[Tensor]:
    """Of each layer: its five tensors, its activation, whether it is (in, out), its gate or -1."""
    tensors: list[Tensor] = []
    integers: list[int] = []
    for *given, activation, in_out, gate in layers:
        tensors += [tensor for tensor in given if tensor is not None]
        bits = sum(1 << place for place, tensor in enumerate(given[1:]) if tensor is not None)
        integers += [activation, bits + 16 * in_out, gate]
    name = "openmp_linears" + ("" if x.dtype is torch.float32 else "_half")
    return getattr(kernels(), name)(x, tensors, integers, [])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_bits_as_one_by_one(
    size: tuple[int, int, tuple[int, ...]], count: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(count)
    rows, inner, (first, second, third) = size
    x = torch.randn(2, rows, inner).to(dtype)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    a, b, c = made(first, inner), made(inner, second), made(third, inner)
    bias, before, after = made(first), made(2, rows, second), made(2, rows, third)
    gate, up, gate_bias = made(first, inner), made(first, inner), made(first)
    got = several(
        x,
        (gate, gate_bias, None, None, None, SILU, False, -1),
        (a, bias, None, None, None, NONE, False, -1),
        (b, None, before, None, None, GELU, True, -1),
        (up, None, None, None, None, NONE, False, 0),
        (c, None, None, None, after, NONE, False, -1),
    )
    factor = one(x, gate, gate_bias, None, None, None, act=SILU)
    expected = [
        one(x, a, bias, None, None, None),
        one(x, b, None, before, None, None, act=GELU, in_out=True),
        one(x, up, None, None, factor, None),
        one(x, c, None, None, None, after),
    ]
    assert_bit_identical(tuple(got), tuple(expected), "together and one by one")


def test_changed_weights_show(dtype: torch.dtype) -> None:
    x, gate, up = (torch.randn(6, 24).to(dtype) for _ in range(3))
    layers = [(gate, *[None] * 4, SILU, False, -1), (up, *[None] * 4, NONE, False, 0)]
    before = several(x, *layers)[0]
    gate.mul_(2)
    after = several(x, *layers)[0]
    expected = one(x, up, None, None, one(x, gate, *[None] * 4, act=SILU), None)
    assert not torch.equal(before, after)
    assert_bit_identical(after, expected, "after the change")


def test_numbers_of_activations() -> None:
    x, weight = torch.randn(6, 24), torch.randn(9, 24)
    clamp, leaky = (list(ACTIVATIONS).index(name) for name in ("clamp", "leaky_relu"))
    numbers = [-0.5, 0.75, 0.2, 0.0]
    got = kernels().openmp_linears(x, [weight, weight], [clamp, 0, -1, leaky, 0, -1], numbers)
    single, nothing = kernels().openmp_linear, [None] * 4
    expected = [
        single(x, weight, *nothing, clamp, *numbers[:2]),
        single(x, weight, *nothing, leaky, *numbers[2:]),
    ]
    assert_bit_identical(tuple(got), tuple(expected), "clamped and leaky")


ONE = [0, 0, -1]


@pytest.mark.parametrize(
    ("tensors", "integers", "numbers", "says"),
    [
        (0, [], [], "need 3 integers"),
        (1, [0, 0], [], "need 3 integers"),
        (1, ONE, [0.0], "2 or no numbers"),
        (1, [0, 1, -1], [], "need more tensors"),
        (2, ONE, [], "1 tensors too many"),
        (1, [0, 0, 0], [], "a gate comes before"),
    ],
)
def test_what_does_not_fit_together(
    tensors: int, integers: list[int], numbers: list[float], says: str
) -> None:
    with pytest.raises(RuntimeError, match=says):
        kernels().openmp_linears(torch.ones(2, 4), [torch.ones(3, 4)] * tensors, integers, numbers)


def test_a_gated_layer_has_one_result() -> None:
    x, weight = torch.randn(6, 24), torch.randn(9, 24)
    gated = [SILU, 0, -1, NONE, 0, 0]
    got = kernels().openmp_gated_linear(x, [weight, weight], gated, [])
    assert torch.equal(got, kernels().openmp_linears(x, [weight, weight], gated, [])[0])
    with pytest.raises(RuntimeError, match="has one result, these have 2"):
        kernels().openmp_gated_linear(x, [weight, weight], ONE * 2, [])
