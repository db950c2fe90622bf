"""Pieces of kernels that several families share."""

from __future__ import annotations

from triton_kernels._triton import jit, tl  # noqa: F401  (the interpreter looks for `tl` here)


@jit
def rounded(x):
    """To the nearest whole number, half to even, for |x| < 2^22: float32 has no digits beyond."""
    return (x + 12582912.0) - 12582912.0
