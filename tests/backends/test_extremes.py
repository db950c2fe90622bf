"""What is compared with its own largest or smallest number is found, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lowering import overwritten
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import no_cached_graphs
from tests.support.reports import fallbacks_of, providers_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda z: z.amax(),
    "amax of rows": lambda z: z.amax(-1, keepdim=True),
    "amin of columns": lambda z: torch.amin(z, 0),
    "max": lambda z: z.max(),
    "min": lambda z: torch.min(z),
    "aminmax": lambda z: torch.stack([*torch.aminmax(z)]),
    "softmax by hand": lambda z: (z - z.amax(-1, keepdim=True)).exp(),
}
COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": lambda z: z == z.amax(-1, keepdim=True),
    "not smaller": lambda z: z >= z.max(),
    "the other way round": lambda z: z.amin(0) == z,
    "without the dimension": lambda z: z.eq(z.amax(1).unsqueeze(1)),
    "along a dimension": lambda z: z == z.max(-1, keepdim=True)[0],
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def computed(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).exp() + (x * y).tanh()  # the end of a line goes by other functions


Numbers = dict[torch.dtype, Tensor]


def numbers() -> tuple[Numbers, Numbers]:
    """Of each dtype those after one seed: where a gradient cancels, a loop's error is larger."""
    xs, ys = Numbers(), Numbers()
    for dtype in DTYPES:
        torch.manual_seed(0)
        xs[dtype], ys[dtype] = (torch.randn(50, 3, dtype=dtype) for _ in range(2))
    return xs, ys


def of_each(function: Callable[[Tensor], Tensor]) -> Callable[[Numbers, Numbers], list[Tensor]]:
    """Of numbers of every dtype, in one graph."""
    return lambda xs, ys: [function(computed(xs[dtype], ys[dtype])) for dtype in DTYPES]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_gradients(extreme: Callable[[Tensor], Tensor]) -> None:
    function = of_each(extreme)
    compiled = compile_at("O2", function)
    xs, ys = numbers()
    try:
        owns = gradients(function, xs, ys)
    except RuntimeError as error:  # aminmax has no derivative in older torches
        pytest.skip(str(error))
    for dtype, got, own in zip(DTYPES, gradients(compiled, xs, ys), owns, strict=True):
        assert got.dtype is dtype
        allowed = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, own, rtol=allowed, atol=allowed * float(own.abs().max()))
    assert fallbacks_of(compiled) == []
    assert providers_of(compiled) == ["inductor"]


def gradients(run: Callable[..., list[Tensor]], xs: Numbers, ys: Numbers) -> list[Tensor]:
    leaves = {dtype: x.clone().requires_grad_() for dtype, x in xs.items()}
    results = run(leaves, ys)
    torch.autograd.backward([one.float().sum() for one in results])
    return [leaf.grad for leaf in leaves.values()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED)
def test_comparisons(compare: Callable[[Tensor], Tensor]) -> None:
    function, given = of_each(compare), numbers()
    got, own = compile_at("O2", function)(*given), function(*given)
    for dtype, found in zip(DTYPES, got, strict=True):
        assert found.any(), dtype
    # Rounded numbers of other dtypes are the same ones, so are those that tie.
    assert torch.equal(got[DTYPES.index(torch.float32)], own[DTYPES.index(torch.float32)])


def test_what_is_given_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.fx.Node] = []
    monkeypatch.setattr(overwritten, "read_copied", lambda graph, node: made.append(node))
    compile_at("O2", lambda x: (x == x.amax(), x.exp() == x.amax()))(torch.randn(50, 3))
    assert made == []
    compile_at("O2", lambda x: COMPARED["equal"](x.exp()))(torch.randn(50, 3))
    assert len(made) == 1
