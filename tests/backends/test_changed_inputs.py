"""Inputs and buffers that a graph changes: what it read before counts, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowering import changed_inputs, overwritten
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

COPIED = torch.ops.kernel_dispatch.copied.default


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


# --- the backward of what was read ----------------------------------------------------------------


def by_a_running_square(m: Any, x: Tensor) -> Tensor:
    y = x * torch.rsqrt(m.buffer + 1e-5) * m.weight
    m.buffer.mul_(0.5).add_(x.detach().pow(2).mean(0), alpha=0.5)
    return y


def by_a_sine(m: Any, x: Tensor) -> Tensor:
    y = (x * m.weight * m.buffer.sin()).tanh()
    m.buffer.mul_(0.5).add_(y.detach().mean(0) * 0.1)
    return y


def by_a_view(m: Any, x: Tensor) -> Tensor:
    turned = m.buffer.view(8, 8).mT.reshape(64)
    y = x * m.weight * turned.cos()
    m.buffer.copy_(m.buffer.roll(1, 0))
    return y * turned.sin()


def in_part(m: Any, x: Tensor) -> Tensor:
    y = x * m.weight * m.buffer[:32].exp().repeat(2)
    m.buffer[:32] = m.buffer[32:] * 0.5
    return y.sin()


def by_index(m: Any, x: Tensor) -> Tensor:
    m.buffer[torch.arange(64)] = m.buffer * 0.7
    m.buffer.add_(m.buffer.flip(0))
    return (x * m.weight * m.buffer).sin()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [by_a_running_square, by_a_sine, by_a_view, in_part, by_index])
def test_gradients(function: Any) -> None:
    torch.manual_seed(0)
    model: Any = Of(function, weight=nn.Parameter(torch.randn(64)))
    model.register_buffer("buffer", torch.rand(64) + 3)
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    steps = [torch.randn(32, 64) for _ in range(2)]

    def trained(call: Any, of: Any) -> list[Tensor]:
        found = []
        for x in steps:
            mine = x.to(of.weight.dtype, copy=True).requires_grad_()
            of.zero_grad()
            call(mine).pow(2).sum().backward()
            assert mine.grad is not None
            found += [mine.grad, of.weight.grad.clone(), of.buffer.clone()]
        return found

    compiled = compile_at("O2", model)
    got = trained(compiled, model)
    assert_contract(got, trained(own, own), trained(wide, wide), function.__name__)
    assert_ran_as_planned(compiled, "O2")


IN_PLACE = {
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "mish": nn.Mish(inplace=True),
    "relu": nn.ReLU(inplace=True),
    "threshold": nn.Threshold(0.1, 0.2, inplace=True),
    "sine": Of(lambda m, x: torch.cat([x]) + x.sin_()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", IN_PLACE.values(), ids=IN_PLACE)
def test_what_was_computed_outside_is_changed_first(activation: nn.Module) -> None:
    """Torch raises behind a graph break, where the backward needs what the input was."""
    if "desc" not in placeholders_of_a_training_graph():
        pytest.skip("this torch does not tell which inputs a training graph changes")
    model = nn.Sequential(activation, nn.Linear(16, 16))
    wide, leaf = copy.deepcopy(model).double(), torch.randn(8, 16)

    def gradient(call: Any, dtype: torch.dtype) -> list[Tensor]:
        mine = leaf.to(dtype, copy=True).requires_grad_()
        call(mine.clone()).square().sum().backward()
        assert mine.grad is not None
        return [mine.grad]

    compiled = compile_at("O2", model)
    got, own = gradient(compiled, torch.float32), gradient(model, torch.float32)
    assert_contract(got, own, gradient(wide, torch.float64), str(activation))
    assert_ran_as_planned(compiled, "O2")


def test_statistics_of_a_batch_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read where they are written, in the forward."""
    made: list[Any] = []
    for module in (changed_inputs, overwritten):
        monkeypatch.setattr(module, "call", lambda graph, target, *args: made.append(target))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    compile_at("O2", model)(torch.randn(2, 3, 9, 9)).sum().backward()
    assert made == []


def placeholders_of_a_training_graph() -> dict[str, Any]:
    """What is noted at an input."""
    from torch._inductor import compile_fx

    noted: dict[str, Any] = {}
    partition = compile_fx.min_cut_rematerialization_partition

    def watched(joint: Any, *args: Any, **kwargs: Any) -> Any:
        noted.update(joint.graph.find_nodes(op="placeholder")[0].meta)
        return partition(joint, *args, **kwargs)

    with mock.patch.object(compile_fx, "min_cut_rematerialization_partition", watched):
        torch.compile(lambda x: x.sin(), backend="inductor")(torch.ones(2, requires_grad=True))
    return noted


# --- what is written by index and read at other places --------------------------------------------


def then_added(x: Tensor) -> Tensor:
    x[torch.arange(x.size(0))] = x * 2.0
    x.add_(x.flip(0))
    return x


def then_moved(x: Tensor) -> Tensor:
    x[torch.arange(x.size(0))] = x * 2.0
    x[1:] = x[:-1].clone()
    return x


def added_by_index(x: Tensor) -> Tensor:
    x.index_add_(0, torch.arange(x.size(0)).flip(0), x * 0.5)
    x.sub_(x.roll(1, 0))
    return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [then_added, then_moved, added_by_index])
def test_read_at_other_places(function: Any, dynamic: bool) -> None:
    compiled = compile_at("O2", Of(lambda m, x: function(x)), dynamic=dynamic)
    for size in ((300, 70), (33, 50)) if dynamic else ((300, 70),):
        x = torch.rand(size)
        mine, own = x.clone(), x.clone()
        with torch.no_grad():
            got, expected = compiled(mine), function(own)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(mine, own)
    assert_ran_as_planned(compiled, "O2")


def into_a_cache(cache: Tensor, x: Tensor) -> Tensor:
    """As a step of decoding: it is read as a whole, and nothing of that is written back."""
    cache[:, 3:5] = x
    return (cache * 2).sum(1)


def into_a_cache_twice(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, 3:5] = x
    cache.index_copy_(1, torch.tensor([7, 8]), x * 2)
    return cache.mean(1)


@pytest.mark.parametrize("function", [into_a_cache, into_a_cache_twice])
def test_caches_are_written_where_they_lie(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    put_right = overwritten.put_right

    def watched(graph: Any) -> None:
        put_right(graph)
        graphs.append(graph)
        assert not graph.find_nodes(op="call_function", target=COPIED)

    monkeypatch.setattr(overwritten, "put_right", watched)
    compiled = compile_at("O2", Of(lambda m, cache, x: function(cache, x)))
    cache, x = torch.randn(2, 16, 40), torch.randn(2, 2, 40)
    mine, own = cache.clone(), cache.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(mine, x), function(own, x))
    torch.testing.assert_close(mine, own)
    assert graphs


# --- what becomes a view of something computed from itself ----------------------------------------

MOVED: dict[str, Callable[[Tensor], Any]] = {
    "turned": lambda y: y.copy_(y.t().reshape(6, 8)),
    "as a line": lambda y: y.view(-1).copy_(y.t().reshape(-1)),
    "scaled": lambda y: y.copy_(y.t().reshape(6, 8) * 2 + 1),
    "channels shuffled": lambda y: y.copy_(y.view(2, 3, 8).transpose(0, 1).reshape(6, 8)),
    "halves swapped": lambda y: y.copy_(y.view(3, 2, 8).flip(1).reshape(6, 8)),
    "shifted down": lambda y: y[1:].copy_(y[:-1].clone()),
    "set to the one above": lambda y: y.__setitem__(slice(1, None), y[:-1].clone()),
    "set to the one below": lambda y: y.__setitem__(slice(None, -1), y[1:].clone()),
    "windows": lambda y: y.copy_(y.view(2, 3, 2, 4).permute(0, 2, 1, 3).reshape(6, 8)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", MOVED.values(), ids=MOVED)
def test_an_input_becomes_itself_in_another_order(function: Callable[[Tensor], Any]) -> None:
    compiled = compile_at("O2", Of(lambda m, y: function(y)))
    mine = torch.randn(6, 8)
    own = mine.clone()
    with torch.no_grad():
        compiled(mine)
        function(own)
    torch.testing.assert_close(mine, own)
    assert_ran_as_planned(compiled, "O2")


def test_what_stays_in_its_place_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(overwritten, "call", lambda graph, target, *args: made.append(target))
    y = torch.randn(6, 8)
    with torch.no_grad():
        compile_at("O2", Of(lambda m, y: y.view(-1).mul_(2).add_(1)))(y)
        compile_at("O2", Of(lambda m, y, x: y.copy_(x.t().reshape(6, 8))))(y, torch.randn(8, 6))
    assert made == []


def exchanged(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return x.sum() + z.sum()


def exchanged_turned(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.t().clone()
    x.copy_(y.flip(0))
    y.copy_(before.t())
    return before * 2


def moved_on_in_a_ring(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(before)
    return z + 1


def moved_on_and_emptied(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.detach().clone()
    x.zero_()
    y.copy_(before.view(-1).view(60, 50))
    return y - z


def both_kept(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    one, other = x.clone(), y.clone()
    x.copy_(other)
    y.copy_(one)
    return one - other + z


def averaged(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.clone()
    x.lerp_(y, 0.5)
    y.copy_(before)
    return before.mean()


def added_to_itself(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Rows of it to others of it."""
    x.index_add_(0, torch.arange(60).flip(0) // 2, x.clone())
    y.index_copy_(0, torch.arange(60).roll(1), y.clone())
    z[torch.arange(60).flip(0)] = z.clone()
    return x + y + z


def returned_as_it_was(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    y.t().copy_(y.t())
    x.copy_(y)
    y.index_add_(0, torch.arange(60) // 3, z)
    return x.clone(), x + y


def returned_between_writes(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    x[4:8] = x[1:5] * 2
    before = x.clone()
    x.index_add_(0, torch.arange(60) // 3, y)
    return before, before * z


def returned_before_it_is_another(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    z[:, 2:6] = x[:, :4].clone()
    before = z.clone()
    x[torch.arange(5)] = y[:5]
    x[x > 1] = 0.0
    z.t().copy_(x[torch.arange(60).roll(3)].t())
    return before, x * 2


def another_becomes_what_was_between(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    z[torch.arange(5)] = z[5:10] * 2
    x[4:8] = z[1:5] * 2
    y.copy_(x)
    x.index_add_(0, torch.arange(60) // 3, z)
    return x + y


EXCHANGES = [
    returned_before_it_is_another,
    returned_between_writes,
    another_becomes_what_was_between,
    added_to_itself,
    returned_as_it_was,
    exchanged,
    exchanged_turned,
    moved_on_in_a_ring,
    moved_on_and_emptied,
    both_kept,
    averaged,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("function", EXCHANGES)
def test_inputs_change_places(function: Callable[..., Any], level: str) -> None:
    compiled = compile_at(level, function)
    given = [torch.randn(60, 50) for _ in range(3)]
    own = [one.clone() for one in given]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), function(*own))
            for one, other in zip(given, own, strict=True):
                torch.testing.assert_close(one, other)
    assert_ran_as_planned(compiled, level)


def by_its_own_rows(x: Tensor) -> Tensor:
    z = x.sin()
    z.index_copy_(0, torch.tensor([0, 2, 5]), z.clone()[:3])
    return z


def by_its_own_columns(x: Tensor) -> Tensor:
    x.copy_(x.softmax(-1))
    x[:, 0:1] = x.roll(1, 1)[:, 1:2]
    return x.exp()


def by_an_index_of_itself(x: Tensor) -> Tensor:
    x.index_add_(0, (x[:, 1] * 3).long().abs() % 6, torch.ones(6, 8))
    return x.exp()


@pytest.mark.parametrize("function", [by_its_own_rows, by_its_own_columns, by_an_index_of_itself])
def test_a_part_is_set_to_another(function: Any) -> None:
    compiled = compile_at("O2", Of(lambda m, x: function(x)))
    mine = torch.randn(6, 8)
    own = mine.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(mine), function(own))
    torch.testing.assert_close(mine, own)
    assert_ran_as_planned(compiled, "O2")


# --- what a mask writes behind an index -----------------------------------------------------------


def masked(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[rows] = y[:3]
    z[z > 0.7] = 0.1
    return z


def masked_input(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    x[rows] = y[:3]
    x[x > 0.7] = 0.1
    return x * 1.0


def masked_rows(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    z = x @ x.T
    z.index_add_(0, rows, y[:3, :6])
    z[z[:, 0] < 0] = 0
    return z


def added_by_mask(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    x.scatter_add_(0, rows[:, None].expand(3, 8), y[:3])
    return torch.index_put(x, (x > 0,), torch.tensor(2.0), accumulate=True)


@pytest.mark.parametrize("function", [masked, masked_input, masked_rows, added_by_mask])
def test_a_mask_comes_after_what_was_written_by_index(function: Any) -> None:
    compiled = compile_at("O2", Of(lambda m, x, y, rows: function(x, y, rows)))
    x, y, rows = torch.randn(6, 8), torch.randn(6, 8), torch.tensor([0, 2, 5])
    mine, own = x.clone(), x.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(mine, y, rows), function(own, y, rows))
    torch.testing.assert_close(mine, own)
    assert_ran_as_planned(compiled, "O2")


INTO_EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "put": lambda x, i: x[:1].expand(8, 6).index_put((i,), x[: len(i)] * 2),
    "added": lambda x, i: x[:1].expand(8, 6).index_put((i,), x[: len(i)] * 2, accumulate=True),
    "scattered": lambda x, i: x[:, :1].expand(8, 6).scatter(0, i[:, None], x * 2),
    "added by scattering": lambda x, i: x[:, :1].expand(8, 6).scatter_add(0, i[:, None], x * 2),
    "a slice": lambda x, i: x[:1].expand(8, 6).slice_scatter(x[:2] * 2, 0, 3, 5),
    "a row": lambda x, i: x[:1].expand(8, 6).select_scatter(x[2] * 2, 0, 3),
    "gradients of each": lambda x, i: torch.func.vmap(
        torch.func.grad(lambda one: one.index_select(0, i % 6).square().sum())
    )(x),
    "a Jacobian": lambda x, i: torch.func.jacrev(lambda one: one.index_select(0, i).square())(x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INTO_EXPANDED)
def test_what_is_put_into_an_expanded_tensor(name: str) -> None:
    """Inductor put it in place, into memory that all parts share."""
    function, x, places = INTO_EXPANDED[name], torch.randn(8, 6), torch.tensor([3, 0, 5, 3, 3])
    compiled = compile_at("O2", function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, places), function(x, places))
    assert_ran_as_planned(compiled, "O2")
