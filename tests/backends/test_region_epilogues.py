"""What may follow a linear layer or a convolution: absorbed where it can be, left where it must be.

Numbers and the report: what a provider absorbed stands in the detail of its region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.compiling import every_row_applies
from tests.support.modules import Of
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    hold,
    level_of,
    no_cached_graphs,
    places,
    provider_at,
)
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


# Activations by what the report calls them, in each spelling.
ACTIVATIONS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("relu", functional.relu),
    ("relu", torch.relu_),
    ("clamp", functional.relu6),
    ("clamp", lambda t: functional.hardtanh(t, -2, 0.5)),
    ("clamp", functional.hardtanh),
    ("clamp", lambda t: t.clamp(-0.25, 0.5)),
    ("hardswish", functional.hardswish),
    ("hardsigmoid", functional.hardsigmoid),
    ("gelu_erf", functional.gelu),
    ("gelu_tanh", lambda t: functional.gelu(t, approximate="tanh")),
    ("leaky_relu", functional.leaky_relu),
    ("leaky_relu", lambda t: functional.leaky_relu(t, 0.3)),
    ("elu", functional.elu),
    ("elu", lambda t: functional.elu(t, 0.4)),
    ("silu", functional.silu),
    ("silu", lambda t: functional.silu(t, inplace=True)),
    ("tanh", torch.tanh),
    ("sigmoid", torch.sigmoid),
]
# Behind these the region ends before the activation: nobody knows them, or not with these numbers.
OTHERS: list[Callable[[Tensor], Tensor]] = [
    functional.selu,
    lambda t: functional.celu(t, 0.5),
    functional.mish,
    functional.softplus,
    lambda t: functional.threshold(t, 0.1, 2.0),
    lambda t: t.clamp(min=0.1),
    lambda t: t.clamp(torch.tensor(-0.1), torch.tensor(0.2)),
    functional.rrelu,
    torch.sin,
]


def known_to(provider: str) -> set[str]:
    return {name for name, _ in ACTIVATIONS} - ({"elu"} if provider == "mkldnn" else set())


def absorbed(compiled: Any, region: str) -> set[str]:
    """The chains in the detail of the one row of this region."""
    (text,) = details(compiled, region)
    return {part for part in text.removeprefix("with ").split(", ") if part}


@places()
def test_activations_behind_linear_layers(place: str) -> None:
    functions = [function for _, function in ACTIVATIONS]
    model = Of(
        lambda m, x: [f(m.layer(x + i)) for i, f in enumerate(functions)], layer=nn.Linear(24, 20)
    )
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, torch.randn(2, 7, 24))
    n = len(functions)
    assert_regions(compiled, ("linear", provider_at(place), n, n))
    assert absorbed(compiled, "linear") == known_to(provider_at(place))


@pytest.mark.sampled(2)
@places()
def test_activations_behind_convolutions(place: str) -> None:
    functions = [function for _, function in ACTIVATIONS]
    model = Of(
        lambda m, x: [f(m.layer(x + i)) for i, f in enumerate(functions)], layer=nn.Conv2d(3, 9, 3)
    )
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, torch.randn(2, 3, 6, 7))
    n = len(functions)
    assert_regions(compiled, ("convolution", provider_at(place), n, n))
    assert absorbed(compiled, "convolution") == known_to(provider_at(place))


@pytest.mark.sampled(2)
@places()
def test_activations_that_nobody_knows(place: str) -> None:
    model = Of(
        lambda m, x: [f(m.layer(x + i)) for i, f in enumerate(OTHERS)], layer=nn.Linear(24, 20)
    )
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, torch.randn(7, 24))
    assert_regions(compiled, ("linear", provider_at(place), len(OTHERS), len(OTHERS)))
    assert absorbed(compiled, "linear") <= {"leaky_relu"}  # rrelu in eval


# --- addends and factors: what ours absorbs -------------------------------------------------------

CHAINS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "add": lambda m, x, r: r + m.layer(x),
    "add+relu": lambda m, x, r: torch.relu(m.layer(x) + r),
    "relu+add": lambda m, x, r: torch.relu(m.layer(x)) + r,
    "silu+mul": lambda m, x, r: functional.silu(m.layer(x)) * r,
    "gelu_erf+mul": lambda m, x, r: r * functional.gelu(m.layer(x)),
    "mul": lambda m, x, r: m.layer(x) * r,
    "mul+add": lambda m, x, r: m.layer(x) * r + r,
    "sigmoid+mul+add": lambda m, x, r: r + torch.sigmoid(m.layer(x)) * r,
    "add+tanh+mul+add": lambda m, x, r: torch.tanh(m.layer(x) + r) * r.sin() + r.cos(),
}


def linear_part() -> tuple[str, nn.Module, Tensor, Tensor]:
    return "linear", nn.Linear(16, 16), torch.randn(3, 5, 16), torch.randn(3, 5, 16)


def convolution_part() -> tuple[str, nn.Module, Tensor, Tensor]:
    shape = (2, 6, 7, 5)
    return "convolution", nn.Conv2d(6, 6, 3, padding=1), torch.randn(shape), torch.randn(shape)


PARTS = pytest.mark.parametrize("part", [linear_part, convolution_part])


@PARTS
@places("O2 openmp")
def test_chains(place: str, part: Callable[[], Any]) -> None:
    region, layer, x, r = part()
    # Equal calls of the layer are one call in the graph, so each chain has an input of its own.
    model = Of(lambda m, x, r: [f(m, x + i, r) for i, f in enumerate(CHAINS.values())], layer=layer)
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, x, r)
    assert_regions(compiled, (region, "openmp", len(CHAINS), len(CHAINS)))
    assert absorbed(compiled, region) == set(CHAINS)


@places("O1 mkldnn", "O2 mkldnn")
def test_chains_where_only_activations_are_absorbed(place: str) -> None:
    region, layer, x, r = linear_part()
    model = Of(lambda m, x, r: [f(m, x + i, r) for i, f in enumerate(CHAINS.values())], layer=layer)
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, x, r)
    assert absorbed(compiled, region) == {"relu", "silu", "gelu_erf", "sigmoid"}
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_gated_blocks(place: str) -> None:
    """SwiGLU and GEGLU, with two projections and with one that is split."""

    def spelled(m: Any, x: Tensor) -> list[Tensor]:
        left, right = m.both(x).chunk(2, -1)
        return [
            x + m.down(functional.silu(m.gate(x)) * m.up(x)),
            m.down(m.up(x + 1) * functional.gelu(m.gate(x + 1), approximate="tanh")),
            m.down(functional.gelu(left) * right),
            m.gate(x - 1) * m.up(x - 1),
            m.gate(x - 2) + m.up(x - 2),
        ]

    make = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
    model = Of(spelled, gate=make(16, 40), up=make(16, 40), down=make(40, 16), both=make(16, 80))
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, torch.randn(3, 5, 16))
    assert_regions(compiled, ("linear", provider_at(place), 12, 12))
    if provider_at(place) == "openmp":
        assert absorbed(compiled, "linear") >= {"silu+mul", "gelu_tanh", "mul", "add"}


# --- what must not be absorbed --------------------------------------------------------------------


@pytest.mark.sampled(3)
@PARTS
@places()
def test_what_is_seen_elsewhere_stays(place: str, part: Callable[[], Any]) -> None:
    """Several users of what stands between, or the user of the function himself."""

    def spelled(m: Any, x: Tensor, r: Tensor) -> list[Tensor]:
        seen, twice, squared = m.layer(x), m.layer(x + 1), m.layer(x + 2)
        added = m.layer(x + 3) + r
        return [
            functional.relu(seen), seen,
            functional.relu(twice) + torch.tanh(twice) + r,
            squared * squared, squared + squared,
            functional.relu(added) * r, added,
        ]  # fmt: skip

    region, layer, x, r = part()
    model = Of(spelled, layer=layer)
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, x, r)
    assert_regions(compiled, (region, provider_at(place), 4, 4))
    expected = {"add"} if provider_at(place) == "openmp" else set()
    assert absorbed(compiled, region) == expected


@pytest.mark.sampled(2)
@PARTS
@places()
def test_what_is_broadcast_or_promoted_stays(place: str, part: Callable[[], Any]) -> None:
    def spelled(m: Any, x: Tensor, r: Tensor) -> list[Tensor]:
        return [
            m.layer(x) + r[:1],
            m.layer(x + 1) * r[..., :1],
            m.layer(x + 2) + 1.5,
            m.layer(x[:1]) + r,
            torch.add(m.layer(x + 3), r, alpha=2),
            m.layer(x + 4) - r,
            m.layer(x + 5) / r.exp(),
            m.layer(x + 6).to(torch.float16).relu(),
            m.layer(x + 7) * (r > 0),
            m.layer(x + 8) + m.number,
        ]

    region, layer, x, r = part()
    model = Of(spelled, layer=layer, number=torch.tensor(2.5))
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, x, r)
    assert_regions(compiled, (region, provider_at(place), 10, 10))
    assert absorbed(compiled, region) == set()


@places()
def test_wider_addends(place: str) -> None:
    """float64 beside a float32 layer: eager promotes, and so does the compiled function."""
    model = Of(lambda m, x, r: [m.layer(x) * r, (m.layer(x + 1) + r).relu()], layer=nn.Linear(9, 9))
    compiled, x, r = compile_in(place, model), torch.randn(4, 9), torch.randn(4, 9).double()
    with torch.no_grad():
        for got, own in zip(compiled(x, r), model(x, r), strict=True):
            torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-6)
    assert_regions(compiled, ("linear", provider_at(place), 2, 2))


@pytest.mark.sampled(2)
@PARTS
@places()
def test_addends_that_lie_otherwise_in_memory(place: str, part: Callable[[], Any]) -> None:
    """Eager's sum may lie as the addend does, and a view of it may rely on that."""

    def spelled(m: Any, x: Tensor, r: Tensor) -> list[Tensor]:
        total = r + m.layer(x)
        return [
            functional.gelu(x.sum()),
            total.movedim(0, -1).view(-1) * 2,
            torch.relu(r + m.layer(x + 1)),
            torch.relu(m.layer(x + 2)) * r,
        ]

    region, layer, x, r = part()
    r = r.movedim(0, -1).contiguous().movedim(-1, 0)
    model = Of(spelled, layer=layer)
    compiled = compile_in(place, model)
    hold(compiled, model, x, r)
    assert_regions(compiled, (region, provider_at(place), 3, 3))


@places("O2 openmp")
def test_half_precision_chains(place: str) -> None:
    """The whole chain in float32, rounded once at its end."""
    for region, layer, x, r in (linear_part(), convolution_part()):
        model = Of(
            lambda m, x, r: [f(m, x + i, r) for i, f in enumerate(CHAINS.values())],
            layer=layer.half(),
        )
        compiled = compile_in(place, model)
        with no_cached_graphs():
            hold(compiled, model, x.half(), r.half())
        assert_regions(compiled, (region, "openmp", len(CHAINS), len(CHAINS)))
        assert absorbed(compiled, region) == set(CHAINS)
        torch._dynamo.reset()
