"""Rows that several fused loops share, where one input lies in columns: the numbers of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowering import local_buffers
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def gradient_of_a_norm(self: Any, x: Tensor, *grads: Tensor) -> Tensor:
    """As of a layer norm over the channels of an image in rows, whose gradients lie otherwise."""
    columns, scaled = x.mT, (grads[0] + grads[1] + grads[2] + grads[3]) * grads[4]
    along = (scaled * columns).sum(-1, keepdim=True)
    return scaled * x.shape[0] - scaled.sum(-1, keepdim=True) - columns * along


@pytest.mark.parametrize("shape", [(96, 3136), (32, 64), (16, 48), (33, 70), (8, 19)], ids=str)
def test_one_input_in_columns(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Of(gradient_of_a_norm)
    compiled = compile_at("O2", model)
    grads = [torch.randn(shape[::-1]) for _ in range(4)]
    hold(compiled, model, torch.randn(shape), *grads, torch.randn(shape[0]))
    assert_ran_as_planned(compiled, "O2")


class Block(nn.Module):
    """Of a ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        y = self.scale * self.second(functional.gelu(self.first(y)))
        return x + y.permute(0, 3, 1, 2)


def test_a_step_of_several_blocks() -> None:
    """The gradients of the first layer were wrong, and nothing said so."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.blocks(x).mean((2, 3))

    def grads(function: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        function(x).pow(2).sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(32) for _ in range(3)))
    model = Of(forward, first=nn.Conv2d(3, 32, 4, 4), norm=nn.LayerNorm(32), blocks=blocks)
    x = torch.randn(1, 3, 64, 64)
    compiled = compile_at("O2", model)
    got, own = grads(compiled, model, x), grads(model, model, x)
    assert_contract(got, own, grads(model.double(), model, x.double()), "a step")
    assert_ran_as_planned(compiled, "O2")


def test_what_stands_in_for_the_check_goes_again() -> None:
    from torch._inductor.codegen import cpp

    before = cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
    with pytest.raises(KeyError), local_buffers.of_one_row():
        assert cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr is not before
        raise KeyError
    assert cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr is before
