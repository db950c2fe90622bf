"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import embedding


@pytest.mark.parametrize(("columns", "kind"), [(4096, torch.int64), (100, torch.int32)])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_embedding(architecture: str, columns: int, kind: torch.dtype) -> None:
    def call(_: Architecture) -> None:
        ids = meta(8, 2048, dtype=kind)
        embedding._launch_forward(ids, meta(128256, columns), -1)
        embedding._launch_backward(meta(8, 2048, columns), ids, 128256, 0)

    assert_compiles_everywhere(call, architecture)


def test_rows_beyond_two_to_the_31_numbers_are_found() -> None:
    """What is multiplied by a row's number of columns has 64 bits before it is multiplied."""
    ids, architecture = meta(64, dtype=torch.int32), architectures.named("sm90")

    def call() -> None:
        embedding._launch_forward(ids, meta(1 << 20, 4096), -1)

    for _, binary in compiled(call, architecture):
        assert re.search(r"arith\.muli .*: tensor<\d+x1xi64>", binary.ir), binary.ir
        assert not re.search(r"arith\.muli .*: tensor<.*i32>", binary.ir), binary.ir
