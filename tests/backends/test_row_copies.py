"""Softmax and norms over neighbours that lie apart: gathered once, with the numbers of eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lowering import row_copies
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import whole_graphs_by

prims = torch.ops.prims


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def heads_last() -> Tensor:
    """Scores of attention whose heads lie innermost, as a linear layer over them leaves them."""
    return torch.randn(2, 17, 33, 4).permute(0, 3, 1, 2)


def classes_last() -> Tensor:
    return torch.randn(2, 5, 12, 14).contiguous(memory_format=torch.channels_last)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "softmax over keys": (lambda x: (x * 2).softmax(-1), heads_last),
    "softmax over heads": (lambda x: (x * 2).softmax(1), heads_last),
    "its logarithm": (lambda x: (x * 2).log_softmax(-1), heads_last),
    "of classes": (lambda x: (x * 2).log_softmax(1), classes_last),
    "layer norm": (lambda x: functional.layer_norm(x * 2, x.shape[-1:]), heads_last),
    "two dimensions": (lambda x: functional.layer_norm(x * 2, x.shape[-2:]), heads_last),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    function, make = CASES[name]
    x = make()
    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, own = compiled(x), function(x)
        assert_contract(got, own, function(x.double()), name)
    assert got.stride() == own.stride()
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


def written(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """In how many copies the pass sees rows that are read more than once."""
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(x)
    row_copies.put_right(module.graph)
    module.graph.lint()
    torch.testing.assert_close(module(x), function(x))
    found = module.graph.find_nodes(
        op="call_function", target=prims.inductor_force_stride_order.default
    )
    return len(found)


def normalized(x: Tensor) -> Tensor:
    rows = x.clone(memory_format=torch.contiguous_format)
    return rows - rows.amax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (heads_last(), 1),
        (classes_last(), 1),
        (torch.randn(2, 4, 17, 33), 0),  # they lie in rows already
        (torch.randn(2, 40, 96).transpose(1, 2), 0),  # 96 rows are computed side by side
    ],
)
def test_only_what_is_gathered(x: Tensor, expected: int) -> None:
    assert written(normalized, x) == expected


def test_what_is_read_once_is_not_written() -> None:
    def once(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format).amax(-1)

    assert written(once, heads_last()) == 0


def test_symbols_are_left_alone() -> None:
    module = make_fx(normalized, tracing_mode="symbolic")(heads_last())
    row_copies.put_right(module.graph)
    targets = [node.target for node in module.graph.nodes]
    assert prims.inductor_force_stride_order.default not in targets
