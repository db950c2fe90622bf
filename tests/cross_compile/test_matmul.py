"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.configurations import matmul as configurations
from triton_kernels.families import matmul

# (rows, depth, columns)
LARGE = (8192, 4096, 8192)
# Lines that begin anywhere; and few tiles, for which the depth is divided.
SMALL = {"odd": (200, 1001, 264), "decode": (16, 4096, 4096)}


def product(
    size: tuple[int, int, int], dtype: torch.dtype, precision: str = "", deep: bool = True
) -> None:
    """With everything that an epilogue may have: no other needs more registers."""
    rows, depth, columns = size
    a = meta(1, rows, depth, dtype=dtype)
    b = meta(1, columns, depth, dtype=dtype).mT if deep else meta(1, depth, columns, dtype=dtype)
    bias, beside = meta(columns, dtype=dtype), meta(1, rows, columns, dtype=dtype)
    matmul._launch_forward(a, b, bias, beside, beside, "gelu", dtype, precision, True)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_every_tile(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied by the matrix units: on Hopper and Blackwell by those of a whole warp
    group, where a tile has rows for them."""
    for tile in configurations._TILES[architecture]:
        monkeypatch.setattr(matmul, "_config", lambda *_, tile=tile: tile)
        few = architecture.startswith("sm") and tile["BLOCK_M"] < 64
        assert_compiles_everywhere(
            lambda _: product(LARGE, torch.bfloat16), architecture, products=not few
        )


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_small_products(architecture: str, size: str) -> None:
    known = architectures.named(architecture)
    for launch, binary in compiled(lambda: product(SMALL[size], torch.bfloat16), known):
        assert not binary.fits(), f"{launch.name} with {launch.config}: {binary.fits()}"
        if launch.name == "matmul_tiled_kernel":
            word = "mma.sync" if known.backend == "cuda" else known.matrix_instruction
            assert word in binary.assembly, f"{launch.config}: no {word}"


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [*((name, "ieee") for name in SHIPPED), *((name, "tf32") for name in SHIPPED if "sm" in name)],
)
def test_float32(architecture: str, precision: str) -> None:
    def call(_: Architecture) -> None:
        product(LARGE, torch.float32, precision)

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


@pytest.mark.parametrize("activation", matmul._ACTIVATIONS)
def test_activations(activation: str) -> None:
    def call(_: Architecture) -> None:
        a, b, out = meta(1, 1, 512), meta(1, 4096, 512).mT, meta(1, 1, 4096)
        matmul._launch_forward(a, b, None, None, None, activation, torch.bfloat16, "", False)
        matmul._launch_epilogue_backward(out, out, out, activation, out, out, True)

    assert_compiles_everywhere(call, "sm90")
