"""What generated code need not compare is compared by the operators that read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from tests.support.compiling import compile_at, every_row_applies
from tests.support.regions import kernels, no_cached_graphs

Tensor = torch.Tensor
UNGUARDED = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}


class Mixed(nn.Module):
    """One weight that only an operator of ours reads, one that a generated loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(24, 40), nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).cumsum(0) * self.scale).sin()


def test_generated_code_checks_what_it_reads_itself() -> None:
    with every_row_applies(), no_cached_graphs(), torch.no_grad():
        compiled = compile_at("O2", Mixed())
        _, (code,) = run_and_get_code(compiled, torch.randn(8, 24))
    checked = [line for line in code.splitlines() if "assert_size_stride(arg" in line]
    assert any("(40, ), (1, )" in line for line in checked), checked
    assert not any("(40, 24)" in line for line in checked), checked


LAYERS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda n: nn.Linear(n, 40), (8, 24), "shapes cannot be multiplied"),
    "convolution": (lambda n: nn.Conv2d(n, 40, 3), (1, 24, 9, 9), "to have 48 channels"),
}


@pytest.mark.parametrize("make, size, message", LAYERS.values(), ids=LAYERS.keys())
def test_a_weight_of_another_size_is_refused_where_guards_are_left_out(
    make: Callable[[int], nn.Module], size: tuple[int, ...], message: str
) -> None:
    """By the operator; then eager, whose turn it is, says what is wrong."""
    model = nn.Sequential(make(24), nn.ReLU()).eval()
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", model, options=UNGUARDED)
        compiled(torch.randn(size))
        model[0].weight = make(48).weight
        with pytest.raises(RuntimeError, match=message):
            compiled(torch.randn(size))


LINEAR = (torch.randn(8, 24), torch.randn(40, 24), torch.randn(40), *[torch.randn(8, 40)] * 3)
CONVOLUTION = (torch.randn(1, 24, 9, 9), torch.randn(40, 24, 1, 1), torch.randn(40))
NORM, BESIDE = (torch.randn(40),) * 4, (torch.randn(1, 40, 9, 9),) * 3


@pytest.mark.parametrize("index", range(1, 6))
def test_linear(index: int) -> None:
    given = [tensor[..., :-1] if at == index else tensor for at, tensor in enumerate(LINEAR)]
    with pytest.raises(RuntimeError, match=r"has a weight of|for 40 outputs|beside 320 outputs"):
        kernels().openmp_linear(*given, 0, 0.0, 0.0)


@pytest.mark.parametrize("index", range(1, 10))
def test_convolution(index: int) -> None:
    tensors = [*CONVOLUTION, *NORM, *BESIDE]
    tensors[index] = tensors[index][:, :-1] if tensors[index].dim() > 1 else tensors[index][:-1]
    before, behind = tensors[:7], tensors[7:]
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    with pytest.raises(RuntimeError, match=r"has a weight of|for 40 outputs|beside one of 40"):
        kernels().openmp_convolution(*before, 1e-3, *geometry, *behind, 0, 0.0, 0.0)
