"""What tests of Apple's GPUs share: lowered graphs on the CPU, by the meaning of our operators, or
by their shaders (tests/support/metal_shim)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kernel_dispatch.numerics import all_in_double, to_reference
from lowering import toolchain
from lowering.metal import registration, shaders
from tests.support import metal_shim
from tests.support.gpu_plans import lowered
from tests.support.numerics import assert_contract

Tensor = torch.Tensor
Regions = dict[tuple[str, str], int]


class Heard:
    """What a graph's report would be told while it runs."""

    keeps_memory = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.ran: dict[tuple[str, str], int] = {}
        self.demoted: list[str] = []

    def region_ran(self, region: str, provider: str, times: int = 1) -> None:
        self.ran[region, provider] = self.ran.get((region, provider), 0) + times

    def kernels_ran(self, ran: int) -> None:
        raise AssertionError("a kernel of the CPU's library ran")

    def region_demoted(self, region: str, provider: str, reason: Any) -> None:
        self.demoted.append(str(reason))


@contextlib.contextmanager
def on_shaders(pytestconfig: pytest.Config) -> Iterator[None]:
    """Operators of ours launch their shaders, here."""
    found = toolchain.probe()
    if not found.available:
        pytest.skip(found.reason)
    metal_shim.keep_in(pytestconfig.cache.mkdir("metal"))
    registration.forget()
    with shaders.compiled_by(metal_shim.compile_shader):
        yield
    registration.forget()


def holds(
    on_metal: Any, fn: Any, *inputs: Any, device: str = "mps", level: str = "O2", ours: Regions
) -> None:
    """These regions are ours, and the lowered graph computes what eager does, near enough."""
    compiled, backend = lowered(fn, device, level=level)
    with torch.no_grad():
        compiled(*inputs)  # plans
        planned = backend.regions()
        found = {key: count for key, count in planned.items() if key[1] == "metal"}
        assert found == ours
        got, own = on_metal(compiled, planned, *inputs), fn(*inputs)
        reference = fn.double() if isinstance(fn, nn.Module) else fn
        with all_in_double():
            truth = reference(*to_reference(list(inputs)))
    assert_contract(got, own, truth, "mps")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rms(nn.Module):
    """As Hugging Face spells it."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """What a transformer does between two layers: the sum lives on, behind the norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = residual + self.linear(x)
        return self.linear(self.norm(summed)), summed + 1
