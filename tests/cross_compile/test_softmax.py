"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import softmax

ROWS = [(4096, 64), (4096, 1000), (4096, 4096), (4096, 32768), (4096, 131_072)]
COLUMNS = [(8, 300, 4096), (8, 8192, 1024)]


def run(x: torch.Tensor, mask: torch.Tensor | None, dim: int, log: bool) -> None:
    softmax._launch_forward(x, mask, dim, 1.0, x.dtype, log)
    softmax._launch_backward(x, x, mask, dim, 1.0, x.dtype, log)


@pytest.mark.parametrize("shape", ROWS + COLUMNS)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_softmax(architecture: str, shape: tuple[int, ...]) -> None:
    def call(_: Architecture) -> None:
        run(meta(*shape), None, 1, log=False)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("columns", [512, 100_000])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_masked_log_softmax(architecture: str, columns: int) -> None:
    def call(_: Architecture) -> None:
        run(meta(2, 8, 64, columns), meta(2, 1, 64, columns, dtype=torch.bool), -1, log=True)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 131_072), (8, 1024, 4096)])
def test_reads_and_writes_are_wide_along_whichever_dimension_is_dense(
    shape: tuple[int, ...],
) -> None:
    architecture = architectures.named("sm90")
    for _, binary in compiled(lambda: run(meta(*shape), None, 1, log=False), architecture):
        assert "ld.global.v4.b32" in binary.assembly or "ld.global.v2.b32" in binary.assembly
