"""openmp_recurrent, called directly, against torch's layers in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lowering.native import library
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor
MODES = ["LSTM", "GRU", "RNN_TANH", "RNN_RELU"]  # in the order of `enum class Cell`
# inputs, hidden units, layers, rows of the batch, steps: tails of blocks and of tiles, one of
# everything, more rows than steps, sequences that are projected in several parts
SIZES = [
    (8, 16, 1, 1, 5), (5, 17, 2, 3, 7), (1, 1, 1, 1, 1), (40, 100, 2, 33, 3),
    (30, 256, 1, 2, 300), (3, 5, 3, 64, 9), (16, 130, 2, 13, 2),
]  # fmt: skip


def layer_of(mode: str, *sizes: int, **how: Any) -> nn.Module:
    name, _, activation = mode.partition("_")
    extra = {"nonlinearity": activation.lower()} if activation else {}
    return getattr(nn, name)(*sizes, **how, **extra).eval()


def given(module: Any, batch: int, steps: int) -> tuple[Tensor, list[Tensor]]:
    directions = 2 if module.bidirectional else 1
    shape = (batch, steps) if module.batch_first else (steps, batch)
    state = torch.randn(module.num_layers * directions, batch, module.hidden_size)
    count = 2 if module.mode == "LSTM" else 1
    return torch.randn(*shape, module.input_size), [state.mul(i + 1) for i in range(count)]


def ours(module: Any, x: Tensor, state: list[Tensor]) -> list[Tensor]:
    weights = list(module._flat_weights)
    how = (module.bias, module.bidirectional, module.batch_first)
    return kernels().openmp_recurrent(x, state, weights, MODES.index(module.mode), *how)


def torchs(module: Any, x: Tensor, state: list[Tensor]) -> list[Tensor]:
    out, last = module(x, tuple(state) if len(state) > 1 else state[0])
    return [out, *(last if isinstance(last, tuple) else (last,))]


def check(module: Any, x: Tensor, state: list[Tensor]) -> None:
    with torch.no_grad():
        wide = torchs(copy.deepcopy(module).double(), x.double(), [one.double() for one in state])
        got, own = ours(module, x, state), torchs(module, x, state)
    assert_contract(got, own, wide, f"{module}")
    assert [one.stride() for one in got] == [one.stride() for one in own]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["", "bidirectional batch_first"])
@pytest.mark.parametrize("threads", [1, 3])
def test_numbers(mode: str, sizes: tuple[int, ...], how: str, threads: int) -> None:
    inputs, hidden, layers, batch, steps = sizes
    torch.set_num_threads(threads)
    module = layer_of(mode, inputs, hidden, layers, **dict.fromkeys(how.split(), True))
    check(module, *given(module, batch, steps))


@pytest.mark.parametrize("mode", MODES)
def test_without_biases(mode: str) -> None:
    module = layer_of(mode, 6, 20, 2, bias=False)
    check(module, *given(module, 4, 6))


@pytest.mark.parametrize("mode", MODES)
def test_as_many_threads_as_you_like(mode: str) -> None:
    """Who computes a unit does not change it."""
    module = layer_of(mode, 48, 300, bidirectional=True)
    for batch in (1, 30):
        x, state = given(module, batch, 20)
        torch.set_num_threads(1)
        alone = ours(module, x, state)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert_bit_identical(ours(module, x, state), alone, f"{threads} threads")


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_in_two_calls(mode: str) -> None:
    module = layer_of(mode, 9, 33, 2)
    x, state = given(module, 3, 11)
    out, *last = ours(module, x, state)
    first, *between = ours(module, x[:4], state)
    second, *end = ours(module, x[4:], between)
    assert_bit_identical([torch.cat([first, second]), *end], [out, *last], "in two parts")


def test_inputs_stay_as_they_are() -> None:
    module = layer_of("LSTM", 9, 33)
    x, state = given(module, 3, 5)
    before = [one.clone() for one in (x, *state)]
    ours(module, x, state)
    assert_bit_identical([x, *state], before, "inputs")


def test_inputs_that_lie_otherwise() -> None:
    module = layer_of("GRU", 10, 12, batch_first=True)
    x, (state,) = given(module, 4, 6)
    lying = torch.randn(4, 10, 6).transpose(1, 2).copy_(x)
    spread = torch.randn(1, 12, 4).transpose(1, 2).copy_(state)
    assert_bit_identical(
        ours(module, lying, [spread]), ours(module, x, [state]), "inputs with other strides"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_weight_is_packed_again(mode: str) -> None:
    module = layer_of(mode, 6, 20)
    x, state = given(module, 2, 3)
    ours(module, x, state)
    for weight in module.parameters():
        before = library.packed_count()
        with torch.no_grad():
            weight.mul_(0.5)
        check(module, x, state)
        assert library.packed_count() == before + 1
        ours(module, x, state)
        assert library.packed_count() == before + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_numbers_that_are_none(mode: str, bad: float) -> None:
    """They stay in their row of the batch."""
    module = layer_of(mode, 6, 20)
    x, state = given(module, 8, 5)
    x[2, 3, 1] = bad
    with torch.no_grad():
        got, own = ours(module, x, state), torchs(module, x, state)
    for mine, torch_s in zip(got, own, strict=True):
        assert torch.equal(mine.isnan(), torch_s.isnan())
        assert torch.equal(mine.isinf(), torch_s.isinf())


def test_no_rows_and_no_steps() -> None:
    module = layer_of("LSTM", 6, 20, 2, bidirectional=True)
    x, state = given(module, 0, 5)
    check(module, x, state)
    x, state = given(module, 2, 0)
    with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0"):
        ours(module, x, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_floats(dtype: torch.dtype) -> None:
    module = layer_of("LSTM", 40, 50, 2).to(dtype)
    x, state = given(module, 3, 9)
    check(module, x.to(dtype), [one.to(dtype) for one in state])
