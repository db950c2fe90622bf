"""Average pooling beyond the image: eager's numbers and gradients, and no window larger than it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lowering import pooling
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned, whole_graphs_by

aten = torch.ops.aten

CASES = {
    "covers all": (nn.AvgPool2d(40, ceil_mode=True), (7, 9)),
    "one dimension": (nn.AvgPool2d((40, 2), ceil_mode=True), (7, 9)),
    "padded": (nn.AvgPool2d(40, 3, 20, ceil_mode=True), (7, 9)),
    "padding not counted": (
        nn.AvgPool2d(40, 3, 20, ceil_mode=True, count_include_pad=False),
        (7, 9),
    ),
    "divided by": (nn.AvgPool2d(40, ceil_mode=True, divisor_override=3), (7, 9)),
    "line": (nn.AvgPool1d(40, ceil_mode=True), (7,)),
    "last window ends early": (nn.AvgPool2d(3, 2, ceil_mode=True), (8, 10)),
    "that and padding": (nn.AvgPool2d(6, 3, 3, ceil_mode=True), (7, 9)),
    "fits": (nn.AvgPool2d(3, 2, 1), (7, 9)),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_a_narrowed_graph_computes_the_same(name: str) -> None:
    pool, sizes = CASES[name]
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    graph = make_fx(pool, tracing_mode="fake")(x)
    pooling.put_right(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(x), pool(x))
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.avg_pool2d.default)
    height, width = node.args[0].meta["val"].shape[-2:]
    if not any(pool.padding if isinstance(pool.padding, tuple) else (pool.padding,)):
        assert node.args[1][0] <= height
        assert node.args[1][1] <= width


@pytest.mark.quick
def test_a_window_beyond_the_padding_ends_there() -> None:
    x = torch.randn(1, 1, 7, 9, dtype=torch.float64)
    graph = make_fx(
        lambda x: nn.functional.avg_pool2d(x, 40, 40, 12, ceil_mode=True), tracing_mode="fake"
    )(x)
    pooling.put_right(graph.graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.avg_pool2d.default)
    assert node.args[1:4] == ([31, 33], [40, 40], [12, 12])


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_and_gradients(training: bool) -> None:
    """All in one graph, each of an image of its own."""

    def function(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: CASES[name][0](x * 2).tanh() for name, x in given.items()}

    images = {
        name: torch.randn(2, 3, *sizes, requires_grad=training)
        for name, (_, sizes) in CASES.items()
    }
    again = {name: x.detach().clone().requires_grad_(training) for name, x in images.items()}
    with size_limits_lifted(), torch.set_grad_enabled(training):
        compiled = compile_at("O2", function)
        out, expected = compiled(images), function(again)
    torch.testing.assert_close(out, expected)
    if training:
        for found in (out, expected):
            sum(y.sum() for y in found.values()).backward()
        for name, x in images.items():
            torch.testing.assert_close({name: x.grad}, {name: again[name].grad})
    assert_ran_as_planned(compiled, "O2")
    assert whole_graphs_by(compiled) == {"inductor"}


def test_a_gradient_is_added_up_after_it_was_gathered() -> None:
    """Of an image that is enlarged, averaged and pooled: Inductor may add zeros for one of them."""

    def spelled(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        larger = m.up(functional.interpolate(y, scale_factor=2, mode="bilinear"))
        smaller = functional.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        return larger.square().sum() + smaller.sin().sum() + functional.max_pool2d(y, 3, 2, 1).sum()

    model = Of(spelled, conv=nn.Conv2d(3, 8, 3, padding=1), up=nn.ConvTranspose2d(8, 6, 4, 2, 1))
    wide = copy.deepcopy(model).double()
    image = torch.randn(2, 3, 24, 20)

    def gradients(call: Any, of: Any, dtype: torch.dtype) -> list[Tensor]:
        of.zero_grad()
        x = image.to(dtype, copy=True).requires_grad_()
        call(x).backward()
        return [x.grad, *(weight.grad.clone() for weight in of.parameters())]

    with size_limits_lifted(), no_cached_graphs():
        compiled = compile_at("O2", model)
        got = gradients(compiled, model, torch.float32)
    own, exact = gradients(model, model, torch.float32), gradients(wide, wide, torch.float64)
    assert_contract(got, own, exact, "gradients")
    assert_ran_as_planned(compiled, "O2")
