"""Pieces of kernels that several families share."""

from __future__ import annotations

from triton_kernels._triton import jit, tl


@jit
def rounded(x):
    """To the nearest whole number, half to even, for |x| < 2^22: float32 has no digits beyond."""
    return (x + 12582912.0) - 12582912.0


@jit
def activated(x, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu_tanh of float32 numbers; infinities give what torch gives."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh")
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x * tl.sigmoid(x)
    return y


@jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    """The derivative of `activated` at x."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh")
    if ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = below + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    elif ACTIVATION == "gelu_tanh":
        bent = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        # The sigmoid and its slope from one power: 1 - sigmoid has no digits left where it is 1.
        power = tl.exp(-tl.abs(bent))
        above = 1.0 / (1.0 + power)
        below = power * above
        slope = tl.where(bent < 0, below, above) + x * (below * above) * inner
    else:
        part = tl.sigmoid(x)
        slope = part * (1.0 + x * (1.0 - part))
    return slope


@jit
def tanh(x):
    """Of float32 numbers; near zero a series, where the quotient would lose its digits."""
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = 1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * series))
    below = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - below) / (1.0 + below)
    return tl.where(square < 0.0625, x * series, tl.where(x < 0.0, -quotient, quotient))
