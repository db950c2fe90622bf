"""The linear region: however it is spelled, whoever takes it; and what must not be taken."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowering.native import library
from lowering.providers import half_precision
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, mlp, weight
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    compile_in,
    hold,
    level_of,
    packed_count,
    places,
    provider_at,
    region_rows,
)
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def inputs(inner: int = 24) -> list[Tensor]:
    """With 1 to 4 dimensions, all of the same numbers of columns."""
    return [torch.randn(shape) for shape in [(inner,), (7, inner), (2, 5, inner), (2, 1, 3, inner)]]


@places()
def test_spellings(place: str) -> None:
    def spelled(m: Any, *xs: Tensor) -> list[Tensor]:
        found = [m.layer(x) for x in xs]
        found += [functional.linear(x, m.w) for x in xs]
        found += [functional.linear(x, m.w, m.b) for x in xs]
        found += [x @ m.w.t() + m.b for x in xs[1:]]
        found += [torch.matmul(x, m.w.T) for x in xs[1:]]
        found += [x @ m.w.mT for x in xs[1:]]
        found += [torch.addmm(m.b, xs[1], m.w.t()), torch.mm(xs[1], m.w.transpose(0, 1))]
        return found

    model = Of(spelled, layer=nn.Linear(24, 40), w=weight(40, 24), b=weight(40))
    compiled, xs = compile_in(place, model), inputs()
    for call in range(2):
        hold(compiled, model, *xs, where=f"call {call}")
    assert_regions(compiled, ("linear", provider_at(place), 23, 46))


@places()
def test_weights_stored_the_other_way_round(place: str) -> None:
    """As GPT-2 stores them; one weight may serve both ways, and a change shows in both."""

    def spelled(m: Any, x: Tensor) -> list[Tensor]:
        rows = x.view(-1, x.size(-1))
        return [
            torch.addmm(m.b, rows, m.w).view(*x.shape[:-1], 40),
            functional.gelu(x @ m.w + m.b),
            rows @ m.w,
            x @ m.square,
            functional.linear(x, m.square),
            rows @ m.strided,
        ]

    strided = nn.Parameter(torch.randn(40, 48)[:, ::2].t())
    model = Of(spelled, w=weight(24, 40), b=weight(40), square=weight(24, 24), strided=strided)
    compiled, x = compile_in(place, model), torch.randn(2, 5, 24)
    before = hold(compiled, model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = hold(compiled, model, x, where="changed")
    assert not any(map(torch.equal, before, after))
    assert_regions(compiled, ("linear", provider_at(place), 6, 12), besides="")


@places()
def test_numbers_of_other_spellings(place: str) -> None:
    """Whether they are taken or not."""

    def spelled(m: Any, x: Tensor, one: Tensor) -> list[Tensor]:
        return [
            torch.einsum("bsi,oi->bso", x, m.w),
            torch.einsum("bsi,oi->sbo", x, m.w),
            torch.tensordot(x, m.w, dims=([2], [1])),
            one @ m.w.t(),
            m.w @ one,
            m.w @ x[0].t(),
            x @ m.across + m.b,
            torch.addmm(m.b, x[0], m.w.t(), beta=0.5, alpha=2.0),
            torch.addmm(m.matrix, x[0], m.w.t()),
            torch.addmm(m.single, x[0], m.w.t()),
            functional.linear(x, m.w, m.single),
            torch.addmv(m.b, m.w, one),
            torch.baddbmm(m.matrix, x, m.w.t().expand(2, 24, 40)),
            functional.bilinear(x[0], x[1], m.three, m.b),
        ]

    model = Of(
        spelled, w=weight(40, 24), b=weight(40), single=weight(1), across=weight(24, 40),
        matrix=weight(5, 40), three=weight(40, 24, 24),
    )  # fmt: skip
    compiled = compile_in(place, model)
    hold(compiled, model, torch.randn(2, 5, 24), torch.randn(24))
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_weights_that_are_rounded_on_the_way(place: str) -> None:
    """What a cast loses is lost in the compiled function as well.

    At O2 conversions to a half precision and back are left out: Inductor takes them for nothing.
    """
    through = [torch.int8] if level_of(place) == "O2" else [torch.int8, torch.bfloat16, torch.half]

    def spelled(m: Any, x: Tensor, there: torch.dtype) -> list[Tensor]:
        found = [functional.linear(x, m.w.to(t).to(there), m.b.to(t).to(there)) for t in through]
        found += [functional.linear(x, m.whole.to(there)), functional.linear(x, m.mask.to(there))]
        return found

    whole = torch.randint(-9, 9, (32, 16), dtype=torch.int8)
    mask = torch.rand(32, 16) > 0.5
    wide = nn.Parameter(torch.randn(32, 16) * 9)
    model = Of(spelled, w=wide, b=weight(32), whole=whole, mask=mask)
    compiled, x = compile_in(place, model), torch.randn(6, 16)
    with torch.no_grad():
        reference = model(x.double(), torch.float64)
        assert_contract(compiled(x, torch.float32), model(x, torch.float32), reference, place)
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_what_is_not_taken(place: str) -> None:
    """Weights that are not kept from call to call are not packed."""

    def spelled(m: Any, x: Tensor, w: Tensor) -> list[Tensor]:
        return [
            functional.linear(x, w).relu(),
            functional.linear(x, w * 2, m.b),
            functional.linear(x, m.w * x.mean(), m.b),
            functional.linear(x, m.w[:16]),
            functional.linear(x, torch.cat([m.w, w])),
        ]

    model = Of(spelled, w=weight(32, 16), b=weight(32))
    compiled, before = compile_in(place, model), packed_count()
    for _ in range(2):
        hold(compiled, model, torch.randn(6, 16), torch.randn(32, 16))
    assert_regions(compiled)
    assert packed_count() == before


@places()
def test_parametrized_and_tied_weights(place: str) -> None:
    """What is computed from weights alone is a weight that stays, however small; one that is used
    twice is one."""
    from torch.nn.utils import parametrizations

    normed = parametrizations.weight_norm(nn.Linear(16, 16))
    spectral = parametrizations.spectral_norm(nn.Linear(16, 16))
    embedding = nn.Embedding(50, 16)
    model = Of(
        lambda m, i: functional.linear(m.spectral(m.normed(m.embedding(i))), m.embedding.weight),
        normed=normed, spectral=spectral, embedding=embedding,
    )  # fmt: skip
    compiled, words = compile_in(place, model), torch.randint(0, 50, (3, 7))
    before = hold(compiled, model, words)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert not torch.equal(before, hold(compiled, model, words, where="changed"))
    assert_regions(compiled, ("from_weights", "eager", 2, 4), ("linear", provider_at(place), 3, 6))


@places()
def test_a_weight_that_is_written_in_the_graph(place: str) -> None:
    def spelled(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        first = functional.linear(x, m.w)
        m.w[7].add_(1)
        second = functional.linear(x, m.w)
        m.other.mul_(0.5)
        return first, second, functional.linear(x, m.other)

    model = Of(spelled, w=torch.randn(32, 16), other=torch.randn(32, 16))
    twin = copy.deepcopy(model)
    compiled = compile_in(place, model)
    with torch.no_grad():
        for call in range(3):
            x = torch.randn(6, 16)
            wide = copy.deepcopy(twin).double()(x.double())
            assert_contract(compiled(x), twin(x), wide, f"call {call}")
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_dynamic_sizes(place: str) -> None:
    model = Of(
        lambda m, x: m.b(functional.gelu(m.a(x))) + x, a=nn.Linear(32, 64), b=nn.Linear(64, 32)
    )
    compiled = compile_in(place, model, dynamic=True)
    for batch, length in [(2, 9), (3, 33), (5, 2), (7, 100)]:
        hold(compiled, model, torch.randn(batch, length, 32), where=f"{batch} x {length}")
    assert_regions(compiled, ("linear", provider_at(place), 2, 8))


@places("O2 mkldnn", "O2 openmp")
def test_sizes_marked_as_dynamic(place: str) -> None:
    """Including no rows and one; guards keep a graph for them of its own."""
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU()).eval()
    compiled = compile_in(place, model)
    for rows in (8, 9, 64, 1, 0):
        x = torch.randn(rows, 32)
        if rows > 1:
            torch._dynamo.mark_dynamic(x, 0)
        hold(compiled, model, x, where=f"{rows} rows")
    provider = provider_at(place)
    runs = sum(row[3] for row in region_rows(compiled) if row[:2] == ("linear", provider))
    assert runs == 4, region_rows(compiled)  # without rows there is nothing to compute
    assert region_rows(compiled)[0] == ("linear", provider, 1, 3)
    assert_ran_as_planned(compiled, "O2")


@places()
def test_strided_and_empty_inputs(place: str) -> None:
    def spelled(m: Any, *xs: Tensor) -> list[Tensor]:
        return [m.layer(x) for x in xs]

    model = Of(spelled, layer=nn.Linear(24, 17))
    xs = [
        torch.randn(24, 9).t(),
        torch.randn(9, 48)[:, ::2],
        torch.randn(5, 3, 24).transpose(0, 1),
        torch.randn(3, 24, 5).mT,
        torch.randn(24).expand(6, 24),
        torch.randn(10, 30)[::2, 3:27],
        torch.randn(0, 24),
        torch.randn(2, 0, 24),
    ]
    compiled = compile_in(place, model)
    hold(compiled, model, *xs)
    assert not [row for row in region_rows(compiled) if row[0] == "linear" and row[3] < 6 and
                row[1] == provider_at(place)]  # fmt: skip
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_extreme_layers(place: str) -> None:
    """Without inputs, without outputs, with one of each."""
    with pytest.warns(UserWarning, match="zero-element"):
        layers = nn.ModuleList([nn.Linear(0, 5), nn.Linear(5, 0), nn.Linear(1, 1)])
    model = Of(lambda m, *xs: [f(x) for f, x in zip(m.layers, xs, strict=True)], layers=layers)
    compiled = compile_in(place, model)
    hold(compiled, model, torch.randn(4, 0), torch.randn(4, 5), torch.randn(1, 1))
    assert_ran_as_planned(compiled, level_of(place))


# --- half precision -------------------------------------------------------------------------------

# Where the CPU does not multiply a half precision, it is computed in float32, from weights of that
# dtype.
HALVES = [
    (place, dtype)
    for place in ("O1 mkldnn", "O2 mkldnn", "O2 openmp")
    for dtype in (torch.bfloat16, torch.float16)
]


def widens(place: str, dtype: torch.dtype) -> bool:
    if provider_at(place) == "openmp":
        return not library.multiplies(dtype)
    return half_precision.is_widened(dtype)


def needs(place: str, dtype: torch.dtype) -> None:
    if widens(place, dtype) or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    pytest.skip("oneDNN has no bfloat16 on this processor")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "dtype"), HALVES, ids=str)
def test_half_precision_models(place: str, dtype: torch.dtype) -> None:
    needs(place, dtype)
    model, x = mlp().to(dtype), torch.randn(20, 64).to(dtype)
    compiled = compile_in(place, model)
    for _ in range(2):
        hold(compiled, model, x)
    assert_regions(compiled, ("linear", provider_at(place), 2, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "dtype"), HALVES, ids=str)
def test_autocast(place: str, dtype: torch.dtype) -> None:
    """The weight stays float32; what is kept packed is its other form, and it stays fresh."""
    needs(place, dtype)
    model, x = mlp(), torch.randn(20, 64)
    compiled = compile_in(place, model)
    wide = copy.deepcopy(model).double()
    for call in range(2):
        with torch.no_grad():
            reference = copy.deepcopy(model).double()(x.double())
            with torch.autocast("cpu", dtype):
                assert_contract(compiled(x), model(x), reference, f"call {call}")
            model[0].weight.mul_(-1)
    assert not torch.equal(reference, wide(x.double()))
    assert_regions(compiled, ("linear", provider_at(place), 2, 4))


# --- who may be taken, and what is left as it was -------------------------------------------------


@places()
def test_inference_mode(place: str) -> None:
    """Weights with a version counter, and weights made in inference mode, which have none, and
    which nobody packs."""
    model, x = mlp(), torch.randn(20, 64)
    compiled = compile_in(place, model)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        loaded = copy.deepcopy(model)
        other = compile_in(place, loaded)
        torch.testing.assert_close(other(x), loaded(x))
        loaded[0].weight[3:4].mul_(3)
        torch.testing.assert_close(other(x), loaded(x))
    provider = provider_at(place)
    assert_regions(compiled, ("linear", provider, 2, 4))
    assert_regions(other)


@places()
def test_training_graphs_are_not_touched(place: str) -> None:
    model = mlp().train()
    twin, x = copy.deepcopy(model), torch.randn(20, 64)
    compiled = compile_in(place, model)
    compiled(x).sum().backward()
    twin(x).sum().backward()
    for got, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, eager.grad)
    assert_regions(compiled)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_where_no_row_applies(level: str) -> None:
    """Not at O0, not for other dtypes, not when everyone is disabled."""
    nobody = {"disable": ["mkldnn", "openmp", *_present("mkl", "nnpack", "ipex")]}
    cases = [
        (mlp().double(), torch.randn(20, 64).double(), {}),
        (mlp(), torch.randn(20, 64), nobody),
    ]
    if level == "O0":
        cases = [(mlp(), torch.randn(20, 64), {})]
    for model, x, options in cases:
        compiled = compile_at(level, model, options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert not [row for row in region_rows(compiled) if row[0] == "linear"]


def _present(*names: str) -> list[str]:
    from lowering import providers

    return sorted(set(names) & set(providers.names()))


@places()
def test_written_inputs(place: str) -> None:
    def spelled(m: Any, x: Tensor, cache: Tensor) -> Tensor:
        m.calls.add_(1)
        x.add_(1)
        y = m.layer(x)
        cache.copy_(y)
        x.mul_(2)
        return cache * 2

    model = Of(spelled, layer=nn.Linear(32, 16), calls=torch.zeros(()))
    compiled = compile_in(place, model)
    with torch.no_grad():
        for call in range(3):
            cache, x = torch.zeros(20, 16), torch.randn(20, 32)
            expected, written = model.layer(x + 1), (x + 1) * 2
            got = compiled(x, cache)
            torch.testing.assert_close(cache, expected)
            torch.testing.assert_close(got, expected * 2)
            torch.testing.assert_close(x, written)
            assert int(model.calls) == call + 1
    assert_regions(compiled, ("linear", provider_at(place), 1, 3))


@places()
def test_calls_from_two_threads(place: str) -> None:
    """Each thread's calls are counted, and none sees another's numbers."""
    from concurrent.futures import ThreadPoolExecutor

    model = mlp()
    compiled, xs = compile_in(place, model), [torch.randn(20, 64) for _ in range(4)]
    hold(compiled, model, xs[0])

    def call(index: int) -> Tensor:
        with torch.no_grad():
            return compiled(xs[index % 4])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(call, range(40)))
    with torch.no_grad():
        for index, got in enumerate(found):
            torch.testing.assert_close(got, model(xs[index % 4]))
    assert_regions(compiled, ("linear", provider_at(place), 2, 82))


@places()
def test_equal_layers_keep_their_own_weights(place: str) -> None:
    """Two models with one compiled graph between them (a cache hit)."""
    first, second, x = mlp(), mlp(), torch.randn(20, 64)
    one, two = compile_in(place, first), compile_in(place, second)
    a, b = hold(one, first, x), hold(two, second, x)
    assert not torch.equal(a, b)
    assert torch.equal(a, hold(one, first, x))
    assert {row[1] for row in region_rows(two) if row[0] == "linear"} == {provider_at(place)}


def test_the_first_of_several_providers_takes_it() -> None:
    """By priority, and the next where one is disabled."""
    model, x = mlp(), torch.randn(20, 64)
    for disabled, taken in [([], "openmp"), (["openmp"], None), (["mkldnn"], "openmp")]:
        compiled = compile_at("O2", model, options={"disable": disabled})
        hold(compiled, model, x)
        providers = {row[1] for row in region_rows(compiled) if row[0] == "linear"}
        assert len(providers) == 1
        assert taken is None or providers == {taken}
        assert not providers & set(disabled)
