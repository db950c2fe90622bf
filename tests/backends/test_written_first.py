"""What generated code writes to memory first: copies into rows, costly functions, and features that
are flattened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lowering import written_first
from lowering.providers import openmp
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs, region_rows
from tests.support.reports import graph_reports, whole_graphs_by

aten = torch.ops.aten
MARK = "inductor_realize_to_strides"


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def heads_last() -> Tensor:
    """Scores of attention whose heads lie innermost, as a linear layer over them leaves them."""
    return torch.randn(2, 17, 33, 4).permute(0, 3, 1, 2)


def classes_last() -> Tensor:
    return torch.randn(2, 5, 12, 14).contiguous(memory_format=torch.channels_last)


def many_classes_last() -> Tensor:
    return torch.randn(2, 96, 12, 14).contiguous(memory_format=torch.channels_last)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "softmax over keys": (lambda x: (x * 2).softmax(-1), heads_last),
    "softmax over heads": (lambda x: (x * 2).softmax(1), heads_last),
    "its logarithm": (lambda x: (x * 2).log_softmax(-1), heads_last),
    "of classes": (lambda x: (x * 2).log_softmax(1), classes_last),
    "layer norm": (lambda x: functional.layer_norm(x * 2, x.shape[-1:]), heads_last),
    "pixels and channels": (lambda x: (x * 2).flatten(1).softmax(-1), classes_last),
    "of many channels": (lambda x: (x * 2).flatten(1).softmax(-1), many_classes_last),
    "their sum": (lambda x: (x * 2).flatten(1).exp().sum(-1), many_classes_last),
    "two dimensions": (lambda x: functional.layer_norm(x * 2, x.shape[-2:]), heads_last),
}


def test_compiled() -> None:
    """All in one graph, each of numbers of its own."""

    def each(m: Any, *given: Tensor) -> dict[str, Tensor]:
        return {name: CASES[name][0](x) for name, x in zip(CASES, given, strict=True)}

    model = Of(each)
    compiled = compile_at("O2", model)
    hold(compiled, model, *(make() for _, make in CASES.values()))
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.parametrize("name", ["softmax over keys", "layer norm"])
def test_gradients(name: str) -> None:
    function, make = CASES[name]
    x = make().requires_grad_()
    exact = x.detach().double().requires_grad_()
    gradient = torch.randn_like(x)
    (own,) = torch.autograd.grad(function(x), x, gradient)
    (best,) = torch.autograd.grad(function(exact), exact, gradient.double())
    (got,) = torch.autograd.grad(compile_at("O2", function)(x), x, gradient)
    assert_contract(got, own, best, name)


def written(function: Callable[[Tensor], Tensor], x: Tensor, tracing: str = "fake") -> list[str]:
    """The operators of a graph whose results are marked."""
    module: fx.GraphModule = make_fx(function, tracing_mode=tracing)(x)
    written_first.mark(module.graph)
    return [node.target.__name__ for node in module.graph.nodes if node.meta.get(MARK)]


def normalized(x: Tensor) -> Tensor:
    return by_the_largest(x.clone(memory_format=torch.contiguous_format))


def by_the_largest(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def flat(x: Tensor) -> Tensor:
    return by_the_largest(x.flatten(1) * 2)


def its_sum(x: Tensor) -> Tensor:
    return (x.flatten(1) * 2).sum(-1)


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (normalized, heads_last(), ["clone.default"]),
        (normalized, classes_last(), ["clone.default"]),
        (normalized, torch.randn(2, 4, 17, 33), []),  # they lie in rows already
        (normalized, torch.randn(2, 40, 96).transpose(1, 2), []),  # computed side by side
        (flat, classes_last(), ["clone.default"]),
        (flat, many_classes_last(), ["clone.default"]),  # neighbours are of one row
        (flat, torch.randn(2, 96, 12, 14), []),
        (its_sum, many_classes_last(), ["clone.default"]),  # in one chain otherwise
        (its_sum, many_classes_last()[:, :, :1, :1].clone(), []),  # a short one
    ],
)
def test_only_what_is_gathered(
    function: Callable[[Tensor], Tensor], x: Tensor, expected: list[str]
) -> None:
    assert written(function, x) == expected


def test_what_is_read_once_and_not_added_up_is_not_written() -> None:
    def once(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format).amax(-1)

    assert written(once, heads_last()) == []


def test_symbols_are_left_alone() -> None:
    assert written(normalized, heads_last(), "symbolic") == []


def linear(x: Tensor) -> Tensor:
    weight = torch.ones(6, x.shape[-1])
    return torch.ops.kernel_dispatch.openmp_linear(x, weight, None, None, None, None, 0, 0.0, 0.0)


READERS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "features": (lambda x: linear((x * 2).flatten(1)), ["mul.Tensor"]),
    "a view of them": (lambda x: linear((x * 2)[1:].flatten(1)), ["mul.Tensor"]),
    "patches": (
        lambda x: linear(x.unfold(2, 2, 2).permute(0, 2, 1, 3).exp().flatten(2)),
        ["clone.default"],
    ),
    "rows as they are": (lambda x: linear((x * 2).flatten(0, 1)), []),
    "an input": (lambda x: linear(x.flatten(1)), []),
    "a kernel's own": (lambda x: linear(linear(x).flatten(1)), []),
    "read by generated code": (lambda x: (x * 2).flatten(1) + 1, []),
}


@pytest.mark.parametrize("name", READERS)
def test_what_kernels_read(name: str) -> None:
    function, expected = READERS[name]
    assert openmp.probe().available  # which also defines its operators
    assert written(function, torch.randn(3, 4, 8)) == expected


class Basis(nn.Module):
    """A layer of splines: features of each input, flattened, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24 * 8, 32)
        self.register_buffer("grid", torch.linspace(-2, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.exp(-((x[..., None] - self.grid) ** 2)).flatten(1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_flattened_features(dynamic: bool) -> None:
    model = Basis().eval()
    compiled = compile_at("O2", model, dynamic=dynamic)
    hold(compiled, model, torch.randn(17, 24))
    assert ("linear", "openmp", 1, 1) in region_rows(compiled)


@pytest.mark.quick
def test_costly_functions_are_computed_once() -> None:
    """What one of them went into, as soon as several read it; not what Inductor itself keeps."""

    def normed(x: Tensor) -> Tensor:
        return functional.softmax(functional.gelu(x) * 2 + x.exp(), -1)

    graph = make_fx(normed, select_decomp_table(), tracing_mode="fake")(torch.rand(8, 96)).graph
    written_first.mark(graph)
    marked = [node for node in graph.nodes if MARK in node.meta]
    assert len(marked) == 1
    assert {user.target for user in marked[0].users} == {aten.amax.default, aten.sub.Tensor}


EXPONENTS = {"a fraction": 0.3, "infinite": math.inf, "no number": math.nan, "complex": 1 + 2j}


@pytest.mark.quick
@pytest.mark.parametrize("name", EXPONENTS)
def test_powers(name: str) -> None:
    """Not compiled: up to torch 2.9 Inductor itself refuses what is not finite."""

    def normed(x: Tensor) -> Tensor:
        return functional.softmax((x ** EXPONENTS[name]).abs(), -1)

    graph = make_fx(normed, select_decomp_table(), tracing_mode="fake")(torch.rand(8, 96)).graph
    written_first.mark(graph)
    assert [node.target for node in graph.nodes if MARK in node.meta] == [aten.abs.default]


def test_a_power_that_is_a_symbol() -> None:
    def normed(x: Tensor) -> Tensor:
        return functional.softmax(x ** x.shape[0], -1)

    compiled, x = compile_at("O2", normed, dynamic=True), torch.rand(8, 96)
    torch.testing.assert_close(compiled(x), normed(x))
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.quick
@pytest.mark.parametrize("exponent", [2, 3.0, 0.5, -1])
def test_what_is_a_product_or_a_root_is_not_costly(exponent: float) -> None:
    def normed(x: Tensor) -> Tensor:
        return functional.softmax(x**exponent, -1)

    graph = make_fx(normed, select_decomp_table(), tracing_mode="fake")(torch.rand(8, 96)).graph
    written_first.mark(graph)
    assert not [node for node in graph.nodes if MARK in node.meta]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_of_a_costly_function(dynamic: bool) -> None:
    def normed(x: Tensor) -> Tensor:
        return functional.layer_norm(functional.gelu(x + 1).abs() ** 0.3, (96,))

    compiled = compile_at("O2", normed)
    for rows in (8, 24):
        x = torch.randn(rows, 96)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            assert_contract(compiled(x), normed(x), normed(x.double()), f"{rows} rows")
    assert whole_graphs_by(compiled) == {"inductor"}
    assert len(graph_reports(compiled)) == 2 - dynamic


@torch.library.custom_op("written_first_tests::spoil", mutates_args={"x"})
def spoil(x: Tensor) -> None:
    x.sin_()


def read_by_view(x: Tensor) -> list[Tensor]:
    read = x[2] * 10
    spoil(x)
    return [read]


def read_again(x: Tensor) -> list[Tensor]:
    part = x[2]
    before = part * 10
    spoil(x)
    between = x[2].exp()
    spoil(x)
    return [before, between, x[2] + 1]


def of_a_product(x: Tensor) -> list[Tensor]:
    made = torch.mm(x[:4].view(2, 2), x[4:8].view(2, 2))
    read = made[0, 0] * 10
    spoil(made)
    return [read, made]


@pytest.mark.parametrize(
    "function", [read_by_view, read_again, of_a_product], ids=lambda function: function.__name__
)
def test_what_was_read_before_an_operator_writes_into_it(
    function: Callable[[Tensor], list[Tensor]],
) -> None:
    """Inductor computes it behind the operator, of what is there then."""
    x = torch.randn(9)
    own, given = x.clone(), x.clone()
    expected = function(own)
    compiled = compile_at("O2", function, options={"strict": True})
    for got, wanted in zip([*compiled(given), given], [*expected, own], strict=True):
        torch.testing.assert_close(got, wanted)
