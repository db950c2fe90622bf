"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import weight_only_matmul

SIZES = {"large": (8192, 4096, 8192), "medium": (512, 4096, 1024), "decode": (16, 4096, 4096)}


def product(rows: int, depth: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    weight = meta(columns, depth, dtype=torch.int8)
    scale, bias = meta(columns, dtype=torch.float32), meta(columns, dtype=dtype)
    weight_only_matmul._launch_forward(meta(rows, depth, dtype=dtype), weight, scale, bias)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_int8_weight_matmul(architecture: str, size: str) -> None:
    assert_compiles_everywhere(lambda _: product(*SIZES[size]), architecture)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_few_rows(architecture: str, rows: int) -> None:
    assert_compiles_everywhere(lambda _: product(rows, 4096, 4096), architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_float32(architecture: str) -> None:
    def call(_: Architecture) -> None:
        product(*SIZES["large"], torch.float32)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("rows", [2048, 16, 1])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_the_way_back(architecture: str, rows: int) -> None:
    def call(_: Architecture) -> None:
        weight, scale = meta(4096, 1024, dtype=torch.int8), meta(4096, dtype=torch.float32)
        weight_only_matmul._launch_backward(meta(rows, 4096), weight, scale)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_matrix_units_multiply(name: str) -> None:
    architecture = architectures.named(name)
    for launch, binary in compiled(lambda: product(*SIZES["large"]), architecture):
        word = architecture.matrix_instruction
        assert word in binary.assembly, f"{launch.config}: no {word}"
