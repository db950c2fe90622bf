"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import compiled, meta
from triton_kernels import architectures
from triton_kernels.architectures import SHIPPED
from triton_kernels.families import decode_attention

UNITS = ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma", "v_wmma")  # 16 rows are few for the newest


def decode(size: int, group: int, queries: int, dtype: torch.dtype = torch.bfloat16) -> None:
    query = meta(4, 2 * group, queries, size, dtype=dtype)
    key = meta(4, 2, 8192, size, dtype=dtype)
    lengths = meta(4, dtype=torch.int32)
    decode_attention._launch(query, key, key, lengths, 0.1, None, None)
    if queries > 1:
        return
    pages, table = meta(100, 2, 16, size, dtype=dtype), meta(4, 512, dtype=torch.int32)
    decode_attention._launch_paged(query, pages, pages, table, lengths, 0.1, 30.0, 4096)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_decode(architecture: str, size: int) -> None:
    assert_good(architecture, size, 4, 1, torch.bfloat16)


@pytest.mark.parametrize("architecture", SHIPPED)
def test_many_rows(architecture: str) -> None:
    assert_good(architecture, 128, 8, 8, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("architecture", SHIPPED)
def test_float32(architecture: str, size: int) -> None:
    assert_good(architecture, size, 4, 1, torch.float32)


def assert_good(architecture: str, size: int, group: int, queries: int, dtype: torch.dtype) -> None:
    found = list(
        compiled(lambda: decode(size, group, queries, dtype), architectures.named(architecture))
    )
    # Large heads and float32 are too much for this one's registers: plain torch.
    none = architecture == "gfx1100" and (size == 256 or dtype is torch.float32)
    assert bool(found) is not none
    for launch, binary in found:
        where = f"{launch.name} on {architecture} with {launch.config}"
        assert not binary.fits(), f"{where}: {binary.fits()}"
        if "combine" not in launch.name and dtype is not torch.float32:
            assert any(unit in binary.assembly for unit in UNITS), where
