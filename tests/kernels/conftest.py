"""What tests of the C++ kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowering import machine
from lowering.native import library
from tests.support.regions import kernels


@pytest.fixture
def cpu_kernels() -> Iterator[None]:
    """The library is built and loaded; a test may set the number of threads."""
    kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bf16_kernels(cpu_kernels: None) -> None:
    """There are kernels that multiply bfloat16."""
    if "avx512_bf16" not in machine.cpu().isa:
        pytest.skip("the CPU does not multiply bfloat16 itself (avx512_bf16)")
    if not library.multiplies_bfloat16():
        pytest.skip("the compiler does not know AVX-512 BF16")
