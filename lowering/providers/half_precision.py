"""Half precision through oneDNN: computed in float32 where the CPU does not multiply it itself.

oneDNN takes such numbers anyway, as eager does, one vector of them at a time: 55 GFLOP/s in
bfloat16 and 20 in float16, where it reaches 210 in float32 (a Xeon with AVX-512, torch 2.13).
Weights that are float32 themselves, under autocast, are taken as they are: nearer to the model's
own result than what their rounding gives, at the same cost.
"""

from __future__ import annotations

import torch

from lowering import machine
from lowering.regions.convolution import Convolution
from lowering.regions.linear import Linear
from lowering.regions.transposed_convolution import TransposedConvolution

Layer = Linear | Convolution | TransposedConvolution


def is_widened(dtype: torch.dtype) -> bool:
    isa = machine.cpu().isa
    if dtype is torch.bfloat16:
        return "avx2" in isa and "avx512_bf16" not in isa
    # In AVX-512's vectors oneDNN multiplies float16 no faster than float32; in AMX's tiles it does.
    return dtype is torch.float16 and "amx_fp16" not in isa


def element(match: Layer) -> int:
    """The bytes of a number of the packed weight."""
    return 4 if is_widened(match.dtype) else match.dtype.itemsize
