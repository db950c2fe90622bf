"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import cross_entropy


@pytest.mark.parametrize(
    ("classes", "weighted", "smoothing"),
    [(10, True, 0.1), (1000, False, 0.0), (50257, False, 0.1), (128256, False, 0.0)],
)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_cross_entropy(architecture: str, classes: int, weighted: bool, smoothing: float) -> None:
    def call(_: Architecture) -> None:
        logits, target = meta(8192, classes), meta(8192, dtype=torch.int64)
        weight, numbers = meta(classes) if weighted else None, meta(8192, dtype=torch.float32)
        cross_entropy.launch_forward(logits, target, weight, -100, smoothing)
        cross_entropy.launch_backward(
            numbers, logits, target, weight, numbers, numbers, -100, smoothing
        )

    assert_compiles_everywhere(call, architecture)
