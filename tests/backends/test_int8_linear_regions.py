"""Linear layers with weights of bytes: every spelling is taken, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowering.native import library
from tests.support import torchao
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    kernels,
    no_cached_graphs,
    region_rows,
)
from tests.support.reports import graph_reports

Tensor = torch.Tensor
HALVES = (torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    kernels()


class Quantised(nn.Module):
    """A linear layer with a weight of bytes and a scale for each output."""

    def __init__(self, inputs: int, outputs: int, spelling: str, dtype: torch.dtype) -> None:
        super().__init__()
        full = torch.randn(outputs, inputs) / inputs**0.5
        scale = full.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (full / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(dtype))
        self.register_buffer("turned", self.weight.t().contiguous())
        self.bias = nn.Parameter(torch.randn(outputs).to(dtype))
        self.register_buffer("wide_bias", self.bias.detach().float() * 1.001)
        self.compute = SPELLINGS[spelling]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def _rows_of_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def _of_bytes(layer: Quantised, x: Tensor) -> Tensor:
    whole, of_rows = _rows_of_bytes(x)
    flat = whole.reshape(-1, x.shape[-1])
    sums = torch._int_mm(flat, layer.weight.t()).reshape(*x.shape[:-1], -1)
    return (sums.float() * of_rows * layer.scale.view(-1)).to(x.dtype) + layer.bias


def _of_bytes_stored_turned(layer: Quantised, x: Tensor) -> Tensor:
    """Scaled by outputs first, in the matrix's own rank, with the bias in floats."""
    whole, of_rows = _rows_of_bytes(x.reshape(-1, x.shape[-1]))
    sums = torch._int_mm(whole, layer.turned).float() * layer.scale.float().t()
    result = sums * of_rows + layer.bias.float()
    return result.to(x.dtype).reshape(*x.shape[:-1], -1)


def _scaled_behind(layer: Quantised, x: Tensor) -> Tensor:
    return x @ layer.weight.to(x.dtype).t() * layer.scale.view(-1) + layer.bias


def _converted_behind_the_transpose(layer: Quantised, x: Tensor) -> Tensor:
    return x @ layer.weight.t().to(x.dtype) * layer.scale.view(-1) + layer.bias


def _stored_turned(layer: Quantised, x: Tensor) -> Tensor:
    return x @ layer.turned.to(x.dtype) * layer.scale.view(-1) + layer.bias


def _turned_and_scaled_before(layer: Quantised, x: Tensor) -> Tensor:
    return x @ (layer.turned.to(x.dtype) * layer.scale.view(-1)) + layer.bias


def _scaled_before(layer: Quantised, x: Tensor) -> Tensor:
    return functional.linear(x, layer.scale * layer.weight.to(x.dtype), layer.bias)


def _torchs_own(layer: Quantised, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    product = torch.ops.aten._weight_int8pack_mm(flat, layer.weight, layer.scale.view(-1))
    return product.reshape(*x.shape[:-1], -1) + layer.bias


def _bias_in_floats(layer: Quantised, x: Tensor) -> Tensor:
    """Of which a large one would hide that it was rounded."""
    product = (x @ layer.weight.to(x.dtype).t()).float() * layer.scale.view(-1)
    return (product + layer.wide_bias).to(x.dtype)


def _of_bytes_with_a_bias_in_floats(layer: Quantised, x: Tensor) -> Tensor:
    whole, of_rows = _rows_of_bytes(x)
    sums = torch._int_mm(whole.reshape(-1, x.shape[-1]), layer.weight.t())
    product = sums * of_rows.view(-1, 1) * layer.scale.view(1, -1)
    return (product + layer.wide_bias).to(x.dtype).reshape(*x.shape[:-1], -1)


SPELLINGS: dict[str, Callable[[Quantised, Tensor], Tensor]] = {
    one.__name__.strip("_"): one
    for one in (
        _of_bytes,
        _of_bytes_stored_turned,
        _scaled_behind,
        _converted_behind_the_transpose,
        _stored_turned,
        _turned_and_scaled_before,
        _scaled_before,
        _torchs_own,
        _bias_in_floats,
        _of_bytes_with_a_bias_in_floats,
    )
}
# Large enough that their floats are not kept: what is widened ahead is no larger than a megabyte.
SIZES = (1024, 512)


def _layer(spelling: str, dtype: torch.dtype) -> Quantised:
    return Quantised(*SIZES, spelling, dtype).eval()


def _exact(layer: Quantised, x: Tensor) -> Tensor:
    """In float64, of the bytes that the rows become, where they do."""
    wide = "in_floats" in layer.compute.__name__
    bias = (layer.wide_bias if wide else layer.bias).double()
    scale = layer.scale.double().view(-1)
    factor: Any = 1.0
    rows = x.double()
    if "of_bytes" in layer.compute.__name__:
        whole, of_rows = _rows_of_bytes(x)
        rows, factor = whole.double(), of_rows.double()
    return rows @ layer.weight.double().t() * factor * scale + bias


@pytest.mark.quick
@DTYPES
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, dtype: torch.dtype) -> None:
    if spelling == "torchs_own" and dtype is torch.float16:
        pytest.skip("torch has none of float16")
    layer = _layer(spelling, dtype)
    compiled = compile_in("O2 openmp", layer, dynamic=False)
    with torch.no_grad():
        for shape in ((3, SIZES[0]), (2, 5, SIZES[0]), (1, 1, SIZES[0])):
            x = torch.randn(shape).to(dtype)
            got, own = compiled(x), layer(x)
            assert got.stride() == own.stride()
            assert_contract(got, own, _exact(layer, x), f"{spelling} {shape}")
    assert_regions(compiled, *[("int8_linear", "openmp", 1, 1)] * 3)


@DTYPES
def test_what_follows_is_computed_in_the_same_pass(dtype: torch.dtype) -> None:
    layer = _layer("scaled_behind", dtype)

    def block(x: Tensor, other: Tensor) -> Tensor:
        return functional.silu(layer(x)) * other + other

    compiled = compile_in("O2 openmp", block)
    with torch.no_grad(), no_cached_graphs():
        x, other = torch.randn(7, SIZES[0]).to(dtype), torch.randn(7, SIZES[1]).to(dtype)
        got, own = compiled(x, other), block(x, other)
        exact = functional.silu(_exact(layer, x)) * other.double() + other.double()
        assert_contract(got, own, exact, "block")
    assert_regions(compiled, ("int8_linear", "openmp", 1, 1))
    assert details(compiled, "int8_linear") == ["with silu+mul+add"]


def test_halves_that_the_cpu_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed in floats, with what is beside them."""
    monkeypatch.setattr(library, "multiplies", lambda dtype: False)
    layer = _layer("scaled_behind", torch.bfloat16)
    compiled = compile_in("O2 openmp", lambda x, other: functional.relu(layer(x)) + other)
    with torch.no_grad(), no_cached_graphs():
        for rows in (3, 20):
            x, other = (torch.randn(rows, size).bfloat16() for size in SIZES)
            exact = functional.relu(_exact(layer, x)) + other.double()
            own = functional.relu(layer(x)) + other
            assert_contract(compiled(x, other), own, exact, f"{rows} rows")
    assert details(compiled, "int8_linear")[0] == "with relu+add"


def test_a_number_of_rows_that_depends_on_the_data() -> None:
    layer = _layer("scaled_behind", torch.float32)

    def function(x: Tensor, other: Tensor, which: Tensor) -> Tensor:
        return layer(x[which]) + other[which]

    compiled = compile_in("O2 openmp", function, dynamic=True)
    x, other = (torch.randn(20, size) for size in SIZES)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        for which in (torch.arange(20) % 3 == 0, torch.arange(20) == 4):
            exact = _exact(layer, x[which]) + other[which].double()
            got, own = compiled(x, other, which), function(x, other, which)
            assert_contract(got, own, exact, "rows")
    assert [row[:3] for row in region_rows(compiled)] == [("int8_linear", "openmp", 1)]


def test_autocast() -> None:
    """Converts the floats that the bytes became once more."""
    layer = _layer("scaled_behind", torch.float32)
    compiled = compile_in("O2 openmp", layer)
    x = torch.randn(20, SIZES[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, own = compiled(x), layer(x)
    assert got.dtype is own.dtype
    assert_contract(got, own, _exact(layer, x.bfloat16()), "autocast")
    assert_regions(compiled, ("int8_linear", "openmp", 1, 1))


def test_sizes_that_change() -> None:
    layer = _layer("of_bytes", torch.float32)
    compiled = compile_in("O2 openmp", layer, dynamic=True)
    with torch.no_grad():
        for rows in (2, 9, 33):
            x = torch.randn(rows, 3, SIZES[0])
            assert_contract(compiled(x), layer(x), _exact(layer, x), f"{rows} rows")
    assert_regions(compiled, ("int8_linear", "openmp", 1, 3))


def test_a_weight_that_changes() -> None:
    layer = _layer("scaled_behind", torch.float32)
    compiled = compile_in("O2 openmp", layer)
    x = torch.randn(4, SIZES[0])
    with torch.no_grad():
        for _ in range(3):
            assert_contract(compiled(x), layer(x), _exact(layer, x), "layer")
            layer.weight.copy_(layer.weight.roll(1, 0))
            layer.scale.mul_(1.5)
    assert_regions(compiled, ("int8_linear", "openmp", 1, 3))


def test_the_report_tells_what_became_of_the_weight() -> None:
    with no_cached_graphs(), torch.no_grad():
        compiled = compile_in("O2 openmp", _layer("scaled_behind", torch.float32))
        compiled(torch.randn(4, SIZES[0]))
    rows = [row for graph in graph_reports(compiled) for row in graph.as_dict()["regions"]]
    (region,) = [row for row in rows if row["region"] == "int8_linear"]
    assert region["recipes"] == ["prepack"]
    assert region["packed_bytes"] == SIZES[0] * SIZES[1]


# --- what must not be taken -----------------------------------------------------------------------


def _a_scale_for_each_input(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scale.view(1, -1)).t()


def _a_scale_for_each_number(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * (scale.view(1, -1) + scale.view(-1, 1))).t()


def _integers_are_used_as_such(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch._int_mm((x * 9).to(torch.int8), weight.t()).relu()


def _a_weight_that_is_computed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight + (x[0, 0] > 9)).to(torch.int8).to(x.dtype).t()


@pytest.mark.parametrize(
    "function",
    [
        _a_scale_for_each_input,
        _a_scale_for_each_number,
        _integers_are_used_as_such,
        _a_weight_that_is_computed,
    ],
)
def test_what_is_something_else(function: Callable[..., Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = 640  # as many inputs as outputs, which hides who a scale is for
            bytes_ = torch.randint(-128, 128, (size, size), dtype=torch.int8)
            self.register_buffer("weight", bytes_)
            self.register_buffer("scale", torch.rand(size))

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight, self.scale)

    model, x = Model(), torch.randn(4, 640)
    compiled = compile_in("O2 openmp", model)
    exact = function(x.double(), model.weight, model.scale.double())
    with torch.no_grad():
        assert_contract(compiled(x), model(x), exact, function.__name__)
    assert "int8_linear" not in [row[0] for row in region_rows(compiled)]


def test_an_intermediate_value_that_is_read_elsewhere() -> None:
    """The region ends before it."""
    layer = _layer("scaled_behind", torch.float32)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ layer.weight.to(x.dtype).t()
        return product, product * layer.scale.view(-1) + layer.bias

    compiled = compile_in("O2 openmp", function)
    with torch.no_grad():
        x = torch.randn(4, SIZES[0])
        (one, other), (own, others) = compiled(x), function(x)
        assert_contract(one, own, x.double() @ layer.weight.double().t(), "product")
        assert_contract(other, others, _exact(layer, x), "layer")
    assert_regions(compiled, ("int8_linear", "openmp", 1, 1))


# --- models that were quantised by torchao --------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(256), nn.Linear(256, 1024)
        self.gate, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


@pytest.fixture
def quantization(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torchao.module("quantization", monkeypatch)


CONFIGS = ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_quantised_by_torchao(quantization: Any, config: str, dtype: torch.dtype) -> None:
    """Near a tie, a difference in the last bit of a float makes another byte of it. So what comes
    out is compared with the layers before they were quantised."""
    model = nn.Sequential(Block(), Block()).eval().to(dtype)
    full = copy.deepcopy(model).double()
    quantization.quantize_(model, getattr(quantization, config)())
    compiled = compile_in("O2 openmp", model, dynamic=False)
    with torch.no_grad():
        for shape in ((1, 1, 256), (1, 7, 256), (3, 40, 256)):
            x = torch.randn(shape).to(dtype)
            got, own, exact = compiled(x).double(), model(x).double(), full(x.double())
            error, eagers = got - exact, own - exact
            assert error.norm() <= 1.2 * eagers.norm(), (shape, error.norm(), eagers.norm())
            assert (got - own).norm() <= 1.5 * eagers.norm()
    assert_regions(compiled, *[("int8_linear", "openmp", 6, 6)] * 3)
