"""At O1 slices are written where they lie, unless somebody reads what they overwrite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import in_place
from tests.support.compiling import compile_at
from tests.support.modules import Of
from tests.support.regions import hold, no_cached_graphs, region_rows

# For its sake the graph is not run as Dynamo captured it, whatever the CPU.
LAYER = nn.Sequential(
    nn.Unflatten(1, (16, 16)), nn.Unflatten(0, (1, 64)), nn.Conv2d(64, 64, 3, padding=1)
).eval()


def windows(x: Tensor) -> Tensor:
    out = torch.zeros(64, 256)
    out[:32] = x[:32]
    out[32:, :100] = x[32:, :100]
    out[:, 5] = 1.0
    out[3, 4] = 2
    return out * 2


def a_diagonal_of_a_view(x: Tensor) -> Tensor:
    out = (x + 1).view(8, 8, 256)
    out[2:4, 1:7, 10:-3] = x[:12].view(2, 6, 256)[:, :, 10:-3]
    out.diagonal(0, 0, 1)[:] = 3
    return out


def entries(x: Tensor) -> Tensor:
    out = x + 1
    out[torch.arange(3), torch.arange(3)] = 9
    out.index_add_(0, torch.tensor([1, 2]), torch.ones(2, 256, dtype=x.dtype))
    out.index_copy_(0, torch.tensor([4]), x[:1])
    out.scatter_(1, torch.zeros(64, 3, dtype=torch.long), 5.0)
    return out


def what_shares_memory(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 2
    row = whole[3]
    whole[3] = 0
    return row + 1, whole


def parts_of_itself(x: Tensor) -> Tensor:
    out = x * 1
    out[2:] = out[:-2].clone()
    out[:, 1:] = out[:, :-1] + 1
    out[0] = out[1]
    out[:2], out[2:4] = out[2:4].clone(), out[:2].clone()
    return out


def another_dtype_and_shape(x: Tensor) -> Tensor:
    out = torch.zeros(64, 256, dtype=torch.float16)  # holds no more digits than a product has
    out[1:9] = x[0]
    return out


def a_copy_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    out = x + 1
    before = out.clone()
    out[5:] = 0
    return out, before


IN_PLACE = [
    *(windows, a_diagonal_of_a_view, entries, what_shares_memory, parts_of_itself),
    *(another_dtype_and_shape, a_copy_kept),
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    seen: list[fx.Graph] = []
    put_back = in_place.put_back

    def watched(graph: fx.Graph) -> None:
        put_back(graph)
        graph.lint()
        seen.append(graph)

    monkeypatch.setattr(in_place, "put_back", watched)
    return seen


def copies(graph: fx.Graph) -> list[str]:
    """What makes a new tensor out of one with something replaced."""
    named = [node.target.name() for node in graph.nodes if hasattr(node.target, "name")]
    last = ("_scatter", "::index_put", "::index_copy", "::index_add", "::scatter")
    return [name for name in named if name.split(".")[0].endswith(last)]


@pytest.mark.parametrize("write", IN_PLACE)
def test_written_where_it_lies(write: Callable, graphs: list[fx.Graph]) -> None:
    module = Of(lambda self, x: write(self.layer(x).view(64, 256)), layer=LAYER)
    with torch.no_grad(), no_cached_graphs():
        compiled = compile_at("O1", module)
        for _ in range(2):
            hold(compiled, module, torch.randn(64, 256))
    assert region_rows(compiled)[0][0] == "convolution"
    (graph,) = graphs
    assert copies(graph) == []


aten = torch.ops.aten


def the_old_values_read_later(x: Tensor) -> Tensor:
    old = x * 2
    return aten.slice_scatter(old, x[:4], 0, 0, 4) + old


def a_view_read_later(x: Tensor) -> Tensor:
    old = x * 2
    view = old.view(-1)[:100]
    return aten.select_scatter(old, x[0], 0, 1).sum() + view.sum()


def both_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    old = x * 2
    return aten.select_scatter(old, x[0], 0, 1), old


def the_callers_own(x: Tensor) -> Tensor:
    return aten.slice_scatter(x, x[:4] * 2, 0, 0, 4)


def entries_of_itself(x: Tensor) -> Tensor:
    old = x * 2
    return aten.index_put(old, [torch.tensor([1, 2])], old[:2])


KEPT = [
    *(the_old_values_read_later, a_view_read_later, both_returned),
    *(the_callers_own, entries_of_itself),
]


@pytest.mark.parametrize("compute", KEPT)
def test_what_is_read_again_is_copied(compute: Callable) -> None:
    x = torch.randn(64, 256)
    module = make_fx(compute, tracing_mode="fake")(x)
    in_place.put_back(module.graph)
    module.recompile()
    assert len(copies(module.graph)) == 1
    kept = x.clone()
    torch.testing.assert_close(module(x), compute(x), rtol=0, atol=0)
    assert torch.equal(x, kept)


def a_cache(x: Tensor, kept: Tensor) -> Tensor:
    kept.index_copy_(0, torch.arange(64), x)
    kept[70:80, 3:] = 1
    return kept @ x.t()


def a_part_of_itself(x: Tensor, kept: Tensor) -> Tensor:
    kept[:64] = x
    kept[1:65] = kept[:64].clone()
    return x.sum()


def something_else_in_the_end(x: Tensor, kept: Tensor) -> Tensor:
    kept[:64] = x
    kept.mul_(2)
    return kept[3]


def itself(x: Tensor, kept: Tensor) -> Tensor:
    kept[:64] = x
    return kept


def its_old_values(x: Tensor, kept: Tensor) -> Tensor:
    old = kept.clone()
    kept[:64] = x
    return old + kept


OF_THE_CALLER = [a_cache, a_part_of_itself, something_else_in_the_end, itself, its_old_values]


@pytest.mark.parametrize("write", OF_THE_CALLER)
def test_the_caller_sees_what_is_written(write: Callable, graphs: list[fx.Graph]) -> None:
    module = Of(lambda self, x, kept: write(self.layer(x).view(64, 256), kept), layer=LAYER)
    kept = torch.randn(100, 256)
    eagers = kept.clone()
    with torch.no_grad(), no_cached_graphs():
        compiled = compile_at("O1", module)
        for _ in range(3):
            x = torch.randn(64, 256)
            got, own = compiled(x, kept), module(x, eagers)
            torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kept, eagers, rtol=1e-4, atol=1e-4)
            assert (got.data_ptr() == kept.data_ptr()) == (own.data_ptr() == eagers.data_ptr())
    (graph,) = graphs
    assert copies(graph) == []


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_overwritten_meanwhile_was_read_before(nested: bool) -> None:
    """Parts are written back when the whole is read, which may be long after they were made."""

    def moved(x: Tensor) -> tuple[Tensor, Tensor]:
        out, other = x * 1, x * 2
        row = aten.select(out, 0, 0)
        if nested:
            part = aten.copy(
                aten.slice(row, 0, 3, 9), aten.slice(aten.select(other, 0, 1), 0, 3, 9)
            )
            value = aten.slice_scatter(row, part, 0, 3, 9)
        else:
            value = aten.copy(row, aten.select(other, 0, 1))
        other = aten.select_scatter(other, x[0], 0, 1)
        return aten.select_scatter(out, value, 0, 0), other

    x = torch.randn(64, 256)
    module = make_fx(moved, tracing_mode="fake")(x)
    in_place.put_back(module.graph)
    module.recompile()
    torch.testing.assert_close(module(x), moved(x), rtol=0, atol=0)
    assert copies(module.graph) == (["aten::slice_scatter"] if nested else [])


def test_old_values_that_are_returned_stay() -> None:
    """The new ones are written back in the end, and must not be there before."""

    def both(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        new = aten.slice_scatter(kept, x[:4], 0, 0, 4)
        sums = new.sum(0) - kept.sum(0)
        kept.copy_(new)
        return sums, new

    x, kept = torch.randn(64, 256), torch.randn(64, 256)
    module = make_fx(both, tracing_mode="fake")(x, kept)
    in_place.put_back(module.graph)
    module.recompile()
    assert len(copies(module.graph)) == 1
    eagers = kept.clone()
    torch.testing.assert_close(module(x, kept), both(x, eagers), rtol=0, atol=0)
    assert torch.equal(kept, eagers)
