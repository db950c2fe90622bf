"""Operators that AOTAutograd should take apart before a graph is planned in buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Attention as torch fuses it on the device that it traced for: as products and a softmax."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return dict(get_decompositions([aten._scaled_dot_product_flash_attention_for_cpu]))
