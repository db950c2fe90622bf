"""matmul with everything after it, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import architectures, launching, matmul
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families.matmul import precision_of

Tensor = torch.Tensor
TILED, VECTOR, COMBINE = (f"matmul_{kind}_kernel" for kind in ("tiled", "vector", "combine"))
EPILOGUE = "matmul_epilogue_backward_kernel"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: torch.relu(x).square(),
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def times(**more: Any) -> Callable[..., Tensor]:
    return lambda a, b: matmul(a, b, **more)


# (rows, depth, columns): which kernels run forward, and for the gradients of a and b
SHAPES = {
    (5, 7, 9): [TILED] * 3,
    (1, 300, 40): [VECTOR, VECTOR, TILED],
    (3, 519, 17): [VECTOR, COMBINE, VECTOR, TILED],
    (16, 519, 33): [TILED, COMBINE, TILED, TILED],
    (70, 40, 3): [TILED] * 3,
    (1, 1, 1): [VECTOR] * 3,
    (130, 48, 75): [TILED] * 3,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, depth, columns = shape
    inputs = (randn(rows, depth, dtype=dtype), randn(depth, columns, dtype=dtype))
    check(f"{shape}", matmul, torch.matmul, inputs, launches=SHAPES[shape])


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_a_weight_as_linear_layers_have_it(rows: int) -> None:
    inputs = (randn(rows, 70), randn(20, 70), randn(20))
    check(
        f"{rows} rows",
        lambda x, weight, bias: matmul(x, weight, bias=bias, transpose_b=True),
        functional.linear,
        inputs,
    )


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(activation: str, kept: bool) -> None:
    """In the order that the documentation gives. What is not kept is worked out again."""
    act = ACTIVATIONS[activation]

    def kernel(a: Tensor, b: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        if kept:
            more = {"bias": bias, "gate": gate, "residual": residual}
            return matmul(a, b, activation=activation, **more)
        op = torch.ops.triton_kernels.matmul_forward.default
        batched = (a[None], b[None], bias, gate[None], residual[None])
        return op(*batched, activation, a.dtype, "", False)[0][0]

    inputs = (randn(11, 20, scale=0.5), randn(20, 18, scale=0.5), randn(18))
    beside = (randn(11, 18), randn(11, 18))
    check(
        f"{activation}",
        kernel,
        lambda a, b, bias, gate, residual: act(a @ b + bias) * gate + residual,
        (*inputs, *beside),
        launches=[TILED, EPILOGUE, TILED, TILED, *([] if kept else [TILED])],
    )


@pytest.mark.parametrize("scale", [1e-4, 1.0])
@pytest.mark.parametrize("activation", ["gelu_tanh", "tanh", "silu"])
def test_tiny_and_large_numbers_are_activated(activation: str, scale: float) -> None:
    inputs = (randn(3, 24), randn(24, 20, scale=scale))
    own = ACTIVATIONS[activation]
    check(f"{scale}", times(activation=activation), lambda a, b: own(a @ b), inputs)


@pytest.mark.parametrize("rows", [2, 5])
def test_an_epilogue_after_a_divided_depth(rows: int) -> None:
    def own(a: Tensor, b: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        return functional.silu(a @ b + bias) * gate

    inputs = (randn(rows, 519), randn(519, 20), randn(20), randn(20))
    check(
        "divided",
        lambda a, b, bias, gate: matmul(a, b, bias=bias, gate=gate, activation="silu"),
        own,
        inputs,
        launches=[*([VECTOR, COMBINE] * (rows < 5) or [TILED, COMBINE]), EPILOGUE]
        + [VECTOR if rows < 5 else TILED, TILED],
    )


def test_only_a_bias() -> None:
    inputs = (randn(300, 16, dtype=torch.float16), randn(16, 20, dtype=torch.float16))
    check(
        "bias",
        lambda a, b, bias: matmul(a, b, bias=bias),
        lambda a, b, bias: a @ b + bias,
        (*inputs, randn(20, dtype=torch.float16)),
        launches=[TILED, EPILOGUE, TILED, TILED],
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 5, 8), (8, 9)),
        ((4, 5, 8), (4, 8, 9)),
        ((2, 1, 2, 8), (3, 8, 9)),
        ((5, 8), (3, 8, 9)),
    ],
)
def test_batches(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    out = torch.broadcast_shapes(left[:-2], right[:-2])
    inputs = (randn(*left), randn(*right), randn(*out[-1:], 1, 9), randn(9))
    check(
        f"{left} @ {right}",
        lambda a, b, gate, beside: matmul(a, b, gate=gate, residual=beside, activation="relu"),
        lambda a, b, gate, beside: torch.relu(a @ b) * gate + beside,
        inputs,
    )


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "sliced"])
def test_layouts(layout: str, rows: int) -> None:
    def laid(*shape: int) -> Tensor:
        if layout == "transposed":
            return torch.randn(shape[::-1]).mT.requires_grad_()
        if layout == "expanded":
            return torch.randn(1, shape[1]).expand(shape).requires_grad_()
        base = torch.randn(2 * shape[0] + 1, 2 * shape[1] + 1)
        cut = base[::2, ::2] if layout == "strided" else base[1 : shape[0] + 1, 2:]
        return cut[: shape[0], : shape[1]].requires_grad_()

    inputs = (laid(rows, 50), laid(50, 24), laid(rows, 24), laid(rows, 24))
    check(
        layout,
        lambda a, b, gate, residual: matmul(a, b, gate=gate, residual=residual),
        lambda a, b, gate, residual: a @ b * gate + residual,
        inputs,
    )


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (7, 0, 5)])
def test_empty(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    a, b, bias, gate = randn(rows, depth), randn(depth, columns), randn(columns), randn(columns)
    out = matmul(a, b, bias=bias, gate=gate, activation="sigmoid")
    own = torch.sigmoid(a @ b + bias) * gate
    torch.testing.assert_close(out, own)
    into = (a, b, bias, gate)
    grads = torch.autograd.grad(out, into, torch.ones_like(out))
    torch.testing.assert_close(grads, torch.autograd.grad(own, into, torch.ones_like(own)))


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("activation", ["", "relu", "sigmoid", "squared_relu"])
def test_nan_and_infinities_stand_where_torch_has_them(activation: str, rows: int) -> None:
    a, b = randn(rows, 20), randn(20, 18)
    with torch.no_grad():
        a[0, 3], b[4, 5], b[5, 6], b[19, 17] = torch.nan, torch.inf, -torch.inf, torch.nan
    own = ACTIVATIONS.get(activation, lambda x: x)
    check("special", times(activation=activation or None), lambda a, b: own(a @ b), (a, b))


def test_float32_out_of_half_precision() -> None:
    inputs = (randn(8, 40, dtype=torch.float16), randn(40, 20, dtype=torch.float16))
    check(
        "out_dtype", times(out_dtype=torch.float32), lambda a, b: a.float() @ b.float(), inputs[:2]
    )


def test_sums_do_not_overflow_half_precision() -> None:
    a, b = torch.full((5, 64), 60.0).half(), torch.full((64, 20), 30.0).half()
    got = matmul(a, b, residual=torch.full((20,), -60000.0).half())
    assert bool((got.float() - (64 * 1800 - 60000)).abs().max() < 64)


def test_gradients_are_the_same_in_every_run() -> None:
    a, b = randn(6, 519), randn(519, 20)
    runs = [torch.autograd.grad(matmul(a, b).sum(), (a, b)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_gradients_only_where_they_are_wanted() -> None:
    a, b = randn(6, 20), randn(20, 10)
    with launching.watched() as names:
        matmul(a, b.detach(), bias=randn(10).detach(), activation="relu").sum().backward()
    assert sorted(names) == sorted([TILED, EPILOGUE, TILED])
    assert b.grad is None


@pytest.mark.plain
def test_the_precision_of_float32_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    half, single = torch.float16, torch.float32
    sm90, gfx942 = architectures.named("sm90"), architectures.named("gfx942")
    assert precision_of(single, "", sm90) == "ieee"
    assert precision_of(single, "tf32", sm90) == "tf32"
    assert precision_of(half, "tf32", sm90) == precision_of(single, "tf32", gfx942) == "ieee"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert precision_of(single, "", sm90) == "tf32"
        assert precision_of(single, "ieee", sm90) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    a, b = torch.randn(2, 4), torch.randn(4, 3)
    wrong: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any]]] = [
        ("b has a row for each of a's 4 columns", (a, b.mT), {}),
        ("b is of a's torch.float32", (a, b.half()), {}),
        ("a has at least two dimensions", (a[0], b), {}),
        ("batches of a and b broadcast", (a.expand(2, 2, 4), b.expand(3, 4, 3)), {}),
        ("bias has one number for each of 3", (a, b), {"bias": torch.randn(4)}),
        (r"gate broadcasts to \[2, 3\]", (a, b), {"gate": torch.randn(2, 4)}),
        (r"residual broadcasts to \[2, 3\]", (a, b), {"residual": torch.randn(1, 2, 3)}),
        ("activation is one of relu, gelu", (a, b), {"activation": "swish"}),
        ("precision is 'ieee' or 'tf32'", (a, b), {"precision": "high"}),
        ("out_dtype is a dtype of floats", (a, b), {"out_dtype": torch.int8}),
    ]
    for message, given, more in wrong:
        with pytest.raises(KernelArgumentError, match=message):
            matmul(*given, **more)


@pytest.mark.plain
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_float64_is_computed_in_plain_torch(activation: str | None) -> None:
    wide = [randn(3, 4), randn(4, 5), randn(5), randn(3, 5), randn(5)]
    a, b, bias, gate, residual = (one.detach().double().requires_grad_() for one in wide)

    def compute(*given: Tensor) -> Tensor:
        a, b, bias, gate, residual = given
        return matmul(a, b, bias=bias, gate=gate, residual=residual, activation=activation)

    with launching.watched() as names:
        assert torch.autograd.gradcheck(compute, (a, b, bias, gate, residual))
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_the_plain_meaning_of_the_way_back(activation: str) -> None:
    given = [torch.randn(size).double() for size in ((2, 3, 4), (2, 4, 5), (5,), (2, 3, 5))]
    a, b, bias, gate = (one.requires_grad_() for one in given)
    from triton_kernels.families import matmul as family

    out, pre = family.matmul_meaning(a, b, bias, gate, None, activation, a.dtype, "", True)
    grad = torch.randn_like(out)
    true = torch.autograd.grad(out, (a, b, bias, gate), grad)
    got = family.backward_meaning(grad, a, b, pre, gate, activation, "", [True] * 4)
    torch.testing.assert_close(got, true)


def test_it_is_traced_whole() -> None:
    def layer(a: Tensor, b: Tensor, gate: Tensor) -> Tensor:
        return matmul(a, b, gate=gate, activation="silu", transpose_b=True)

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = (randn(2, 5, 12), randn(9, 12), randn(9))
    check("traced", traced, lambda a, b, gate: functional.silu(a @ b.mT) * gate, inputs)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    a, b, bias = randn(1, 6, 8), randn(1, 8, 5), randn(5)
    more = (None, None, "silu", torch.float32, "", True)
    torch.library.opcheck(torch.ops.triton_kernels.matmul_forward.default, (a, b, bias, *more))
