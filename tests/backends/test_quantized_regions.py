"""Layers between bytes, as `convert_pt2e` writes them: taken whole, with exact sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import nn
from torch.nn import functional

from lowering import machine
from lowering.providers import mkldnn_quantized
from lowering.regions import quantized
from tests.support import torchao
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    kernels,
    no_cached_graphs,
    places,
    provider_at,
    region_rows,
)

Tensor = torch.Tensor
LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    kernels()


needs_vnni = pytest.mark.skipif(
    machine.cpu().isa.isdisjoint({"avx512_vnni", "avx_vnni"}),
    reason="without VNNI such layers stay floats",
)


class Grid:
    """Writes floats as bytes and reads them; in double precision by the formula."""

    def __init__(self, step: float, zero: int, dtype: torch.dtype = torch.uint8) -> None:
        self.step, self.zero, self.dtype = step, zero, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self.read(self.write(x), x.dtype)

    def write(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            return (x / self.step).round().add(self.zero).clamp(*LIMITS[self.dtype]).to(self.dtype)
        ops = torch.ops.quantized_decomposed
        return ops.quantize_per_tensor(x, self.step, self.zero, *LIMITS[self.dtype], self.dtype)

    def read(self, numbers: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype is torch.float64:
            return (numbers.double() - self.zero) * self.step
        ops, here = torch.ops.quantized_decomposed, (self.step, self.zero)
        return ops.dequantize_per_tensor(numbers, *here, *LIMITS[self.dtype], self.dtype)


class Layer(nn.Module):
    """A convolution or a linear layer of floats that its weight's bytes become in every call."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dims: int, **how: Any) -> None:
        super().__init__()
        self.dims, self.one_step = dims, how.pop("one_step", False)
        self.how = {"padding": kernel // 2} | how if dims else {}
        shape = (outputs, inputs // how.get("groups", 1), *[kernel] * dims)
        self.register_buffer("weight", torch.randint(-127, 128, shape, dtype=torch.int8))
        steps = torch.rand(outputs) * 0.01 + 0.002
        self.register_buffer("steps", steps[:1] if self.one_step else steps)
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        run = getattr(functional, f"conv{self.dims}d") if self.dims else functional.linear
        return run(x, self.read(x.dtype), self.bias.to(x.dtype), **self.how)

    def read(self, dtype: torch.dtype) -> Tensor:
        by_output = (-1, *[1] * (self.weight.dim() - 1))
        if dtype is torch.float64:
            zeros = self.zeros.reshape(by_output)
            return (self.weight.double() - zeros) * self.steps.double().reshape(by_output)
        ops, limits = torch.ops.quantized_decomposed, (-128, 127, torch.int8)
        if self.one_step:
            return ops.dequantize_per_tensor(self.weight, STEP, 0, *limits)
        return ops.dequantize_per_channel(self.weight, self.steps, self.zeros, 0, *limits)


STEP = 0.004
IN, OUT, OTHER = Grid(0.02, 121), Grid(0.11, 130), Grid(0.07, 99)


def assert_bytes(got: Tensor, exact: Tensor, grid: Grid) -> None:
    """Of the grid, `exact` being numbers in double precision: another byte only near a tie."""
    where = exact / grid.step
    wanted = grid.write(exact).double()
    tie = ((where - where.floor()) - 0.5).abs() < 1e-3
    assert got.dtype is grid.dtype
    assert (got.double() - wanted).abs().max() <= 1
    assert torch.equal(got.double()[~tie], wanted[~tie])
    assert tie.double().mean() < 0.05
    assert got.unique().numel() > 8  # the grid fits the numbers


ACTIVATIONS = {
    "": lambda x: x,
    "relu": functional.relu,
    "clamp": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: Layer(48, 40, 1, 0), (2, 7, 48)),
    "linear of a matrix": (lambda: Layer(48, 40, 1, 0), (7, 48)),
    "pointwise": (lambda: Layer(48, 40, 1, 2), (2, 48, 9, 9)),
    "3x3": (lambda: Layer(16, 24, 3, 2), (2, 16, 9, 10)),
    "3x3 with stride": (lambda: Layer(16, 24, 3, 2, stride=2), (2, 16, 9, 10)),
    "dilated": (lambda: Layer(16, 24, 3, 2, padding=2, dilation=2), (2, 16, 9, 10)),
    "groups": (lambda: Layer(16, 24, 3, 2, groups=4), (2, 16, 9, 10)),
    "depthwise": (lambda: Layer(24, 24, 3, 2, groups=24), (2, 24, 9, 10)),
    "first": (lambda: Layer(3, 24, 7, 2, stride=2), (1, 3, 30, 30)),
    "lines": (lambda: Layer(16, 24, 3, 1), (2, 16, 30)),
    "volumes": (lambda: Layer(8, 12, 3, 3), (1, 8, 5, 6, 7)),
}


OURS = (
    "linear",
    "linear of a matrix",
    "pointwise",
    "3x3",
    "3x3 with stride",
    "dilated",
    "depthwise",
    "first",
)


def region_of(layer: Layer) -> str:
    return "quantized_convolution" if layer.dims else "quantized_linear"


def taken_once(compiled: Any, layer: Layer, *steps: str, by: str = "mkldnn") -> None:
    assert_regions(compiled, (region_of(layer), by, 1, 1))
    joined = "+".join(filter(None, steps))
    assert details(compiled, region_of(layer)) == ["with " + joined if joined else ""]


def drawn(layer: Layer, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape)
    return x.to(memory_format=torch.channels_last) if layer.dims == 2 else x


@needs_vnni
@pytest.mark.quick
@places()
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, place: str) -> None:
    if place == "O2 openmp" and name not in OURS:
        pytest.skip("not for the kernels of ours")
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)

    def model(x: Tensor) -> Tensor:
        return OUT.write(functional.relu(layer(IN(x))))

    compiled = compile_in(place, model)
    with torch.no_grad(), no_cached_graphs():
        got = compiled(x)
        exact = functional.relu(layer(IN(x.double())))
    assert got.stride() == model(x).stride()
    assert_bytes(got, exact, OUT)
    if name == "volumes":  # of which oneDNN computes no activation
        taken_once(compiled, layer)
    else:
        taken_once(compiled, layer, "relu", "quantize", by=provider_at(place))


@pytest.mark.sampled(3)
@needs_vnni
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["linear", "linear of ours", "pointwise", "3x3", "3x3 of ours"])
def test_kinds_of_bytes_and_activations(name: str, activation: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name.removesuffix(" of ours")]
    place = "O2 openmp" if name.endswith("ours") else "O1 mkldnn"
    layer, act = make(), ACTIVATIONS[activation]
    if dtype is torch.int8 and "mkldnn" in place and not mkldnn_quantized._has_signed_results():
        pytest.skip("oneDNN's operators of this torch have no bytes with a sign")
    zero = 121 if dtype is torch.uint8 else -7
    before, after = Grid(0.02, zero, dtype), Grid(0.1, zero, dtype)
    x = drawn(layer, shape)
    compiled = compile_in(place, lambda x: after.write(act(layer(before(x)))))
    with torch.no_grad(), no_cached_graphs():
        assert_bytes(compiled(x), act(layer(before(x.double()))), after)
    taken_once(compiled, layer, activation, "quantize", by=provider_at(place))


@needs_vnni
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["linear", "pointwise", "depthwise"])
@places("O2 mkldnn", "O2 openmp")
def test_bytes_that_are_added(name: str, relu: bool, place: str) -> None:
    """They are not written into: the caller's are as they were."""
    make, shape = LAYERS[name]
    layer = make()
    x = drawn(layer, shape)
    other = OTHER.write(torch.randn_like(layer(x)) * 5)
    given = other.clone()
    act = functional.relu if relu else lambda x: x
    compiled = compile_in(place, lambda x, y: OUT.write(act(OTHER.read(y) + layer(IN(x)))))
    with torch.no_grad(), no_cached_graphs():
        got = compiled(x, other)
        exact = act(OTHER.read(other, torch.float64) + layer(IN(x.double())))
    assert_bytes(got, exact, OUT)
    assert torch.equal(other, given)
    steps = ("add", "relu" if relu else "", "quantize")
    taken_once(compiled, layer, *steps, by=provider_at(place))


@needs_vnni
@pytest.mark.parametrize("name", ["linear", "pointwise", "depthwise"])
@places("O2 mkldnn", "O2 openmp")
def test_results_that_stay_floats(name: str, place: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    x, other = drawn(layer, shape), torch.randn_like(layer(drawn(layer, shape)))
    compiled = compile_in(place, lambda x, y: functional.relu(layer(IN(x)) + y) * 2)
    with torch.no_grad(), no_cached_graphs():
        got, exact = compiled(x, other), functional.relu(layer(IN(x.double())) + other.double()) * 2
    assert got.dtype is torch.float32
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()
    taken_once(compiled, layer, "add", "relu", by=provider_at(place))


@needs_vnni
def test_floats_that_become_bytes_with_what_is_added() -> None:
    """oneDNN's convolutions add onto bytes of their own kind only, its linear layers floats too."""
    for name, steps in (("linear", "add+relu+quantize"), ("pointwise", "add+relu")):
        make, shape = LAYERS[name]
        layer = make()
        x, other = drawn(layer, shape), torch.randn_like(layer(drawn(layer, shape)))
        compiled = compile_in(
            "O2 mkldnn", lambda x, y, layer=layer: OUT.write(functional.relu(layer(IN(x)) + y))
        )
        with torch.no_grad(), no_cached_graphs():
            exact = functional.relu(layer(IN(x.double())) + other.double())
            assert_bytes(compiled(x, other), exact, OUT)
        assert_regions(compiled, (region_of(layer), "mkldnn", 1, 1))
        assert details(compiled, region_of(layer)) == ["with " + steps]


@needs_vnni
def test_a_step_for_the_whole_weight() -> None:
    for name in ("linear", "3x3"):
        make, shape = LAYERS[name]
        layer = make()
        layer.one_step, layer.steps = True, torch.tensor([STEP])
        x = drawn(layer, shape)
        compiled = compile_in("O1 mkldnn", lambda x, layer=layer: OUT.write(layer(IN(x))))
        with torch.no_grad(), no_cached_graphs():
            assert_bytes(compiled(x), layer(IN(x.double())), OUT)
        taken_once(compiled, layer, "quantize")


@needs_vnni
@places("O2 mkldnn", "O2 openmp")
@pytest.mark.parametrize(("name", "regions"), [("linear", 1), ("pointwise", 0)])
def test_grids_that_are_found_in_each_call(name: str, regions: int, place: str) -> None:
    """As dynamic quantisation has them, of linear layers only."""
    ops, limits = torch.ops.quantized_decomposed, (0, 255)
    make, shape = LAYERS[name]
    layer = make()

    def model(x: Tensor) -> Tensor:
        step, zero = ops.choose_qparams.tensor(x, *limits, 2**-12, torch.uint8)
        given = ops.quantize_per_tensor.tensor(x, step, zero, *limits, torch.uint8)
        return layer(ops.dequantize_per_tensor.tensor(given, step, zero, *limits, torch.uint8))

    compiled = compile_in(place, model)
    with torch.no_grad(), no_cached_graphs():
        for factor in (1, 7):
            x = drawn(layer, shape) * factor
            step, zero = ops.choose_qparams.tensor(x, *limits, 2**-12, torch.uint8)
            exact = layer(Grid(step.item(), int(zero))(x.double()))
            assert (compiled(x) - exact).abs().max() <= 1e-5 * exact.abs().max()
    rows = [row[:2] for row in region_rows(compiled)]
    assert rows.count((region_of(layer), provider_at(place))) == regions


@needs_vnni
def test_a_weight_whose_zero_is_not_0_is_computed_in_floats() -> None:
    for name in ("linear", "3x3"):
        make, shape = LAYERS[name]
        layer = make()
        layer.zeros.random_(-20, 20)
        x = drawn(layer, shape)
        compiled = compile_in(
            "O1 mkldnn", lambda x, layer=layer: OUT.write(functional.relu(layer(IN(x))))
        )
        with torch.no_grad(), no_cached_graphs():
            assert_bytes(compiled(x), functional.relu(layer(IN(x.double()))), OUT)
        runs = {row[1]: row[3] for row in region_rows(compiled) if row[0] == region_of(layer)}
        assert runs == {"mkldnn": 0, "eager": 1}


@needs_vnni
def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(48, 40, 1, 0), torch.randn(7, 48)
    few = (0, 127, torch.uint8)  # of a CPU without VNNI: clamped where bytes go on
    write = torch.ops.quantized_decomposed.quantize_per_tensor
    compiled = compile_in("O1 mkldnn", lambda x: write(layer(IN(x)), OUT.step, OUT.zero, *few))
    with torch.no_grad(), no_cached_graphs():
        compiled(x)
    assert details(compiled, "quantized_linear") == [""]  # without what follows
    monkeypatch.setattr(quantized, "_MOST_PRODUCTS", 40)
    compiled = compile_in("O1 mkldnn", lambda x: OUT.write(layer(IN(x))))
    with torch.no_grad(), no_cached_graphs():
        compiled(x)
    assert "quantized_linear" not in [row[0] for row in region_rows(compiled)]


@needs_vnni
def test_sizes_that_change_and_none() -> None:
    for name in ("linear", "3x3"):
        make, (_, *rest) = LAYERS[name]
        layer = make()
        compiled = compile_in(
            "O2 mkldnn", lambda x, layer=layer: OUT.write(layer(IN(x))), dynamic=True
        )
        with torch.no_grad(), no_cached_graphs():
            for count in (2, 5, 3):
                x = drawn(layer, (count, *rest))
                assert_bytes(compiled(x), layer(IN(x.double())), OUT)
            torch._dynamo.reset()
            assert compiled(drawn(layer, (0, *rest))).shape[0] == 0


@needs_vnni
@places("O1 mkldnn", "O2 openmp")
def test_limits_beyond_the_grid(place: str) -> None:
    """All of a result is one end of its bytes then."""
    for name in ("linear", "pointwise", "depthwise"):
        make, shape = LAYERS[name]
        layer = make()
        for low, high in ((-10.0, -5.0), (70.0, 90.0)):

            def model(
                x: Tensor, layer: Any = layer, low: float = low, high: float = high
            ) -> Tensor:
                return Grid(0.05, 0).write(functional.hardtanh(layer(IN(x)), low, high))

            x = drawn(layer, shape)
            with torch.no_grad(), no_cached_graphs():
                got = compile_in(place, model)(x)
            assert torch.equal(got, model(x))


@needs_vnni
def test_a_bias_with_gaps() -> None:
    layer = Layer(16, 24, 3, 2)
    x, wide = drawn(layer, (1, 16, 9, 9)), torch.randn(48)
    for bias in (wide[:1].expand(24), wide[::2]):
        run = lambda x, weight, bias: functional.conv2d(x, weight, bias, padding=1)  # noqa: E731
        compiled = compile_in("O1 mkldnn", lambda x, b: run(IN(x), layer.read(x.dtype), b))  # noqa: B023
        with torch.no_grad(), no_cached_graphs():
            got = compiled(x, bias)
            exact = run(IN(x.double()), layer.read(torch.float64), bias.double())
        assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()
        assert_regions(compiled, ("quantized_convolution", "mkldnn", 1, 1))


@needs_vnni
@places("O1 mkldnn", "O2 openmp")
def test_views_around_what_is_added(place: str) -> None:
    layer, x = Layer(48, 40, 1, 0), torch.randn(14, 48)
    other, floats = OTHER.write(torch.randn(2, 7, 40)), torch.randn(2, 7, 40)

    def bytes_behind(x: Tensor, read: Any) -> Tensor:
        y = layer(IN(x).view(2, 7, 48)) + read(other, x.dtype)
        return OUT.write(functional.relu(y).view(14, 40))

    def floats_behind(x: Tensor, _: Any) -> Tensor:
        return functional.relu(layer(IN(x).view(2, 7, 48)) + floats.to(x.dtype)).view(14, 40)

    def others_rank(x: Tensor, _: Any) -> Tensor:
        y = functional.linear(IN(x).reshape(-1, 48), layer.read(x.dtype), layer.bias.to(x.dtype))
        return OUT.write((y + floats.view(14, 40).to(x.dtype)).reshape(2, 7, 40))

    def flattened(x: Tensor, _: Any) -> Tensor:
        return layer(IN(x).view(7, 2, 4, 12).flatten(0, 1).flatten(1))

    for function in (bytes_behind, floats_behind, others_rank, flattened):
        compiled = compile_in(place, function)
        with torch.no_grad(), no_cached_graphs():
            got, exact = compiled(x, OTHER.read), function(x.double(), OTHER.read)
        assert got.shape == exact.shape
        if got.dtype is torch.uint8:
            assert (got.double() - exact.double()).abs().max() <= 1
        else:
            assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()
        assert_regions(compiled, ("quantized_linear", provider_at(place), 1, 1), besides="linear")


@needs_vnni
@pytest.mark.parametrize(
    ("shape", "size", "how"),
    [
        ((3, 8, 2), (9, 2), {"padding": 0, "stride": (1, 3)}),
        (
            (6, 16, 2),
            (10, 2),
            {"padding": (1, 0), "stride": (1, 3), "dilation": (2, 1), "groups": 2},
        ),
        (
            (32, 4, 1),
            (7, 2),
            {"padding": (1, 1), "stride": (1, 2), "dilation": (3, 3), "groups": 2},
        ),
    ],
)
def test_images_in_which_onednn_loses_its_way(
    shape: tuple[int, int, int], size: tuple[int, int], how: dict[str, Any]
) -> None:
    """Narrower than the stride, or with outputs that see nothing of the image."""
    inputs, outputs, kernel = shape
    layer = Layer(inputs, outputs, kernel, 2, **how)
    x = drawn(layer, (1, inputs, *size))
    compiled = compile_in("O1 mkldnn", lambda x: layer(IN(x)))
    with torch.no_grad(), no_cached_graphs():
        got, exact = compiled(x), layer(IN(x.double()))
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
    runs = {row[1]: row[3] for row in region_rows(compiled)}
    assert runs == {"mkldnn": 0, "eager": 1}


@needs_vnni
def test_a_weight_that_changes() -> None:
    layer = Layer(16, 24, 3, 2)
    x = drawn(layer, (1, 16, 9, 9))
    compiled = compile_in("O1 mkldnn", lambda x: OUT.write(layer(IN(x))))
    with torch.no_grad(), no_cached_graphs():
        for _ in range(3):
            assert_bytes(compiled(x), layer(IN(x.double())), OUT)
            layer.weight.copy_(layer.weight.flip(0))
            layer.steps.mul_(1.25)


@needs_vnni
def test_autocast() -> None:
    """Eager rounds what bytes stand for to bfloat16: here it is exact until the end."""
    for name in ("linear", "3x3"):
        make, shape = LAYERS[name]
        layer, x = make(), torch.randn(shape)
        compiled = compile_in("O2 mkldnn", lambda x, layer=layer: functional.relu(layer(IN(x))))
        with torch.no_grad(), no_cached_graphs(), torch.autocast("cpu", torch.bfloat16):
            got, own = compiled(x), functional.relu(layer(IN(x)))
        exact = functional.relu(layer(IN(x.double())))
        assert got.dtype is own.dtype is torch.bfloat16
        assert (got - exact).abs().max() <= 0.004 * exact.abs().max()
        taken_once(compiled, layer, "relu")


# --- torchao's own flow ---------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.wide, self.deep = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.narrow, self.last = nn.Conv2d(64, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        y = functional.relu6(self.deep(functional.relu6(self.wide(x))))
        x = functional.relu(x + self.narrow(y))
        return self.last(x.mean((2, 3)))


@needs_vnni
@places()
def test_quantised_by_torchao(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = torchao.module("quantization.pt2e.quantize_pt2e", monkeypatch)
    model, x = Network().eval(), torch.randn(2, 3, 32, 32)
    # Importing the quantiser hangs a pass of its own into Inductor, for good.
    passes = torch._inductor.config.patch(pre_grad_custom_pass=None)
    with passes, torch.no_grad(), no_cached_graphs():
        x86 = torchao.module("quantization.pt2e.quantizer.x86_inductor_quantizer", monkeypatch)
        full = model(x)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = flow.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
        prepared(x)
        converted = flow.convert_pt2e(prepared)
        compiled = compile_in(place, converted)
        got, own = compiled(x), converted(x)
    assert (got - own).norm() <= 0.5 * (own - full).norm()
    provider = provider_at(place)
    layers = [("quantized_convolution", provider, 4, 4), ("quantized_linear", provider, 1, 1)]
    assert_regions(compiled, *layers)
