"""Norms and softmax: rows that are read once and written once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import (
    EIGHT_BITS,
    FORWARD,
    Case,
    Inputs,
    Shape,
    Targets,
    Work,
    half,
    ours,
    randn,
)
from benchmarks.gpu.rivals import MAX_AUTOTUNE, liger

EPS = 1e-6
USUAL = ((8192, 4096), (4096, 8192), (8192, 1024), (32768, 1024), (1, 4096), (64, 5120))
ODD = ((1000, 1000), (333, 2047), (7, 65537), (1, 1), (20000, 96))
HUGE = (600_000, 4096)
ROWS = Targets(copy_share=0.9, backward_copy_share=0.75, rival=MAX_AUTOTUNE, times_rival=1.03)


def moved(forward: float, backward: float, weights: int = 0) -> Any:
    """So many times the matrix of rows; weights are read, and their gradients written."""

    def work(shape: Shape, size: int, direction: str) -> Work:
        rows, columns = shape
        times = forward if direction == FORWARD else backward
        also = weights * columns * (1 if direction == FORWARD else 2)
        return Work((times * rows * columns + also) * size)

    return work


def rows_and_weights(matrices: int, vectors: int) -> Any:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
        found = [randn(*shape, dtype=dtype, device=device) for _ in range(matrices)]
        found += [randn(shape[1], dtype=dtype, device=device) for _ in range(vectors)]
        return tuple(found)

    return make


def own_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPS)


def own_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return own_rms_norm(total, weight), total


def own_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def own_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    total = x + residual
    return own_layer_norm(total, weight, bias), total


# --- in 8 bits ------------------------------------------------------------------------------------


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype is torch.int8 else torch.finfo(dtype).max


def own_quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In float64 nothing is rounded: that is the truth which the product is compared with."""
    if x.dtype is torch.float64:
        return x, x.new_ones(x.shape[:-1])
    scale = x.float().abs().amax(-1).clamp_min(1e-10) / largest(dtype)
    scaled = x.float() / scale.unsqueeze(-1)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def widened(outputs: Any) -> Tensor:
    values, scale = outputs[0], outputs[1]
    wide = torch.float64 if scale.dtype is torch.float64 else torch.float32
    return values.to(wide) * scale.unsqueeze(-1)


def rows_and_dtype(vectors: int) -> Any:
    """The last input names the 8-bit dtype."""

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
        x = randn(*shape, dtype=half(device), device=device, grad=False)
        more = [randn(shape[1], dtype=half(device), device=device, grad=False)] * vectors
        return (x, *more, DtypeName(dtype))

    return make


class DtypeName:
    """A dtype that `to_reference` leaves as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def own_rms_norm_quantised(x: Tensor, weight: Tensor, kind: DtypeName) -> tuple[Tensor, Tensor]:
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    return own_quantised(own_rms_norm(x.to(wide), weight.to(wide)), kind.dtype)


def to_eight_bits(shape: Shape, size: int, direction: str) -> Work:
    rows, columns = shape
    return Work(rows * columns * (2 + 1))


CASES = (
    Case(
        "rms_norm",
        "rms_norm",
        rows_and_weights(1, 1),
        lambda x, weight: ours("rms_norm")(x, weight, EPS),
        own_rms_norm,
        moved(2, 3, weights=1),
        USUAL,
        ODD,
        tiny=(5, 40),
        huge=HUGE,
        rows_of=(0,),
        rivals=(
            liger(
                "rms_norm",
                lambda f: lambda x, w: f.liger_rms_norm(x, w, EPS, 0.0, "llama", False),
            ),
        ),
        targets=ROWS,
    ),
    Case(
        "add_rms_norm",
        "add_rms_norm",
        rows_and_weights(2, 1),
        lambda x, residual, weight: ours("add_rms_norm")(x, residual, weight, EPS),
        own_add_rms_norm,
        moved(4, 4, weights=1),
        USUAL[:3] + USUAL[-2:],
        ODD[:3],
        tiny=(5, 40),
        targets=ROWS,
    ),
    Case(
        "rms_norm_quantised",
        "rms_norm_quantised",
        rows_and_dtype(1),
        lambda x, weight, kind: ours("rms_norm_quantised")(x, weight, EPS, dtype=kind.dtype)[:2],
        own_rms_norm_quantised,
        to_eight_bits,
        USUAL[:2] + USUAL[-2:],
        ODD[:3],
        tiny=(5, 40),
        dtypes=EIGHT_BITS,
        directions=(FORWARD,),
        targets=ROWS,
        view=widened,
    ),
    Case(
        "quantise_rows",
        "quantise_rows",
        rows_and_dtype(0),
        lambda x, kind: ours("quantise_rows")(x, kind.dtype),
        lambda x, kind: own_quantised(x, kind.dtype),
        to_eight_bits,
        USUAL[:2] + USUAL[-2:],
        ODD[:3],
        tiny=(5, 40),
        dtypes=EIGHT_BITS,
        directions=(FORWARD,),
        targets=ROWS,
        view=widened,
    ),
    Case(
        "layer_norm",
        "layer_norm",
        rows_and_weights(1, 2),
        lambda x, weight, bias: ours("layer_norm")(x, weight, bias, EPS),
        own_layer_norm,
        moved(2, 3, weights=2),
        USUAL,
        ODD,
        tiny=(5, 40),
        huge=HUGE,
        rows_of=(0,),
        rivals=(liger("layer_norm", lambda f: lambda x, w, b: f.liger_layer_norm(x, w, b, EPS)),),
        targets=ROWS,
    ),
    Case(
        "add_layer_norm",
        "add_layer_norm",
        rows_and_weights(2, 2),
        lambda x, residual, w, b: ours("add_layer_norm")(x, residual, w, b, EPS),
        own_add_layer_norm,
        moved(4, 4, weights=2),
        USUAL[:3],
        ODD[:3],
        tiny=(5, 40),
        targets=ROWS,
    ),
    Case(
        "softmax",
        "softmax",
        rows_and_weights(1, 0),
        lambda x: ours("softmax")(x, -1),
        lambda x: torch.softmax(x, -1),
        moved(2, 3),
        ((8192, 4096), (32768, 1024), (4096, 32768), (1024, 131072)),
        ODD,
        tiny=(5, 40),
        huge=HUGE,
        rows_of=(0,),
        rivals=(liger("softmax", lambda f: f.liger_softmax),),
        targets=ROWS,
    ),
    Case(
        "log_softmax",
        "log_softmax",
        rows_and_weights(1, 0),
        lambda x: ours("log_softmax")(x, -1),
        lambda x: torch.log_softmax(x, -1),
        moved(2, 3),
        ((8192, 4096), (1024, 131072)),
        ODD[:3],
        tiny=(5, 40),
        targets=ROWS,
    ),
)
