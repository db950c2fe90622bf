"""Every operation, forward and backward, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels import chains
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import elementwise

ALL: list[chains.Step] = [
    *("neg", "abs", "sign", "square", "sqrt", "rsqrt", "exp", "log", "relu", "sigmoid", "tanh"),
    *("silu", "gelu", "gelu_tanh"),
    *((name, 0, 1) for name in ("add", "sub", "mul", "div", "maximum", "minimum")),
    ("clamp", 1, -1.0, 1.0),
]
# Those whose gradients are operations of their own.
WITH_SLOPES: list[chains.Step] = [
    "relu", "silu", "gelu", "gelu_tanh", ("maximum", 0, 1), ("clamp", 1, -1.0, 1.0)
]  # fmt: skip


def joined(steps: list[chains.Step]) -> list[chains.Step]:
    """A chain whose result is the sum of all these, which take one of two tensors or both."""
    found: list[chains.Step] = []
    for step in steps:
        found.append((step, 0) if isinstance(step, str) else step)
        if len(found) > 1:
            found.append(("add", len(found), len(found) + 1))
    return found


def texts(steps: list[chains.Step], n_tensors: int) -> tuple[str, str]:
    """The chain and that of its gradients."""
    forward = chains.written(steps, n_tensors)
    return str(forward), str(chains.differentiated(forward, n_tensors, range(n_tensors)))


@pytest.mark.parametrize("architecture", SHIPPED)
def test_every_operation(architecture: str) -> None:
    def call(_: Architecture) -> None:
        x, y = meta(1 << 20), meta(1 << 20)
        elementwise._launch([x, y], texts(joined(ALL), 2)[0], [0])
        elementwise._launch([x, x, y], texts(joined(WITH_SLOPES), 2)[1], [1, 2])

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_layouts(architecture: str) -> None:
    def call(_: Architecture) -> None:
        forward, backward = texts([("mul", 0, 1), "silu"], 2)
        x, bias = meta(512, 1000, dtype=torch.float16), meta(1000, dtype=torch.float32)
        elementwise._launch([x, bias], forward, [1])
        elementwise._launch([x.mT.contiguous().mT, x], forward, [0])
        elementwise._launch([x, x, bias], backward, [1, -1])

    assert_compiles_everywhere(call, architecture)
