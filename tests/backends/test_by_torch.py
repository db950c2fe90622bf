"""Functions that Inductor computes number by number are torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from lowering import by_torch
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

special = torch.special
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "digamma": torch.digamma,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "i0": torch.i0,
    "polygamma": lambda x: torch.polygamma(1, x),
    "bessel_j0": special.bessel_j0,
    "bessel_j1": special.bessel_j1,
    "bessel_y0": special.bessel_y0,
    "bessel_y1": special.bessel_y1,
    "i0e": special.i0e,
    "i1": special.i1,
    "i1e": special.i1e,
    "modified_bessel_i0": special.modified_bessel_i0,
    "modified_bessel_i1": special.modified_bessel_i1,
    "modified_bessel_k0": special.modified_bessel_k0,
    "modified_bessel_k1": special.modified_bessel_k1,
    "ndtri": special.ndtri,
    "scaled_modified_bessel_k0": special.scaled_modified_bessel_k0,
    "scaled_modified_bessel_k1": special.scaled_modified_bessel_k1,
    "spherical_bessel_j0": special.spherical_bessel_j0,
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def each(x: Tensor) -> list[Tensor]:
    """Within a loop of generated code, as a graph has them."""
    return [function(x * 0.5) + 1 for function in FUNCTIONS.values()]


def numbers(*sizes: int) -> Tensor:
    x = torch.rand(sizes, dtype=torch.float64) * 1.8 + 0.1
    x.view(-1)[:5] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -3.0])
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_many_are_torchs(dtype: torch.dtype) -> None:
    x = numbers(40, 70).to(dtype)
    compiled = compile_at("O2", each)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, x)
        for one, own in zip(got, each(x), strict=True):
            torch.testing.assert_close(one, own, rtol=1e-14, atol=0, equal_nan=True)
    called = {name for name in by_torch.WHOLE.values() if str(name) in code}
    wanted = {by_torch.WHOLE[one] for one, dtypes in by_torch.FUNCTIONS.items() if dtype in dtypes}
    assert called == wanted - {torch.ops.kernel_dispatch.aten_erf_default_by_torch.default}
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_and_other_dtypes_are_generated(dtype: torch.dtype) -> None:
    x = numbers(4, 7) if dtype is torch.float32 else numbers(40, 70)
    x = x.nan_to_num(posinf=1).clamp(0.1, 0.9).to(dtype)

    def function(x: Tensor) -> Tensor:
        return torch.erfinv(x * 0.5) + torch.erfc(x)

    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, x)
    assert "by_torch" not in code
    assert_contract(got, function(x), function(x.double()), str(dtype))
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_bytes_are_moved(dtype: torch.dtype) -> None:
    x = torch.arange(120, dtype=dtype).repeat(40, 1)

    def function(x: Tensor) -> list[Tensor]:
        return [
            functional.pad(x, (1, 2, 3, 4), value=5),
            functional.pad(x, (-1, 2)),
            x.flip(-1) * 2,
        ]

    compiled = compile_at("O2", function)
    got, (code,) = run_and_get_code(compiled, x)
    for one, own in zip(got, function(x), strict=True):
        assert one.equal(own) and one.dtype is own.dtype
    assert code.count("constant_pad_nd_default_by_torch.default(") == 2
    assert code.count("rev_default_by_torch.default(") == 1
    assert_ran_as_planned(compiled, "O2")


def test_gradients_and_sizes_that_change() -> None:
    def function(x: Tensor) -> Tensor:
        return (torch.erfinv(torch.tanh(x)) * special.i1e(x) + torch.digamma(x + 3)).sum()

    compiled = compile_at("O2", function, dynamic=True)
    for rows in (60, 90):
        x, own = (numbers(rows, 50)[:, 5:].float().requires_grad_() for _ in range(2))
        own.data.copy_(x.data)
        with torch.no_grad():
            x[0, :5], own[0, :5] = 0.5, 0.5
        torch.testing.assert_close(compiled(x), function(own))
        compiled(x).backward()
        function(own).backward()
        torch.testing.assert_close(x.grad, own.grad)
    assert_ran_as_planned(compiled, "O2")
