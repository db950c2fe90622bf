"""Every kernel of the family, in every shipped configuration, by the real compiler."""

from __future__ import annotations

import pytest

from tests.support.triton_kernels import assert_compiles_everywhere, meta
from triton_kernels.architectures import SHIPPED, Architecture
from triton_kernels.families import rope

# (size of a head, numbers of it that turn, are pairs side by side?, is the forward with a norm?)
HEADS = [(128, 128, False, False), (128, 128, True, False), (256, 64, False, True)]


@pytest.mark.parametrize(("size", "rotated", "interleaved", "has_norm"), HEADS)
@pytest.mark.parametrize("architecture", SHIPPED)
def test_rope(
    architecture: str, size: int, rotated: int, interleaved: bool, has_norm: bool
) -> None:
    def call(_: Architecture) -> None:
        query, key = (meta(2, 4096, heads, size).transpose(1, 2) for heads in (32, 8))
        table, norm = meta(1, 4096, rotated)[..., : rotated // 2].expand(2, -1, -1), meta(size)
        known, settings = (query, key, table, table), (1e-6, rotated, interleaved)
        norms = (norm, norm) if has_norm else (None, None)
        rope._launch_forward(*known, *norms, *settings, False)
        rope._launch_backward(query, key, *known, norm, norm, *settings)

    assert_compiles_everywhere(call, architecture)
