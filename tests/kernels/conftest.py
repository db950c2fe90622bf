"""What tests of the C++ kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowering import machine
from lowering.convolution_steps import Way
from lowering.native import library
from tests.support.regions import kernels


@pytest.fixture
def cpu_kernels() -> Iterator[None]:
    """The library is built and loaded; a test may set the number of threads."""
    kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Halves:
    """A kind of half precision."""

    dtype: torch.dtype
    way: Way  # of a convolution
    needs: str  # of the CPU
    large: float  # about the largest number

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.dtype)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype).float()

    def of(self, value: Any) -> Any:
        """All tensors in it."""
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        return value.to(self.dtype) if isinstance(value, torch.Tensor) else value


_HALVES = (
    Halves(torch.bfloat16, Way.BFLOAT16, "avx512_bf16", 1e38),
    Halves(torch.float16, Way.FLOAT16, "amx_fp16", 3e4),
)


@pytest.fixture(params=_HALVES, ids=lambda half: str(half.dtype).removeprefix("torch."))
def half(request: pytest.FixtureRequest, cpu_kernels: None) -> Halves:
    """There are kernels that multiply them."""
    found: Halves = request.param
    if found.needs not in machine.cpu().isa:
        pytest.skip(f"the CPU does not multiply {found.dtype} itself ({found.needs})")
    if not library.multiplies(found.dtype):
        pytest.skip(f"the kernels were built without {found.needs}, or may not use it")
    return found
