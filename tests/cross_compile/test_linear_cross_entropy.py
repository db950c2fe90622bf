"""What the family launches between torch's matrix products, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.configurations.linear_cross_entropy import chunk
from triton_kernels.families import linear_cross_entropy


@pytest.mark.parametrize("classes", [32000, 128256])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_linear_cross_entropy(architecture: str, classes: int) -> None:
    def call(_: Architecture) -> None:
        hidden, weight, target = meta(8192, 4096), meta(classes, 4096), meta(8192).long()
        at_once = chunk(8192, classes, 4096, 2)
        total, *gradients = linear_cross_entropy._launch_sum(
            hidden, weight, meta(classes), target, -100, 0.0, at_once, True, True, True
        )
        for gradient in gradients:
            linear_cross_entropy._launch_scaled(gradient, total, torch.bfloat16)

    assert_compiles_everywhere(call, architecture)
