"""Average pooling beyond the image: eager's numbers and gradients, and no window larger than it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import pooling
from tests.support.compiling import compile_at, size_limits_lifted
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
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, training: bool) -> None:
    pool, sizes = CASES[name]

    def function(x: Tensor) -> Tensor:
        return pool(x * 2).tanh()

    x = torch.randn(2, 3, *sizes, requires_grad=training)
    again = x.detach().clone().requires_grad_(training)
    with size_limits_lifted(), torch.set_grad_enabled(training):
        compiled = compile_at("O2", function)
        out, expected = compiled(x), function(again)
    torch.testing.assert_close(out, expected)
    if training:
        out.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, again.grad)
    assert_ran_as_planned(compiled, "O2")
    assert whole_graphs_by(compiled) == {"inductor"}
