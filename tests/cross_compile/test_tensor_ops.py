"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import tensor_ops


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_copies(architecture: str, dtype: torch.dtype) -> None:
    def call(_: Architecture) -> None:
        x = meta(16, 1024, 2048, dtype=dtype)
        tensor_ops._launch_transpose(x, 1, 2)
        tensor_ops._launch_concat([x, x], 1)
        tensor_ops._launch_slice(x, 2, 0, 2048, 3)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_pads(architecture: str) -> None:
    def call(_: Architecture) -> None:
        tensor_ops._launch_transpose(meta(4, 2048, 32, 128), 1, 2)
        x = meta(8, 64, 100, 128)
        tensor_ops._launch_pad(x, [1, 1, 1, 1], 1.0)
        tensor_ops._launch_pad(x.permute(0, 3, 1, 2), [0, 0, 2, -1], 0.0)
        tensor_ops._launch_slice_backward(meta(64, 50, 128), 100, 1, 0, 100, 2)

    assert_compiles_everywhere(call, architecture)


def test_a_transpose_reads_and_writes_whole_vectors() -> None:
    architecture = architectures.named("sm90")

    def call() -> None:
        tensor_ops._launch_transpose(meta(4096, 4096), 0, 1)

    for launch, binary in compiled(call, architecture):
        assert "ld.global.v4.b32" in binary.assembly, launch.config
        assert "st.global.v4.b32" in binary.assembly, launch.config
