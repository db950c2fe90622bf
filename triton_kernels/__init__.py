"""Triton kernels as torch operators, usable on their own: `from triton_kernels import rms_norm`.

On NVIDIA and AMD GPUs they launch Triton kernels; elsewhere, and for dtypes that the kernels do not
take, they compute the same in plain torch. Importing this package imports no Triton: that happens
when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> the family that it belongs to
_FAMILIES = {
    "cross_entropy": ("cross_entropy",),
    "softmax": ("softmax", "log_softmax"),
    "linear_cross_entropy": ("linear_cross_entropy",),
    "layer_norm": ("layer_norm", "add_layer_norm"),
    "swiglu": ("swiglu", "geglu", "swiglu_packed", "geglu_packed"),
    "rope": ("rope",),
    "embedding": ("embedding",),
    "elementwise": ("elementwise",),
    "tensor_ops": ("transpose_copy", "concat", "slice_copy", "pad_copy"),
    "attention": ("attention",),
    "decode_attention": ("decode_attention", "paged_decode_attention"),
    "rms_norm": ("rms_norm", "add_rms_norm", "rms_norm_quantised"),
    "matmul": ("matmul",),
    "scaled_matmul": ("scaled_matmul", "quantise_rows"),
    "weight_only_matmul": ("int8_weight_matmul", "quantise_weight"),
}
_HOMES = {name: family for family, names in _FAMILIES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.families.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
