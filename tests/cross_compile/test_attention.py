"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.triton_kernels import assert_compiles_everywhere, compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import attention

SIZES = [64, 128, 256]


def forward_and_backward(size: int, dtype: torch.dtype = torch.bfloat16, **given: Any) -> None:
    query = meta(2, 1024, 16, size, dtype=dtype).transpose(1, 2)
    key = meta(2, 1024, 4, size, dtype=dtype).transpose(1, 2)
    settings = (0.1, given.get("softcap"), given.get("lower"), given.get("upper"))
    mask = given.get("mask")
    mask = None if mask is None else mask.expand(2, 16, 1024, 1024)
    out, lse = attention._launch_forward(query, key, key, mask, *settings)
    attention._launch_backward(query, query, key, key, mask, out, lse, *settings)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_causal(architecture: str, size: int) -> None:
    assert_good(architecture, size, lambda: forward_and_backward(size, upper=0))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_masks_windows_and_softcap(architecture: str, size: int) -> None:
    def call() -> None:
        forward_and_backward(size)
        forward_and_backward(size, softcap=30.0)
        forward_and_backward(size, upper=0, lower=-256)
        forward_and_backward(size, mask=meta(2, 1, 1, 1024, dtype=torch.bool))
        forward_and_backward(size, mask=meta(16, 1024, 1024), lower=-256)

    assert_good(architecture, size, call)


def assert_good(architecture: str, size: int, call: Callable[[], None]) -> None:
    found = list(compiled(call, architectures.named(architecture)))
    # Large heads are too much for this one's registers: the operator computes its plain meaning.
    assert bool(found) is ((architecture, size) != ("gfx1100", 256))
    own = (architectures.named(architecture).matrix_instruction,)
    for launch, binary in found:
        where = f"{launch.name} on {architecture} with {launch.config}"
        assert not binary.fits(), f"{where}: {binary.fits()}"
        # The newest units multiply 64 rows or more, which of large heads registers do not hold.
        units = own if size <= 128 else (*own, "mma.sync")
        assert any(unit in binary.assembly for unit in units), where


@pytest.mark.parametrize("architecture", SHIPPED)
def test_few_queries_and_sizes_that_are_no_power_of_two(architecture: str) -> None:
    def call(_: Architecture) -> None:
        query, key = meta(2, 16, 5, 80), meta(2, 4, 1000, 80)
        attention._launch_forward(query, key, key, None, 0.1, None, None, 0)

    assert_compiles_everywhere(call, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", [name for name in SHIPPED if name != "gfx1100"])
def test_float32(architecture: str, size: int) -> None:
    assert_compiles_everywhere(
        lambda _: forward_and_backward(size, torch.float32, upper=0), architecture
    )


@pytest.mark.parametrize("architecture", ["sm90", "gfx942"])
def test_offsets_are_wide_enough(architecture: str) -> None:
    """Where tiles lie is worked out in 64 bits, offsets within one only where they need it."""
    found = architectures.named(architecture)
    for apart, wide in ((2**10, False), (2**25, True)):
        query = meta(1).expand(1 << 40).as_strided((1, 1, 1024, 64), (0, 0, apart, 1))

        def call(query: torch.Tensor = query) -> None:
            attention._launch_forward(query, query, query, None, 0.1, None, None, None)

        launch, _ = next(compiled(call, found))
        assert launch.arguments["FAR"] is wide
