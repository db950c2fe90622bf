"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import swiglu


@pytest.mark.parametrize("architecture", SHIPPED)
def test_of_two_tensors(architecture: str) -> None:
    def call(_: Architecture) -> None:
        gate = meta(4096, 14336)
        swiglu._launch_forward(gate, gate, "silu")
        swiglu._launch_backward(gate, gate, gate, "silu")

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize(("activation", "columns"), [("gelu", 11008), ("gelu_tanh", 40)])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_packed(architecture: str, activation: str, columns: int) -> None:
    def call(_: Architecture) -> None:
        swiglu._launch_packed_forward(meta(4096, 2 * columns), activation)
        swiglu._launch_packed_backward(meta(4096, columns), meta(4096, 2 * columns), activation)

    assert_compiles_everywhere(call, architecture)
