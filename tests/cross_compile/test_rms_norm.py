"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import rms_norm

COLUMNS = [64, 1000, 4096, 32768, 100_000]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_rms_norm(architecture: str, columns: int) -> None:
    def call(_: Architecture) -> None:
        x, weight = meta(4096, columns), meta(columns)
        rstd = meta(4096, dtype=torch.float32)
        rms_norm._launch_forward(x, x, weight, 1e-6)
        rms_norm._launch_backward(x, x, x, weight, rstd)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_quantised(architecture: str) -> None:
    def call(arch: Architecture) -> None:
        for dtype in (torch.int8, *(getattr(torch, name) for name in arch.fp8)):
            rms_norm._launch_quantised(meta(512, 5120), None, meta(5120), 1e-6, dtype)

    assert_compiles_everywhere(call, architecture)
