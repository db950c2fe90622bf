"""Convolutions of one image that are summed up become one; the model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Beside, Of, in_double, used
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import fallbacks_of, graph_reports

LEVELS = ("O1", "O2")
WIDTH = 16


@pytest.fixture(autouse=True)
def all_is_known() -> Iterator[None]:
    with no_cached_graphs(), every_row_applies():
        yield


def images() -> Tensor:
    return torch.randn(2, WIDTH, 9, 11)


class Branches(nn.Module):
    """Layers of several kernels, and what a function does with them and an image."""

    def __init__(self, function: Callable[..., Tensor], groups: int = 1, **more: Any) -> None:
        super().__init__()
        self.function = function

        def layer(size: int, **own: Any) -> nn.Conv2d:
            own = {"padding": size // 2, "groups": groups, **more, **own}
            return nn.Conv2d(WIDTH, WIDTH, size, **own)

        self.one, self.three, self.other = layer(1), layer(3), layer(3, bias=False)
        self.five = layer(5)
        self.high = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0), groups=groups, **more)
        self.wide = nn.Conv2d(WIDTH, WIDTH, (1, 3), padding=(0, 1), groups=groups, **more)
        self.spread = layer(3, dilation=2, padding=2)
        self.norm, self.second, self.third = (nn.BatchNorm2d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def from_zero(m: Branches, x: Tensor) -> Tensor:
    out = 0
    for layer in (m.three, m.other):
        out += layer(x)
    return (m.norm(x) + m.one(x) + out).relu()


def in_place(m: Branches, x: Tensor) -> Tensor:
    out = m.norm(m.three(x))
    out += m.second(m.one(x))
    out += x
    return functional.relu(out, inplace=True)


def two_images(m: Branches, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    return m.three(x) + m.five(y) + m.one(x) + m.one(y)


def behind_each_other(m: Branches, x: Tensor) -> Tensor:
    y = functional.relu_(m.three(x) + m.one(x))
    return m.norm(m.other(y) + m.wide(y)) + m.second(y)


Case = tuple[Callable[..., Tensor], int, int]
# name -> function, how many merges, how many convolutions are left
CASES: dict[str, Case] = {
    "two": (lambda m, x: m.three(x) + m.one(x), 1, 1),
    "the smaller one first": (lambda m, x: m.one(x) + m.three(x), 1, 1),
    "equal ones": (lambda m, x: m.three(x) + m.other(x), 1, 1),
    "one layer twice": (lambda m, x: m.three(x) + m.three(x), 1, 1),
    "RepVGG": (
        lambda m, x: (m.norm(m.three(x)) + m.second(m.one(x)) + m.third(x)).relu(),
        1,
        1,
    ),
    "from zero on": (from_zero, 1, 1),
    "in place": (in_place, 1, 1),
    "with the image": (lambda m, x: x + m.three(x) + m.one(x), 1, 1),
    "with a norm of it": (lambda m, x: m.norm(x) + m.three(x), 1, 1),
    "a kernel of one pixel": (lambda m, x: m.one(x) + m.norm(x) + x, 1, 1),
    "rows and columns": (lambda m, x: m.high(x) + m.three(x) + m.wide(x), 1, 1),
    "a spread kernel": (lambda m, x: m.five(x) + m.spread(x) + m.one(x), 1, 1),
    "weighed": (lambda m, x: m.three(x) * 0.5 + 2.0 * m.norm(m.one(x)), 1, 1),
    "dropout that does nothing": (
        lambda m, x: m.three(x) + functional.dropout(m.one(x), 0.5, training=False),
        1,
        1,
    ),
    "the sum of a list": (lambda m, x: sum([m.three(x), m.one(x), m.five(x)]), 1, 1),
    "beside something else": (lambda m, x: m.three(x) + torch.sin(x) + m.one(x), 1, 1),
    "of two images": (two_images, 2, 2),
    "behind each other": (behind_each_other, 2, 2),
    "norm behind the sum": (lambda m, x: m.norm(m.three(x) + m.one(x)), 1, 1),
    "a norm of a norm": (lambda m, x: m.norm(m.second(m.three(x))) + m.one(x) + m.five(x), 1, 2),
}


def regions(compiled: Any) -> dict[str, tuple[int, int]]:
    """By name: how many in the graph, and how often they ran."""
    return {
        row["region"]: (row["count"], row["runs"])
        for graph in graph_reports(compiled)
        for row in graph.as_dict()["regions"]
    }


def assert_merged(compiled: Any, merges: int, convolutions: int, runs: int) -> None:
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    found = regions(compiled)
    assert found.get("branches", (0, 0)) == (merges, merges * runs), found
    assert found["convolution"] == (convolutions, convolutions * runs), found
    assert ("from_weights" in found) == bool(merges), found


def held(level: str, model: nn.Module, given: Sequence[Tensor], merges: int, left: int) -> Any:
    """Numbers by the contract, twice, and what was reported."""
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(2):
            eager, reference = model(*copies(given)), in_double(model, *given)
            assert_contract(compiled(*copies(given)), eager, reference, f"{level}")
    assert_merged(compiled, merges, left, 2)
    return compiled


def copies(given: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in given]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("groups", [1, WIDTH])
def test_numbers_and_report(groups: int, part: int) -> None:
    """Several in one graph, counted together; the next test counts in each of them alone."""
    cases = {name: CASES[name] for name in [*CASES][part::3]}
    models = {name: used(Branches(case[0], groups), images()) for name, case in cases.items()}
    merges, left = (sum(case[i] for case in cases.values()) for i in (1, 2))
    held("O2", Beside(models), [images() for _ in models], merges, left)


@pytest.mark.parametrize("name", CASES)
def test_library_calls_of_few_groups(name: str) -> None:
    function, merges, convolutions = CASES[name]
    held("O1", used(Branches(function, 4), images()), [images()], merges, convolutions)


def test_the_report_says_in_place_of_what() -> None:
    model = used(Branches(CASES["RepVGG"][0]), images())
    compiled = held("O2", model, [torch.randn(1, WIDTH, 8, 8)], 1, 1)
    (graph,) = graph_reports(compiled)
    (row,) = (row for row in graph.as_dict()["regions"] if row["region"] == "branches")
    assert row["detail"] == "in place of conv2d x2, batch_norm x3"


@pytest.mark.parametrize("padding", ["same", "valid", (1, 2)])
def test_paddings(padding: Any) -> None:
    layers = [nn.Conv2d(8, 12, (3, 5), padding=padding) for _ in range(2)]
    model = Of(lambda m, x: m.one(x) + m.two(x), one=layers[0], two=layers[1])
    held("O2", model, [torch.randn(1, 8, 9, 9)], 1, 1)


@pytest.mark.parametrize("dims", [1, 3])
def test_lines_and_volumes(dims: int) -> None:
    layer = {1: nn.Conv1d, 3: nn.Conv3d}[dims]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = layer(8, 8, 5, padding=2), layer(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) + self.small(x) + x

    with torch.no_grad():
        model, x = Two().eval(), torch.randn(2, 8, *[6] * dims)
        compiled = compile_at("O2", model)
        assert_contract(compiled(x), model(x), in_double(model, x), "O2")
    assert regions(compiled)["branches"] == (1, 1)


def test_strided_kernels_without_the_image() -> None:
    model = used(Branches(lambda m, x: m.three(x) + m.one(x) + m.five(x), stride=2), images())
    held("O2", model, [torch.randn(2, WIDTH, 9, 12)], 1, 1)


def test_sizes_that_change() -> None:
    model = used(Branches(CASES["RepVGG"][0]), images())
    with torch.no_grad():
        compiled = compile_at("O2", model)
        for size in (8, 9, 13):
            x = torch.randn(2, WIDTH, size, size + 1)
            for dim in (2, 3):
                torch._dynamo.mark_dynamic(x, dim)
            assert_contract(compiled(x), model(x), in_double(model, x), f"{size}")
    assert_merged(compiled, 1, 1, 3)


def test_numbers_that_change_too() -> None:
    """Then what a norm adds to its variance is an input of the graph: only other branches merge."""
    model = used(Branches(lambda m, x: m.three(x) + m.one(x) + m.norm(x)), images())
    with torch.no_grad():
        compiled = compile_at("O2", model, dynamic=True)
        for eps in (1e-5, 0.5):
            model.norm.eps = eps
            x = torch.randn(2, WIDTH, 7, 8)
            assert_contract(compiled(x), model(x), in_double(model, x), f"{eps}")
    assert_merged(compiled, 1, 1, 1)  # of the second graph


def test_channels_last() -> None:
    model = used(Branches(CASES["RepVGG"][0]), images()).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    compiled = held("O2", model, [x], 1, 1)
    with torch.no_grad():
        assert compiled(x).stride() == model(x).stride()


# --- weights that change ------------------------------------------------------------------------


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def statistics(model: nn.Module) -> None:
    for norm in (model.norm, model.second, model.third):
        norm.running_var.mul_(2)


def a_kernel(model: nn.Module) -> None:
    model.one.weight.data.mul_(-2)


def another_kernel(model: nn.Module) -> None:
    model.three.weight = nn.Parameter(torch.randn_like(model.three.weight))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("update", [load_state_dict, statistics, a_kernel, another_kernel])
def test_updates_show(update: Callable[[nn.Module], None], level: str) -> None:
    model = used(Branches(CASES["RepVGG"][0]), images())
    x = images()
    with torch.no_grad():
        compiled = compile_at(level, model)
        before = compiled(x).clone()
        update(model)
        for _ in range(2):
            assert_contract(compiled(x), model(x), in_double(model, x), level)
        assert not torch.allclose(before, compiled(x))


@pytest.mark.parametrize("level", LEVELS)
def test_training_keeps_its_branches(level: str) -> None:
    model = used(Branches(CASES["weighed"][0]), images()).train()
    again, x = copy.deepcopy(model), images()
    compiled = compile_at(level, model)
    compiled(x).sum().backward()
    again(x).sum().backward()
    torch.testing.assert_close(model.one.weight.grad, again.one.weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.norm.running_mean, again.norm.running_mean)
    assert "branches" not in regions(compiled)


# --- what stays as it is -----------------------------------------------------------------------


def written_between(m: Branches, x: Tensor) -> Tensor:
    y = torch.sin(x)
    first = m.three(y)
    y.mul_(2)
    return first + m.one(y)


def other_term_written_between(m: Branches, x: Tensor) -> Tensor:
    y = torch.sin(x)
    partly = m.three(x) + y
    y.mul_(2)
    return partly + m.one(x) + y.mean()


def read_twice(m: Branches, x: Tensor) -> Tensor:
    first = m.three(x)
    return (first + m.one(x)) * first


def into_the_image(m: Branches, x: Tensor) -> Tensor:
    y = torch.sin(x)
    y += m.three(y)
    return y


def into_the_image_twice(m: Branches, x: Tensor) -> Tensor:
    y = torch.sin(x)
    z = y.add_(1)
    z += m.three(x)
    return (z + m.one(x)) * y.mean()


def written_by_foreach(m: Branches, x: Tensor) -> Tensor:
    y = torch.sin(x)
    first = y + m.three(x)
    torch._foreach_add_([y], 1)
    return first + m.one(x)


def into_an_output(m: Branches, x: Tensor) -> Tensor:
    given = torch.empty_like(x)
    y = torch.add(x, x, out=given)
    y += m.three(x)
    y += m.one(x)
    return y * given.mean()


@torch.compiler.allow_in_graph
def add(one: Tensor, other: Tensor) -> Tensor:
    return one - other


def a_view_of_it(m: Branches, x: Tensor) -> Tensor:
    return (m.three(x) + m.one(x)[:, :1]) * 2


WRITTEN: dict[str, Callable[..., Tensor]] = {
    "the image is written between them": written_between,
    "another term is written between them": other_term_written_between,
    "a sum into the image": into_the_image,
    "sums into what is read elsewhere": into_the_image_twice,
    "written by one call for several": written_by_foreach,
    "a sum into what is given": into_an_output,
}
APART: dict[str, Callable[..., Tensor]] = {
    "one is read elsewhere": read_twice,
    "a sum that is broadcast": a_view_of_it,
    "a sum with a factor of its own": lambda m, x: (
        m.three(x) + torch.add(m.one(x), m.other(x), alpha=2)
    ),
    "somebody's own function of that name": lambda m, x: add(m.three(x), m.one(x)),
    "a residual": lambda m, x: m.three(x) + x,
    "an activation between": lambda m, x: m.three(x) + m.one(x).relu(),
    "of different images": lambda m, x: m.three(x) + m.one(x.sin()),
    "neither holds the other": lambda m, x: m.high(x) + m.wide(x),
    "a weight that is computed": lambda m, x: (
        m.three(x) + functional.conv2d(x, m.one.weight * x.mean(), None)
    ),
    "a norm of the batch": lambda m, x: (
        m.three(x) + functional.batch_norm(m.one(x), None, None, training=True)
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_branches_stay_apart_where_something_is_written(name: str) -> None:
    model, x = used(Branches(WRITTEN[name]), images()), images()
    with torch.no_grad():
        compiled = compile_at("O2", model)
        assert_contract(compiled(x), model(x), in_double(model, x), name)
    assert "branches" not in regions(compiled)
    assert not fallbacks_of(compiled)


def test_branches_that_stay_apart() -> None:
    """Beside a sum that is merged: nothing else keeps these from it."""
    functions = {**APART, "merged": CASES["two"][0]}
    model = Beside({name: used(Branches(one), images()) for name, one in functions.items()})
    given = [images() for _ in functions]
    with torch.no_grad():
        compiled = compile_at("O2", model)
        assert_contract(compiled(*given), model(*given), in_double(model, *given), "apart")
    assert regions(compiled)["branches"] == (1, 1), graph_reports(compiled)
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sum_lies_as_it_did(level: str) -> None:
    """A term that lies otherwise decides how the sum lies, and the caller may count on that."""
    other = images().to(memory_format=torch.channels_last)
    model = used(Branches(lambda m, x: other + m.three(x) + m.one(x)), images())
    with torch.no_grad():
        x = images()
        compiled = compile_at(level, model)
        eager = model(x)
        assert_contract(compiled(x), eager, in_double(model, x), level)
        assert compiled(x).stride() == eager.stride()
    assert not fallbacks_of(compiled)


def test_layers_of_several_images_have_one_kernel() -> None:
    def levels(m: Branches, x: Tensor) -> list[Tensor]:
        images = [functional.avg_pool2d(x, size) for size in (1, 2, 3, 4)]
        return [functional.relu(m.three(one) + m.one(one)) for one in images]

    model, x = used(Branches(levels), images()), images()
    with torch.no_grad():
        compiled = compile_at("O2", model)
        assert_contract(compiled(x), model(x), in_double(model, x), "levels")
    assert_merged(compiled, 4, 4, 1)
    assert regions(compiled)["from_weights"] == (2, 2)


def test_a_large_image_is_not_summed_up_with_many_numbers() -> None:
    """Each sum of so many would be rounded as the image itself."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(256, 256, 3, padding=1)
            with torch.no_grad():
                self.layer.weight.mul_(1e-3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x

    with torch.no_grad():
        model, x = Wide().eval(), torch.randn(1, 256, 6, 6) + 100
        compiled = compile_at("O2", model)
        assert_contract(compiled(x), model(x), in_double(model, x), "wide")
    assert "branches" not in regions(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_apart(dtype: torch.dtype) -> None:
    model = used(Branches(CASES["two"][0]), images()).to(dtype)
    with torch.no_grad():
        compiled = compile_at("O2", model)
        compiled(torch.randn(1, WIDTH, 8, 8, dtype=dtype))
    assert "branches" not in regions(compiled)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_stays_apart(inside: bool) -> None:
    def casting(m: Branches, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=inside):
            return m.three(x) + m.one(x)

    model = used(Branches(casting if inside else CASES["two"][0]), images())
    with torch.no_grad(), torch.autocast("cpu", enabled=not inside):
        compiled = compile_at("O2", model)
        compiled(torch.randn(1, WIDTH, 8, 8))
    assert "branches" not in regions(compiled)


def test_a_write_elsewhere_does_not_hinder() -> None:
    def function(m: Branches, x: Tensor) -> Tensor:
        first = m.three(x)
        other = torch.sin(x).mul_(2)
        return (first + m.one(x)) * other

    held("O2", used(Branches(function), images()), [torch.randn(2, WIDTH, 8, 8)], 1, 1)
