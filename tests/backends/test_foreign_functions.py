"""A function of somebody else that is named like one of torch's is not taken for torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from lowering import writing
from lowering.regions.calls import is_foreign, name_of
from tests.support.compiling import compile_at, every_row_applies

Tensor = torch.Tensor
_library = torch.library.Library("named_like_torchs", "DEF")


@torch.compiler.allow_in_graph
@functools.wraps(functional.softmax)
def wrapped_softmax(x: Tensor, dim: int) -> Tensor:
    return functional.softmax(x * 2, dim)


def allowed(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In the graph under this name, not looked into."""
    function.__name__ = function.__qualname__ = name
    return torch.compiler.allow_in_graph(function)


def registered(name: str, schema: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    _library.define(f"{name}{schema}")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"named_like_torchs::{name}", function, lib=_library)
    return getattr(torch.ops.named_like_torchs, name)


def _halved(x: Tensor) -> Tensor:
    return x * 0.5


def _halved_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t()) * 0.5


def _halved_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query * 0.5 + key * value


def _halved_product(one: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(one, other) * 0.5


def _halved_embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids] * 0.5


softmax = allowed("softmax", lambda x, dim: _halved(x))
registered_softmax = registered("softmax", "(Tensor x, int dim) -> Tensor", lambda x, dim: x * 0.5)
linear = allowed("linear", _halved_linear)
registered_linear = registered("linear", "(Tensor x, Tensor weight) -> Tensor", _halved_linear)
attend = allowed("scaled_dot_product_attention", _halved_attention)
matmul = allowed("matmul", _halved_product)
mul = allowed("mul", lambda one, other: one + other)
dropout = allowed("dropout", lambda x, p, training: x * 0.5)
conv2d = allowed("conv2d", lambda x, weight: functional.conv2d(x, weight) * 0.5)
embedding = allowed("embedding", _halved_embedding)
cross_entropy = allowed("cross_entropy", lambda x, target: x.mean() + target.sum())


def _raise(x: Tensor) -> None:
    x.add_(1)


_library.define("raise_(Tensor(a!) x) -> ()")
_library.impl("raise_", _raise, "CompositeExplicitAutograd")
torch.library.register_fake("named_like_torchs::raise_", lambda x: None, lib=_library)


def raised_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone()
    scores = q @ k.mT
    torch.ops.named_like_torchs.raise_.default(x=q)
    return (scores * 0.3).softmax(-1) @ v + q


def q() -> Tensor:
    return torch.randn(2, 3, 9, 8)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "softmax": (lambda q, k, v: softmax(q @ k.mT * 0.3, -1) @ v, lambda: (q(), q(), q())),
    "softmax, wrapped": (
        lambda q, k, v: wrapped_softmax(q @ k.mT * 0.3, dim=-1) @ v,
        lambda: (q(), q(), q()),
    ),
    "softmax, registered": (
        lambda q, k, v: registered_softmax(q @ k.mT * 0.3, -1) @ v,
        lambda: (q(), q(), q()),
    ),
    "the product before a softmax": (
        lambda q, k, v: (matmul(q, k.mT) * 0.3).softmax(-1) @ v,
        lambda: (q(), q(), q()),
    ),
    "the product behind a softmax": (
        lambda q, k, v: matmul((q @ k.mT).softmax(-1), v),
        lambda: (q(), q(), q()),
    ),
    "the scale before a softmax": (
        lambda q, k, v: mul(q @ k.mT, 0.3).softmax(-1) @ v,
        lambda: (q(), q(), q()),
    ),
    "the dropout behind a softmax": (
        lambda q, k, v: dropout((q @ k.mT).softmax(-1), 0.1, False) @ v,
        lambda: (q(), q(), q()),
    ),
    "a write between the products, its target by keyword": (
        raised_between,
        lambda: (q(), q(), q()),
    ),
    "attention": (lambda q, k, v: attend(q, k, v) * 2, lambda: (q(), q(), q())),
    "linear": (
        lambda x, w: linear(x, w).relu(),
        lambda: (torch.randn(64, 128), torch.randn(256, 128)),
    ),
    "linear, registered": (
        lambda x, w: registered_linear(x, w).relu(),
        lambda: (torch.randn(64, 128), torch.randn(256, 128)),
    ),
    "conv2d": (
        lambda x, w: conv2d(x, w).relu(),
        lambda: (torch.randn(2, 16, 20, 20), torch.randn(16, 16, 3, 3)),
    ),
    "embedding": (
        lambda ids, table: embedding(ids, table) + 1,
        lambda: (torch.arange(64), torch.randn(100, 32)),
    ),
    "cross_entropy": (
        lambda x, target: cross_entropy(x, target) * 2,
        lambda: (torch.randn(64, 100), torch.randint(100, (64,))),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_function_of_that_name_computes_what_it_says(name: str) -> None:
    function, make = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    with every_row_applies(), torch.no_grad():
        expected = function(*inputs)
        actual = compile_at("O2", function)(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def node_of(target: Any, op: str = "call_function") -> fx.Node:
    graph = fx.Graph()
    return graph.create_node(op, target, (graph.placeholder("x"),))


@pytest.mark.quick
def test_names_are_of_torch_and_python() -> None:
    assert name_of(node_of(torch.softmax)) == "softmax"
    assert name_of(node_of(functional.softmax)) == "softmax"
    assert name_of(node_of(torch.ops.aten.softmax)) == "softmax"
    assert name_of(node_of(functional.linear)) == "linear"
    assert name_of(node_of("softmax", "call_method")) == "softmax"
    assert name_of(node_of(max)) == "max"
    assert not is_foreign(torch.Tensor.add)
    for foreign in (softmax, wrapped_softmax, registered_softmax, registered_softmax.default):
        assert is_foreign(foreign)
        assert name_of(node_of(foreign)) == ""


@pytest.mark.quick
def test_an_operator_that_may_write_is_known_by_its_schemas() -> None:
    for target in (torch.ops.aten.add_, torch.ops.aten._native_batch_norm_legit):
        assert writing.written_by(node_of(target))
    for target in (torch.ops.aten.add, torch.ops.aten.softmax):  # they write into an `out` only
        assert not writing.written_by(node_of(target))
