"""Truth values that enter or leave a graph: eager's bits, as bytes where they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._pytree import tree_map

from lowering import machine, masks
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_bit_identical
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

aten = torch.ops.aten
WIDE = pytest.mark.skipif("avx2" not in machine.cpu().isa, reason="measured on x86 only")


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def numbers(*sizes: int) -> Tensor:
    x = torch.randn(sizes)
    x.view(-1)[::7] = 0
    x.view(-1)[3::11] = float("nan")
    return x


def mask(*sizes: int) -> Tensor:
    return torch.rand(sizes) < 0.5


# A function, its inputs, how many operators of ours it becomes.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]], int]] = {
    "stored": (lambda x: x > 0.1, lambda: (numbers(50, 90),), 1),
    "stored and used": (
        lambda x: (x > 0, torch.where(x > 0, x, -x)),
        lambda: (numbers(50, 90),),
        1,
    ),
    "of nothing known": (lambda x: x.isnan() | (x == 0), lambda: (numbers(50, 90),), 1),
    "of integers": (lambda x: x % 3 == 1, lambda: (torch.arange(9000),), 1),
    "of float64": (lambda x: x.double() * 2 >= 0, lambda: (numbers(50, 90),), 1),
    "channels last": (
        lambda x: x * 2 > 1,
        lambda: (numbers(3, 20, 9, 11).to(memory_format=torch.channels_last),),
        1,
    ),
    "read": (lambda x, m: torch.where(m, x * 2, x), lambda: (numbers(50, 90), mask(50, 90)), 1),
    "read through views": (
        lambda x, m: x.masked_fill(m[:, None, :].expand(-1, 40, -1), -1.0) * 2,
        lambda: (numbers(8, 40, 60), mask(8, 60)),
        1,
    ),
    "read and stored": (
        lambda x, m: (m & (x > 0), ~m),
        lambda: (numbers(50, 90), mask(50, 90)),
        3,
    ),
    "read as numbers": (lambda x, m: x * m + m.sum(), lambda: (numbers(50, 90), mask(50, 90)), 1),
    "not laid in a row": (
        lambda x, m: torch.where(m.t(), x, 0.0),
        lambda: (numbers(90, 50), mask(50, 90)),
        1,
    ),
    "a view of what is stored": (lambda x: (x > 0.1)[None, None], lambda: (numbers(50, 90),), 1),
    "a part is read": (
        lambda x, m: x.masked_fill(m[..., :60, :80], -1.0) * 2,
        lambda: (numbers(60, 80), mask(2, 1, 200, 300)),
        1,
    ),
    "counted by row": (lambda m: m.sum(-1), lambda: (mask(50, 90),), 1),
    "counted without a few": (lambda m: (~m).sum(0), lambda: (mask(50, 90),), 1),
    "any of several dimensions": (lambda m: m.any((0, 2)), lambda: (mask(20, 30, 10),), 1),
    "all": (lambda m: m.all(), lambda: (mask(50, 90),), 1),
    "places": (lambda m: m.cumsum(-1) * 2, lambda: (mask(50, 90),), 1),
    "concatenated": (lambda m, n: torch.cat([m, n], -1), lambda: (mask(50, 90), mask(50, 20)), 1),
    "comparisons concatenated": (
        lambda x: torch.where(torch.cat([x > 0, x < -1]), 1.0, 0.5),
        lambda: (numbers(50, 90),),
        4,  # two stored as bytes, the two joined, read as bytes
    ),
    "stacked": (lambda m, n: torch.stack([m, n], -1), lambda: (mask(50, 90), mask(50, 90)), 1),
    "padded": (lambda m: functional.pad(m, (1, 2, 3, 4), value=True), lambda: (mask(50, 90),), 1),
    "cut by padding": (lambda m: functional.pad(m, (-1, 2)), lambda: (mask(50, 90),), 1),
    "flipped": (lambda m: m.flip(-1), lambda: (mask(50, 90),), 1),
    "laid the other way": (lambda m: m.t().contiguous(), lambda: (mask(50, 90),), 1),
    "rows by number, read": (
        lambda x, m, at: torch.where(m[at], x, 0.0) * 2,
        lambda: (numbers(50, 90), mask(30, 90), torch.randint(30, (50,))),
        2,
    ),
    "gathered": (
        lambda m, at: m.gather(1, at),
        lambda: (mask(50, 90), torch.randint(90, (50, 80))),
        1,
    ),
    "scattered": (
        lambda m, n, at: m.scatter(1, at, n),
        lambda: (mask(50, 90), mask(50, 90), torch.rand(50, 90).argsort(-1)),
        1,
    ),
    "a truth value scattered": (
        lambda m, at: m.scatter(1, at, True),
        lambda: (mask(50, 90), torch.randint(90, (50, 9))),
        1,
    ),
    "by a mask": (
        lambda m, n: torch.where(n, m, ~m)[:, None].expand(-1, 2, -1).clone(),
        lambda: (mask(50, 90), mask(50, 90)),
        4,
    ),
    "written by a mask": (
        lambda m, n: m.index_put((n[:, 0],), torch.tensor(False)),
        lambda: (mask(50, 90), mask(50, 90)),
        0,  # which ones is not known before it runs
    ),
    "logic": (lambda m, n: (m & n) | ~m, lambda: (mask(50, 90), mask(50, 90)), 3),
    "logic of a view": (lambda m: m[:, :60] ^ m[:, 30:], lambda: (mask(50, 90),), 1),
    "logic with a number's": (
        lambda m, x: (m == (x > 0)) | m,
        lambda: (mask(50, 90), numbers(50, 90)),
        2,
    ),
    "logic that numbers are made of": (
        lambda m, n, x: torch.where(m & n, x, 0.0),
        lambda: (mask(50, 90), mask(50, 90), numbers(50, 90)),
        2,
    ),
    "logic, stored and read": (
        lambda m, n, x: (m & n, torch.where(m & n, x, 0.0)),
        lambda: (mask(50, 90), mask(50, 90), numbers(50, 90)),
        3,
    ),
    "logic with a number": (
        lambda m, n: (m * True, n * m),
        lambda: (mask(50, 90), mask(50, 90)),
        3,  # one read as bytes and stored, and torch's product
    ),
    "a comparison moved, and read by a loop": (
        lambda x: torch.where((x > 0).flip(0), x, -x) * 2,
        lambda: (numbers(50, 90),),
        0,
    ),
    "a few": (lambda x: x > 0.1, lambda: (numbers(5, 9),), 0),
    "a few moved": (lambda m: torch.cat([m, m]).flip(0), lambda: (mask(5, 9),), 0),
    "given back": (lambda x, m: (x * 2, m), lambda: (numbers(50, 90), mask(50, 90)), 0),
    "empty": (lambda x: x > 0.1, lambda: (numbers(0, 9),), 0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(4))
def test_compiled(part: int) -> None:
    """Many in one graph, each of inputs of its own: most of the time goes into single graphs."""
    given = {name: CASES[name][1]() for name in [*CASES][part::4]}

    def function(given: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
        return {name: CASES[name][0](*inputs) for name, inputs in given.items()}

    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, own = compiled(given), function(given)
    assert_bit_identical(got, own, "masks")
    assert strides(got) == strides(own)
    assert_ran_as_planned(compiled, "O2")


def strides(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tree_map(Tensor.stride, one) for name, one in found.items()}


@WIDE
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_in_the_graph(name: str) -> None:
    function, make, count = CASES[name]
    given = make()
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*given)
    masks.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert_bit_identical(graph(*given), function(*given), name)
    calls = graph.graph.nodes
    ours = [one for one in calls if getattr(one.target, "namespace", "") == "kernel_dispatch"]
    assert len(ours) == count


def test_masks_that_a_backward_needs() -> None:
    """Of the last ReLU the graph keeps where it was above zero."""

    def function(x: Tensor) -> Tensor:
        return functional.relu(x * 2).clamp(max=1.5)

    compiled = compile_at("O2", function)
    found = []
    for run in (compiled, function):
        x = torch.linspace(-3, 3, 9000).requires_grad_()
        run(x).sum().backward()
        found.append(x.grad)
    assert found[0].equal(found[1])
    assert_ran_as_planned(compiled, "O2")


def test_sizes_that_change() -> None:
    compiled = compile_at("O2", lambda x, m: (x > 0) & m, dynamic=True)
    for rows in (60, 90):
        x, m = numbers(rows, 80), mask(rows, 80)
        assert compiled(x, m).equal((x > 0) & m)
    assert_ran_as_planned(compiled, "O2")


def test_much_logic() -> None:
    def function(m: Tensor, n: Tensor) -> Tensor:
        for _ in range(700):
            m = ~(m & n)
        return m

    given = mask(50, 90), mask(50, 90)
    graph = make_fx(function, tracing_mode="fake")(*given)
    masks.put_right(graph.graph)
    graph.recompile()
    assert graph(*given).equal(function(*given))


def test_a_mask_that_is_changed_afterwards() -> None:
    """What was given away or is kept elsewhere does not share memory with it."""
    compiled = compile_at("O2", lambda x: x > 0)
    x = numbers(50, 90)
    first = compiled(x)
    kept = first.clone()
    compiled(-x).logical_not_()
    assert first.equal(kept)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole": lambda x, m: torch.where(m.logical_or_(x > 0), x, -x),
    "copied into": lambda x, m: torch.where(m.copy_(x > 0.5), x, 0.0),
    "a part": lambda x, m: (m[:, :40].logical_not_(), torch.where(m, x, -x))[1],
    "rows by number": lambda x, m: m.index_fill_(0, torch.tensor([0, 2]), True).sum(1) + x.sum(1),
    "filled": lambda x, m: x.masked_fill(m.masked_fill_(x > 1, True), 0.0),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_callers_mask_is_written(name: str, level: str) -> None:
    function = WRITTEN[name]
    compiled = compile_at(level, function)
    for _ in range(2):
        x, m = torch.randn(50, 90), mask(50, 90)
        again = m.clone()
        torch.testing.assert_close(compiled(x, m), function(x, again))
        assert m.equal(again)
    assert_ran_as_planned(compiled, level)
