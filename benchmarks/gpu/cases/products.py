"""Products of matrices: (rows, depth, columns), with what comes after them, and in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import (
    EIGHT_BITS,
    FORWARD,
    Absent,
    Case,
    Inputs,
    Rival,
    Shape,
    Targets,
    Work,
    half,
    ours,
    randn,
)
from benchmarks.gpu.rivals import CUBLAS_AND_EPILOGUE, plain, product_and_epilogue

LARGE = ((8192, 8192, 8192), (8192, 4096, 14336), (4096, 4096, 4096), (2048, 1024, 21504))
ODD = ((1000, 1000, 1000), (129, 4097, 257), (17, 11008, 333), (1, 1, 1))
FEW = ((1, 4096, 14336), (4, 4096, 4096), (16, 8192, 8192))
FEW_ODD = ((1, 519, 333), (3, 4097, 1001), (16, 1000, 77))
CUBLAS = "cublas"


def product_work(shape: Shape, size: int, direction: str) -> Work:
    rows, depth, columns = shape
    moved = (rows * depth + depth * columns + rows * columns) * size
    times = 1 if direction == FORWARD else 2
    return Work(moved * times, 2.0 * rows * depth * columns * times)


def operands(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, depth, columns = shape
    return (
        randn(rows, depth, dtype=dtype, device=device),
        randn(depth, columns, dtype=dtype, device=device, scale=depth**-0.5),
    )


def layer(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """A weight as torch.nn.Linear has it, and a bias."""
    rows, depth, columns = shape
    return (
        randn(rows, depth, dtype=dtype, device=device),
        randn(columns, depth, dtype=dtype, device=device, scale=depth**-0.5),
        randn(columns, dtype=dtype, device=device),
    )


def layer_and_gate(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, _, columns = shape
    beside = (randn(rows, columns, dtype=dtype, device=device) for _ in range(2))
    return (*layer(shape, dtype, device), *beside)


def own_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def own_gated(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, weight, bias)) * gate + residual


def cublas(x: Tensor, weight: Tensor, *beside: Tensor) -> Tensor:
    """The product alone: what nothing can be faster than by much."""
    return torch.mm(x, weight.t())


def cublaslt_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def times(**settings: Any) -> Any:
    return lambda x, weight, bias: ours("matmul")(
        x, weight, bias=bias, transpose_b=True, **settings
    )


# --- in 8 bits ------------------------------------------------------------------------------------


def eight_bits(by_row: bool) -> Any:
    """a (rows, depth), b (depth, columns) as the transpose of a weight, and their scales."""

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
        rows, depth, columns = shape
        a, b = (_eight_bits(n, depth, dtype=dtype, device=device) for n in (rows, columns))
        counts = (rows, columns) if by_row else (1, 1)
        scales = (torch.rand(n, device=device) / depth for n in counts)
        return (a, b.t(), *scales, Half(half(device)))

    return make


class Half:
    """The dtype of the result, which `to_reference` leaves as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _eight_bits(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    if dtype is torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Half) -> Tensor:
    return ours("scaled_matmul")(a, b, scale_a, scale_b, out_dtype=out.dtype)


def own_scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Half) -> Tensor:
    wide = scale_a.dtype
    product = (a.to(wide) @ b.to(wide)) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return product if wide is torch.float64 else product.to(out.dtype)


def scaled_mm(fast: bool) -> Any:
    """Torch's own: cuBLASLt for 8-bit floats (`fast`: it adds up in fewer bits), _int_mm for int8,
    with the scales in kernels of their own."""

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Half) -> Tensor:
        if a.dtype is torch.int8:
            if fast:
                raise Absent("int8 is added up exactly either way")
            return (torch._int_mm(a, b) * scale_a.reshape(-1, 1) * scale_b).to(out.dtype)
        by_row = scale_a.numel() > 1
        scales = (
            (scale_a.reshape(-1, 1), scale_b.reshape(1, -1))
            if by_row
            else (scale_a.reshape(()), scale_b.reshape(()))
        )
        return torch._scaled_mm(
            a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=out.dtype, use_fast_accum=fast
        )

    return call


def int8_layer(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, depth, columns = shape
    weight = _eight_bits(columns, depth, dtype=torch.int8, device=device)
    x = randn(rows, depth, dtype=dtype, device=device)
    return x, weight, torch.rand(columns, device=device).to(dtype) / (64 * depth**0.5)


def own_int8_layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Widened first: sums of whole numbers do not fit into float16."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return ((x.to(wide) @ weight.to(wide).t()) * scale.to(wide)).to(x.dtype)


def int8_layer_work(shape: Shape, size: int, direction: str) -> Work:
    rows, depth, columns = shape
    return Work(depth * columns + rows * (depth + columns) * size, 2.0 * rows * depth * columns)


def unquantised() -> Rival:
    """The same layer with its weight in half precision: what int8 has to be faster than."""

    def make() -> Any:
        kept: dict[tuple[int, ...], Tensor] = {}

        def call(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            if weight.shape not in kept:
                kept[tuple(weight.shape)] = weight.to(x.dtype) * scale[:, None]
            return functional.linear(x, kept[tuple(weight.shape)])

        return call

    return Rival("cublas-half", make)


EPILOGUE = Targets(rival=CUBLAS_AND_EPILOGUE)
SCALED_MM = "torch._scaled_mm"
SCALED_RIVALS = (plain(SCALED_MM, scaled_mm(False)), plain(f"{SCALED_MM}-fast", scaled_mm(True)))

CASES = (
    Case(
        "matmul",
        "matmul",
        operands,
        ours("matmul"),
        torch.matmul,
        product_work,
        LARGE,
        ODD,
        tiny=(5, 7, 9),
        targets=Targets(rival="eager", times_rival=1 / 0.93),
    ),
    Case(
        "matmul_bias_gelu",
        "matmul",
        layer,
        times(activation="gelu_tanh"),
        own_gelu,
        product_work,
        LARGE,
        ODD,
        tiny=(5, 7, 9),
        rivals=(
            plain(CUBLAS, cublas),
            plain("cublaslt-gelu", cublaslt_gelu),
            product_and_epilogue(
                cublas, lambda y, x, w, bias: functional.gelu(y + bias, approximate="tanh")
            ),
        ),
        targets=EPILOGUE,
    ),
    Case(
        "matmul_gate_residual",
        "matmul",
        layer_and_gate,
        lambda x, w, bias, gate, residual: ours("matmul")(
            x, w, bias=bias, activation="silu", gate=gate, residual=residual, transpose_b=True
        ),
        own_gated,
        product_work,
        LARGE[1:],
        ODD[:2],
        tiny=(5, 7, 9),
        rivals=(
            plain(CUBLAS, cublas),
            product_and_epilogue(
                cublas,
                lambda y, x, w, bias, gate, residual: functional.silu(y + bias) * gate + residual,
            ),
        ),
        targets=EPILOGUE,
    ),
    Case(
        "matmul_few_rows",
        "matmul",
        layer,
        times(),
        functional.linear,
        product_work,
        FEW,
        FEW_ODD,
        tiny=(2, 519, 9),
        directions=(FORWARD,),
        rivals=(plain(CUBLAS, cublas),),
        targets=Targets(copy_share=0.8, rival="eager", times_rival=1.03),
    ),
    Case(
        "scaled_matmul",
        "scaled_matmul",
        eight_bits(by_row=False),
        scaled,
        own_scaled,
        product_work,
        LARGE[:3],
        ((1008, 1024, 1008), (17, 4096, 336)),
        tiny=(6, 32, 20),
        dtypes=EIGHT_BITS,
        directions=(FORWARD,),
        rivals=SCALED_RIVALS,
        targets=Targets(rival=SCALED_MM),
        layouts=("plain",),
        checks_usual=False,
    ),
    Case(
        "scaled_matmul_of_rows",
        "scaled_matmul",
        eight_bits(by_row=True),
        scaled,
        own_scaled,
        product_work,
        (*LARGE[:2], *FEW[:2]),
        ((1008, 1024, 1008), (3, 4096, 336), (17, 11008, 336)),
        tiny=(6, 32, 20),
        dtypes=EIGHT_BITS,
        directions=(FORWARD,),
        rivals=SCALED_RIVALS,
        targets=Targets(rival=SCALED_MM),
        layouts=("plain",),
        checks_usual=False,
    ),
    Case(
        "int8_weight_matmul",
        "int8_weight_matmul",
        int8_layer,
        ours("int8_weight_matmul"),
        own_int8_layer,
        int8_layer_work,
        (*FEW, (4096, 4096, 14336)),
        FEW_ODD,
        tiny=(3, 50, 24),
        rivals=(unquantised(),),
        targets=Targets(copy_share=0.8, least_bytes=16 << 20, rival="cublas-half"),
        layouts=("plain", "sliced"),
    ),
)
