"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import matmul

# (rows, depth, columns): tiles for every unit, for some of them, and for few rows
SIZES = {
    "large": (8192, 4096, 8192),
    "medium": (1024, 4096, 1024),
    "odd": (200, 1001, 264),
    "skinny": (32, 8192, 4096),
    "decode": (16, 4096, 4096),
}


def product(
    size: tuple[int, int, int], dtype: torch.dtype, precision: str = "", deep: bool = True
) -> None:
    """With everything that an epilogue may have: no other needs more registers."""
    rows, depth, columns = size
    a = meta(1, rows, depth, dtype=dtype)
    b = meta(1, columns, depth, dtype=dtype).mT if deep else meta(1, depth, columns, dtype=dtype)
    bias, beside = meta(columns, dtype=dtype), meta(1, rows, columns, dtype=dtype)
    matmul._launch_forward(a, b, bias, beside, beside, "gelu", dtype, precision, True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_matmul(architecture: str, size: str) -> None:
    def call(_: Architecture) -> None:
        product(SIZES[size], torch.bfloat16)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_float32(architecture: str, precision: str) -> None:
    def call(_: Architecture) -> None:
        product(SIZES["large"], torch.float32, precision)

    units = precision == "tf32" or architecture in ("gfx90a", "gfx942", "gfx950")
    assert_compiles_everywhere(call, architecture, products=units and architecture != "gfx1100")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_few_rows(architecture: str, rows: int) -> None:
    def call(_: Architecture) -> None:
        for deep in (True, False):
            product((rows, 4096, 4096), torch.bfloat16, deep=deep)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_the_way_back(architecture: str) -> None:
    def call(_: Architecture) -> None:
        a, b, out = meta(1, 2048, 1024), meta(1, 4096, 1024).mT, meta(1, 2048, 4096)
        matmul._launch_backward(out, a, b, out, out, "gelu_tanh", "", [True] * 4)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_matrix_units_multiply(name: str, size: str) -> None:
    """On Hopper and Blackwell those of a whole warp group, where a tile has rows for them."""
    architecture = architectures.named(name)
    for launch, binary in compiled(lambda: product(SIZES[size], torch.bfloat16), architecture):
        if launch.name == "matmul_tiled_kernel":
            few = architecture.backend == "cuda" and launch.config["BLOCK_M"] < 64
            word = "mma.sync" if few else architecture.matrix_instruction
            assert word in binary.assembly, f"{launch.config}: no {word}"
