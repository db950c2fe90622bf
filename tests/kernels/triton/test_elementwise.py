"""Chains of elementwise operations, and the chains of their gradients, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import chains, elementwise, launching
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
TWICE = ["elementwise_kernel", "elementwise_kernel"]

ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sgn, "square": torch.square,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "log": torch.log,
    "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": functional.silu,
    "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum,
}  # fmt: skip
POSITIVE = {"sqrt", "rsqrt", "log"}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def chain(*steps: chains.Step) -> Callable[..., Tensor]:
    return lambda *tensors: elementwise(steps, *tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE)
def test_operations_on_one(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(37, dtype=dtype)
    x = (x.abs() + 0.1 if name in POSITIVE else x).requires_grad_()
    check(name, chain(name), ONE[name], (x,), launches=TWICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TWO)
def test_operations_on_two(name: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 3, 11, dtype=dtype)
    b = torch.where(b < 0, b - 0.25, b + 0.25)
    b[0, :3] = a[0, :3]
    inputs = (a.requires_grad_(), b.requires_grad_())
    check(name, chain((name, 0, 1)), TWO[name], inputs, launches=TWICE)


def test_clamp() -> None:
    x = torch.tensor([-2.0, -1.0, 0.3, 0.5, 1.0, torch.nan, torch.inf], requires_grad=True)
    check("clamp", chain(("clamp", 0, -1.0, 0.5)), lambda x: x.clamp(-1.0, 0.5), (x,))


def test_tanh_of_small_numbers() -> None:
    x = torch.linspace(-1e-3, 1e-3, 50)
    check("tanh", chain("tanh"), torch.tanh, (x.requires_grad_(),))


@pytest.mark.parametrize("name", sorted(ONE))
def test_nan_and_infinities_of_one(name: str) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    if name == "gelu":  # torch's own gives NaN for infinity on some CPUs
        x = x[x != torch.inf]
    check(name, chain(name), ONE[name], (x.requires_grad_(),))


@pytest.mark.parametrize("name", sorted(TWO))
def test_nan_and_infinities_of_two(name: str) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    a, b = torch.meshgrid(special, special, indexing="ij")
    check(name, chain((name, 0, 1)), TWO[name], (a.requires_grad_(), b.requires_grad_()))


BROADCAST = [
    ((3, 5), (5,)), ((3, 5), (3, 1)), ((4, 1), (1, 6)), ((), (2, 3)), ((2, 1, 4, 1), (3, 1, 5)),
    ((2, 3, 4, 5, 1), (2, 1, 4, 1, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), BROADCAST)
def test_broadcasting(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    inputs = (leaf(*left), leaf(*right), leaf(1))
    ours = chain(("mul", 0, 1), ("add", 2, 3), "silu", ("sub", 5, 0))
    check(f"{left}", ours, lambda a, b, c: functional.silu(a * b + c) - a, inputs, launches=TWICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_used_twice(dtype: torch.dtype) -> None:
    def torchs(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.exp(x) * 0.25
        return inner * inner + inner / (1.0 + y.square()) - y

    ours = chain(
        ("exp", 0), ("mul", 2, 0.25), ("mul", 3, 3), ("square", 1), ("add", 1.0, 5), ("div", 3, 6),
        ("add", 4, 7), ("sub", 8, 1),
    )  # fmt: skip
    inputs = (leaf(9, 30, dtype=dtype), leaf(9, 30, dtype=dtype))
    check("twice", ours, torchs, inputs, launches=TWICE)


def test_a_tensor_that_does_not_enter_and_a_result_narrower_than_the_space() -> None:
    def torchs(x: Tensor, y: Tensor) -> Tensor:
        return x.square() + 0.0 * y

    check("unused", chain(("square", 0)), torchs, (leaf(1, 4), leaf(3, 4)), launches=TWICE)


def test_dtypes_are_promoted() -> None:
    a, b = leaf(3, 4, dtype=torch.float16), leaf(4)
    check("promoted", chain(("mul", 0, 1)), torch.mul, (a, b), launches=TWICE)
    assert elementwise([("mul", 0, 1)], a, b.half()).dtype is torch.float16


@pytest.mark.parametrize("layout", ["transposed", "crossed", "expanded", "strided", "permuted"])
def test_layouts(layout: str) -> None:
    base = torch.randn(6, 40, 12)
    a, b = {
        "transposed": (base.mT, base.mT.clone()),
        "crossed": (base.mT, torch.randn(6, 12, 40)),
        "expanded": (base[:1].expand(6, 40, 12), base),
        "strided": (base[..., ::2], base[..., 1::2]),
        "permuted": (base.permute(2, 0, 1), torch.randn(12, 1, 40)),
    }[layout]
    inputs = (a.requires_grad_(), b.detach().requires_grad_())
    check(layout, chain(("mul", 0, 1), "relu"), lambda a, b: torch.relu(a * b), inputs)


def test_the_result_lies_as_the_first_tensor_of_full_size_does() -> None:
    bias, x = torch.randn(1, 3, 1, 1), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert elementwise([("add", 0, 1)], bias, x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_incoming_gradients_of_any_layout(layout: str) -> None:
    a, b = leaf(6, 9), leaf(9)
    grad = {"expanded": torch.randn(6, 1).expand(6, 9), "transposed": torch.randn(9, 6).mT}[layout]
    got = torch.autograd.grad(elementwise([("mul", 0, 1)], a, b), (a, b), grad)
    right = torch.autograd.grad(a * b, (a, b), grad)
    torch.testing.assert_close(got, right)


def test_gradients_of_what_was_broadcast_are_summed_in_float32() -> None:
    x, scale = torch.full((3, 1), 300.0, dtype=torch.float16), leaf(1, dtype=torch.float16)
    grad = torch.tensor([[300.0], [-300.0], [2.0]], dtype=torch.float16)
    (got,) = torch.autograd.grad(elementwise([("mul", 0, 1)], x, scale), scale, grad)
    assert got.item() == 600.0  # of 90000 - 90000 + 600: more than float16 holds


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 5)])
def test_empty(shape: tuple[int, ...]) -> None:
    x, bias = leaf(*shape), leaf(1)
    out = elementwise([("add", 0, 1), "gelu"], x, bias)
    grads = torch.autograd.grad(out.sum(), (x, bias))
    assert out.shape == shape == grads[0].shape
    assert torch.equal(grads[1], torch.zeros(1))


def test_second_gradients() -> None:
    x, y = torch.rand(2, 7).add(0.5).unbind()
    steps = [("mul", 0, 1), "exp", "relu", ("maximum", 4, 1), ("clamp", 5, 0.0, 3.0)]

    def torchs(x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(torch.relu(torch.exp(x * y)), y).clamp(0.0, 3.0)

    found = []
    for compute in (chain(*steps), torchs):
        inputs = x.clone().requires_grad_(), y.clone().requires_grad_()
        first = torch.autograd.grad(compute(*inputs).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum(), inputs))
    torch.testing.assert_close(*found)


def test_slopes_have_no_gradient() -> None:
    x = leaf(3)
    (first,) = torch.autograd.grad(elementwise(["gelu"], x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gelu_slope has no gradient"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    x = torch.randn(3)
    with pytest.raises(KernelArgumentError, match=r"operation 'sigmod': .* mean 'sigmoid'\?"):
        elementwise(["sigmod"], x)
    with pytest.raises(KernelArgumentError, match="unknown operation 'share'"):
        elementwise([("share", 0, 0, 0)], x)
    with pytest.raises(KernelArgumentError, match="add takes 2 operands"):
        elementwise(["add"], x)
    with pytest.raises(KernelArgumentError, match="one of the 2 values before it, not 2"):
        elementwise(["relu", ("add", 0, 2)], x)
    with pytest.raises(KernelArgumentError, match="clamp takes a value and two constants"):
        elementwise([("clamp", 0, 0, 1.0)], x)
    with pytest.raises(KernelArgumentError, match="a chain has at least one step"):
        elementwise([], x)
    with pytest.raises(KernelArgumentError, match="a chain works on at least one tensor"):
        elementwise(["relu"])
    with pytest.raises(KernelArgumentError, match=r"tensor 1 has floats, not torch\.int64"):
        elementwise(["relu"], x, torch.arange(3))
    with pytest.raises(KernelArgumentError, match=r"shapes that broadcast, not \[3\], \[4\]"):
        elementwise([("add", 0, 1)], x, torch.randn(4))


@pytest.mark.plain
@pytest.mark.parametrize("name", [*ONE, *TWO, "clamp"])
def test_float64_is_computed_in_plain_torch(name: str) -> None:
    a, b = torch.rand(2, 4, dtype=torch.float64).add(0.1).unbind()
    step = (name, 0, 1) if name in TWO else (name, 0, 0.3, 0.6) if name == "clamp" else name
    inputs = (a.requires_grad_(), b.requires_grad_())
    with launching.watched() as names:
        assert torch.autograd.gradcheck(lambda *given: elementwise([step], *given), inputs)
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("name", [*ONE, *TWO, "clamp"])
def test_the_backward_written_in_plain_torch(name: str) -> None:
    tensors = [torch.rand(4, dtype=torch.float64).add(0.1).requires_grad_() for _ in range(2)]
    step = (name, 0, 1) if name in TWO else (name, 0, 0.3, 0.6) if name == "clamp" else name
    forward = chains.written([step], 2)
    (out,) = chains.computed(forward, tensors)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(out, tensors, grad, materialize_grads=True)
    backward = chains.read(str(chains.differentiated(forward, 2, [0, 1])))
    got = chains.computed(backward, [grad, *[one.detach() for one in tensors]])
    torch.testing.assert_close([one.expand(4) for one in got], list(right))


def test_the_operator_keeps_the_rules_of_torch() -> None:
    x, y = torch.randn(3, 4, 5).mT.requires_grad_(), leaf(5, 1)
    text = str(chains.written([("mul", 0, 1), "tanh"], 2))
    torch.library.opcheck(torch.ops.triton_kernels.elementwise.default, ([x, y], text, [0]))
