"""Half precision that the CPU does not multiply itself is computed in float32, compiler or not, and
little of it where a library call takes longer."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowering import machine
from lowering.providers import half_precision
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.regions import assert_regions, no_cached_graphs, region_rows
from tests.support.reports import graph_reports

pytestmark = pytest.mark.skipif("avx2" not in machine.cpu().isa, reason="x86 CPUs only")

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
IMAGE = (2, 32, 28, 28)
LAYERS: dict[str, tuple[str, nn.Module, tuple[int, ...]]] = {
    "linear": ("linear", nn.Sequential(nn.Linear(512, 512), nn.GELU()), (16, 512)),
    "convolutions": (
        "convolution",
        nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 32, 3, stride=2),
        ),
        IMAGE,
    ),
    "one that stands alone": ("convolution", nn.Conv2d(32, 64, 3, bias=False), IMAGE),
    "1x1": ("convolution", nn.Conv2d(32, 96, 1), IMAGE),
    "a volume": ("convolution", nn.Conv3d(16, 16, 3), (1, 16, 12, 20, 20)),
    "transposed": ("transposed_convolution", nn.ConvTranspose2d(32, 32, 4, 2, 1), IMAGE),
}


_ALONE = ("one that stands alone", "1x1")  # left to torch where the CPU has products for them


@HALVES
@pytest.mark.parametrize("name", LAYERS)
def test_computed_by_onednn(name: str, dtype: torch.dtype) -> None:
    region, layer, sizes = LAYERS[name]
    model, x = copy.deepcopy(layer).to(dtype).eval(), torch.randn(sizes).to(dtype)
    with torch.no_grad(), no_cached_graphs():
        compiled = compile_at("O1", model)
        got, own = compiled(x), model(x)
        exact = copy.deepcopy(model).double()(x.double())
    assert (got.dtype, got.shape, got.stride()) == (dtype, own.shape, own.stride())
    slack = (
        1.25 if half_precision.is_widened(dtype) else 2
    )  # else BatchNorm's weight is rounded, too
    assert (got - exact).abs().max() <= slack * (own - exact).abs().max()
    if half_precision.is_widened(dtype) or name not in _ALONE:
        ((found, provider, *_),) = region_rows(compiled)
        assert (found, provider) == (region, "mkldnn")
        widened = "widen-weight" in graph_reports(compiled)[0].regions[0].recipes
        assert widened == half_precision.is_widened(dtype)


@pytest.mark.parametrize(
    ("isa", "widened"),
    [("avx2 avx512f", True), ("avx2 avx512f avx512_bf16", False), ("neon bf16", False)],
)
def test_what_a_cpu_multiplies_itself_is_not_widened(
    monkeypatch: pytest.MonkeyPatch, isa: str, widened: bool
) -> None:
    cpu = replace(machine.cpu(), isa=frozenset(isa.split()))
    monkeypatch.setattr(machine, "cpu", lambda: cpu)
    assert half_precision.is_widened(torch.bfloat16) is widened
    assert half_precision.is_widened(torch.float16)
    assert not half_precision.is_widened(torch.float32)
    in_tiles = replace(cpu, isa=cpu.isa | {"amx_fp16"})
    monkeypatch.setattr(machine, "cpu", lambda: in_tiles)
    assert not half_precision.is_widened(torch.float16)


def test_one_row_is_left_alone() -> None:
    """Bound by memory: twice as wide a weight would take twice as long."""
    if not half_precision.is_widened(torch.float16):
        pytest.skip("the CPU multiplies float16 itself")
    model = nn.Linear(2048, 2048).half().eval()
    compiled = compile_at("O1", model)
    with torch.no_grad():
        compiled(torch.randn(1, 2048).half())
    assert region_rows(compiled) == []


@HALVES
def test_a_weight_that_changes_is_widened_again(dtype: torch.dtype) -> None:
    model, x = nn.Linear(512, 512).to(dtype).eval(), torch.randn(16, 512).to(dtype)
    compiled = compile_at("O1", model)
    with torch.no_grad():
        compiled(x)
        model.weight.mul_(2)
        model.bias.add_(1)
        expected = model(x)
        torch.testing.assert_close(compiled(x), expected)


AT_O1 = [("O1", name) for name in LAYERS if name not in _ALONE]


@HALVES
@pytest.mark.parametrize(("level", "name"), [*AT_O1, ("O2", "linear"), ("O2", "convolutions")])
def test_weights_that_autocast_would_round(level: str, name: str, dtype: torch.dtype) -> None:
    """They are taken in float32, as the model holds them, and follow it when they change."""
    region, layer, sizes = LAYERS[name]
    model, x = copy.deepcopy(layer).eval(), torch.randn(sizes)
    with torch.no_grad(), no_cached_graphs():
        compiled = compile_at(level, model)
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                got, own = compiled(x), model(x)
            exact = copy.deepcopy(model).double()(x.double())
            assert (got.dtype, got.shape, got.stride()) == (dtype, own.shape, own.stride())
            assert_contract(got, own, exact, "autocast")
            for weight in model.parameters():
                weight.mul_(1.5)
    in_hardware = not half_precision.is_widened(dtype)
    rows = graph_reports(compiled)[0].regions
    assert rows  # of convolutions some may be too small for a call through oneDNN
    for row in rows:
        assert (row.name, row.provider in ("mkldnn", "openmp")) == (region, True)
        assert ("cast-weight" in row.recipes) == in_hardware
        assert "widen-weight" not in row.recipes


def test_convolutions_in_bfloat16_with_amx() -> None:
    """Large and small ones are one call."""
    if "amx_bf16" not in machine.cpu().isa:
        pytest.skip("the CPU has no AMX")
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 1)]
    model = nn.Sequential(*layers).eval().bfloat16()
    x = torch.randn(1, 64, 40, 40).bfloat16()  # 118 and 13 MFLOP
    compiled = torch.compile(model, backend="unified")
    with torch.no_grad():
        wide = copy.deepcopy(model).double()(x.double())
        assert_contract(compiled(x), model(x), wide, "model")
    assert_regions(compiled, ("convolution", "openmp", 2, 2))
