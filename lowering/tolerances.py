"""How far an operation of `lowering.ops` may be from the oracle: one table by op, dtype and level.

Numbers are max|got - reference| / max|reference|, with the reference in float64. They hold across
devices, libraries and compilers, for rows and inner sizes up to some thousands. One graph under
`unified` keeps a sharper bound, which needs eager beside it: `kernel_dispatch.numerics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lowering.errors import unknown
from lowering.levels import Level


@dataclass(frozen=True)
class Tolerance:
    """One row: O0 to O2 share the numbers, `at_o3` has those that O3 widens."""

    op: str
    float64: float
    float32: float
    bfloat16: float
    float16: float
    sums: str  # what is summed, in an order that is not the same everywhere; empty: nothing is
    why: str
    at_o3: Mapping[str, float] = field(default_factory=dict)


_ROUNDED_ONCE = "each element is rounded once"
_FUNCTIONS = "exp, erf and tanh are approximated, by every library in another way"
_STATISTICS = "the statistics are sums over a row; eps and the scale round as well"
_PRODUCTS = "the error of a sum grows with the root of its terms; half types round only the result"
_FEWER_BITS = {"bfloat16": 0.05, "float16": 0.05}

TABLE: Mapping[str, Tolerance] = {
    row.op: row
    for row in (
        Tolerance("add", 4e-16, 2e-7, 8e-3, 1e-3, "", _ROUNDED_ONCE),
        Tolerance("mul", 4e-16, 2e-7, 8e-3, 1e-3, "", _ROUNDED_ONCE),
        Tolerance("embedding", 0.0, 0.0, 0.0, 0.0, "", "rows are copied, not computed"),
        Tolerance("gelu", 2e-15, 2e-6, 2e-2, 2e-3, "", _FUNCTIONS),
        Tolerance("swiglu", 2e-15, 2e-6, 2e-2, 2e-3, "", _FUNCTIONS),
        Tolerance(
            "rope", 2e-15, 1e-6, 2e-2, 2e-3, "",
            "two products are added; eager rounds in between, fused kernels do not",
        ),
        Tolerance(
            "softmax_lastdim", 4e-15, 2e-6, 2e-2, 2e-3, "exponentials of a row", _FUNCTIONS
        ),
        Tolerance("layernorm", 4e-15, 2e-6, 2e-2, 2e-3, "a row and its squares", _STATISTICS),
        Tolerance("rms_norm", 4e-15, 2e-6, 2e-2, 2e-3, "squares of a row", _STATISTICS),
        Tolerance(
            "matmul2d", 1e-14, 4e-6, 2e-2, 2e-3, "products along the inner size", _PRODUCTS
        ),
        Tolerance(
            "linear", 1e-14, 4e-6, 2e-2, 2e-3, "products along the inner size",
            f"{_PRODUCTS}; at O3 GPUs may use int8 weights or 8-bit floats", _FEWER_BITS,
        ),
        Tolerance(
            "conv2d", 1e-14, 4e-6, 2e-2, 2e-3, "products over channels and the kernel",
            f"{_PRODUCTS}; at O3 CPUs may use Winograd's transform for 3x3", {"float32": 1e-4},
        ),
        Tolerance(
            "self_attention", 2e-14, 1e-5, 2e-2, 3e-3,
            "products of a head, exponentials of a row, weighted values",
            "two products with a softmax between; fused kernels rescale partial sums, block by "
            "block; torch rounds the scores of half types, our kernels do not",
        ),
        Tolerance(
            "cross_entropy", 1e-14, 4e-6, 2e-2, 2e-3, "exponentials of a row, losses of rows",
            _FUNCTIONS,
        ),
    )
}  # fmt: skip

# Torch lets NVIDIA GPUs round the factors of float32 convolutions to ten bits, unless
# torch.backends.cudnn.allow_tf32 is off. Products of matrices have it only if the user asks.
TF32 = 2e-3


def tolerance(
    op: str, dtype: torch.dtype | str, level: Level | str | int = Level.O2, *, tf32: bool = False
) -> float:
    """The number of the table. `tf32`: the operation runs where such factors are in use."""
    if op not in TABLE:
        raise unknown("operation", op, TABLE)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    row = TABLE[op]
    found: float = getattr(row, name)
    if Level.parse(level) >= Level.O3:
        found = max(found, row.at_o3.get(name, 0.0))
    takes_tf32 = tf32 and name == "float32" and row.why.startswith(_PRODUCTS)
    return max(found, TF32) if takes_tf32 else found


DTYPES = ("float64", "float32", "bfloat16", "float16")
