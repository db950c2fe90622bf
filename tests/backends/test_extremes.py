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

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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


@DTYPES
@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_gradients(extreme: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return extreme(computed(x, y))

    compiled = compile_at("O2", function)
    x, y = torch.randn(50, 3, dtype=dtype), torch.randn(50, 3, dtype=dtype)
    try:
        own = gradient(function, x, y)
    except RuntimeError as error:  # aminmax has no derivative in older torches
        pytest.skip(str(error))
    got = gradient(compiled, x, y)
    allowed = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, own, rtol=allowed, atol=allowed * float(own.abs().max()))
    assert fallbacks_of(compiled) == []
    assert providers_of(compiled) == ["inductor"]


def gradient(run: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    run(leaf, y).float().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@DTYPES
@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED)
def test_comparisons(compare: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    compiled = compile_at("O2", lambda x, y: compare(computed(x, y)))
    x, y = torch.randn(50, 3, dtype=dtype), torch.randn(50, 3, dtype=dtype)
    got, own = compiled(x, y), compare(computed(x, y))
    assert got.any()
    if dtype is not torch.float32:  # rounded numbers are the same ones, so are those that tie
        return
    assert torch.equal(got, own)


def test_what_is_given_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.fx.Node] = []
    monkeypatch.setattr(overwritten, "read_copied", lambda graph, node: made.append(node))
    compile_at("O2", lambda x: (x == x.amax(), x.exp() == x.amax()))(torch.randn(50, 3))
    assert made == []
    compile_at("O2", lambda x: COMPARED["equal"](x.exp()))(torch.randn(50, 3))
    assert len(made) == 1
