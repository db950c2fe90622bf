"""Gradients of strided 1x1 kernels over few channels, which kill processes in oneDNN."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import strided_gradients
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

backward = torch.ops.aten.convolution_backward.default


class Stem(nn.Module):
    """What RepVGG, MobileOne and FastViT begin with, while they are trained."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.wide = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=bias)
        self.narrow = nn.Conv2d(inputs, outputs, 1, stride=2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.wide(x) + self.narrow(x))


def trained(model: Any, of: nn.Module, x: Tensor, first: bool) -> list[Tensor]:
    of.zero_grad()
    own = x.clone().requires_grad_(not first)
    out = model(own)
    out.mul(torch.linspace(-1, 2, out.numel(), dtype=x.dtype).view(out.shape)).sum().backward()
    return [out.detach(), *(p.grad for p in of.parameters()), *([] if first else [own.grad])]  # type: ignore[list-item]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("inputs", "bias", "first"), [(3, False, True), (12, True, False)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 127)])
def test_a_step(inputs: int, bias: bool, first: bool, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Stem(inputs, 16, bias).to(memory_format=torch.channels_last)
    x = torch.randn(16, inputs, *sizes).to(memory_format=torch.channels_last)
    # Eager dies with channels last, so its numbers are those of rows.
    rows = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    wide = copy.deepcopy(model).double()
    with no_cached_graphs():
        compiled = compile_at("O2", model)
        got = trained(compiled, model, x, first)
    eager = trained(rows, rows, x.contiguous(), first)
    assert_contract(got, eager, trained(wide, wide, x.double(), first), "stem")
    assert_ran_as_planned(compiled, "O2")


def graph_of(layer: nn.Conv2d, x: Tensor, first: bool) -> tuple[fx.GraphModule, Any]:
    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        own = x.detach().requires_grad_(not first)
        wanted = [*layer.parameters(), *([] if first else [own])]
        return torch.autograd.grad(layer(own).sin().sum(), wanted)

    return make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(x), gradients


@pytest.mark.quick
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("stride", [2, (1, 3)])
def test_the_pixels_that_are_read_are_an_image_without_stride(stride: Any, first: bool) -> None:
    x = torch.randn(2, 4, 9, 8)
    graph, gradients = graph_of(nn.Conv2d(4, 6, 1, stride=stride), x, first)
    strided_gradients.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    of_weights = [
        node for node in graph.graph.nodes if node.target is backward and node.args[-1][1]
    ]
    assert [list(node.args[4]) for node in of_weights] == [[1, 1]]
    torch.testing.assert_close(graph(x), gradients(x), rtol=1e-4, atol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(16, 6, 1, stride=2), torch.randn(2, 16, 9, 8)),
        (nn.Conv2d(4, 6, 1), torch.randn(2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, stride=2), torch.randn(2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 1, stride=2, groups=2), torch.randn(2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 1, stride=2, padding=1), torch.randn(2, 4, 9, 8)),
        (nn.Conv1d(4, 6, 1, stride=2), torch.randn(2, 4, 9)),
    ],
    ids=["more channels", "no stride", "3x3", "groups", "padded", "a sequence"],
)
def test_others_stay_as_they_are(layer: Any, x: Tensor) -> None:
    graph, _ = graph_of(layer, x, False)
    before = graph.graph.python_code("self").src
    strided_gradients.put_right(graph.graph)
    assert graph.graph.python_code("self").src == before
