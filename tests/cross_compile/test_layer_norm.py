"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import layer_norm

COLUMNS = [1, 64, 1000, 4096, 8192, 100_000]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_layer_norm(architecture: str, columns: int) -> None:
    def call(_: Architecture) -> None:
        x, weight = meta(4096, columns), meta(columns)
        mean = meta(4096, dtype=torch.float32)
        layer_norm._launch_forward(x, x, weight, weight, 1e-6)
        layer_norm._launch_backward(x, x, x, weight, weight, mean, mean)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_the_widest_row_in_registers(architecture: str) -> None:
    def call(_: Architecture) -> None:
        x, weight = meta(512, 32768), meta(32768)
        layer_norm._launch_forward(x, None, weight, weight, 1e-6)

    assert_compiles_everywhere(call, architecture)
