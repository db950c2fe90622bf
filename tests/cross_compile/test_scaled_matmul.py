"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import scaled_matmul

SIZES = {"large": (8192, 4096, 8192), "medium": (512, 4096, 1024), "decode": (16, 4096, 4096)}


def dtypes(architecture: Architecture) -> list[torch.dtype]:
    return [torch.int8, *(getattr(torch, name) for name in architecture.fp8)]


def product(rows: int, depth: int, columns: int, a: torch.dtype, b: torch.dtype) -> None:
    scales = meta(rows, dtype=torch.float32), meta(columns, dtype=torch.float32)
    right = meta(columns, depth, dtype=b).mT
    left, bias = meta(rows, depth, dtype=a), meta(columns)
    scaled_matmul._launch_scaled(left, right, *scales, bias, torch.bfloat16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_scaled_matmul(architecture: str, size: str) -> None:
    def call(arch: Architecture) -> None:
        for dtype in dtypes(arch):
            product(*SIZES[size], dtype, dtype)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_few_rows(architecture: str) -> None:
    def call(arch: Architecture) -> None:
        for dtype in dtypes(arch):
            product(1, 4096, 4096, dtype, dtype)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", ["sm90", "gfx950"])
def test_two_kinds_of_8_bit_floats(architecture: str) -> None:
    def call(_: Architecture) -> None:
        product(*SIZES["large"], torch.float8_e4m3fn, torch.float8_e5m2)

    assert_compiles_everywhere(call, architecture, products=True)


@pytest.mark.parametrize("name", ["sm90", "sm100", "gfx942", "gfx950"])
def test_8_bit_floats_reach_the_matrix_units_as_they_are(name: str) -> None:
    architecture = architectures.named(name)
    kind = getattr(torch, architecture.fp8[0])
    word = {
        "sm90": ".f32.e4m3.e4m3",
        "sm100": "tcgen05.mma.cta_group::1.kind::f8f6f4",
        "gfx942": "v_mfma_f32_16x16x32_fp8_fp8",
        "gfx950": "v_mfma_",
    }[name]
    for launch, binary in compiled(lambda: product(*SIZES["large"], kind, kind), architecture):
        assert word in binary.assembly, f"{launch.config}: no {word}"


def test_hopper_adds_8_bit_products_up_in_float32() -> None:
    """Its matrix units keep 14 bits of a sum: after 128 products an addition of its own follows."""
    architecture = architectures.named("sm90")
    a, b = (meta(8192, 4096, dtype=torch.float8_e4m3fn) for _ in range(2))
    one = meta(1, dtype=torch.float32)

    def call() -> None:  # without a bias, whose additions would count
        scaled_matmul._launch_scaled(a, b.mT, one, one, None, torch.bfloat16)

    for launch, binary in compiled(call, architecture):
        assert "maxNumImpreciseAcc = 128" in binary.ir
        after = binary.assembly[binary.assembly.rindex("wgmma.mma_async") :]
        sums = launch.config["BLOCK_M"] * launch.config["BLOCK_N"] // (binary.warps * 32)
        assert after.count("add.f32") + after.count("add.rn.f32") >= sums


@pytest.mark.parametrize("columns", [64, 16384, 100_000])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_quantise_rows(architecture: str, columns: int) -> None:
    def call(arch: Architecture) -> None:
        for dtype in dtypes(arch):
            scaled_matmul._launch_quantise(meta(512, columns), dtype)

    assert_compiles_everywhere(call, architecture)
