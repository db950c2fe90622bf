"""linear_cross_entropy: numbers against float64, and what is held in memory meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.triton_kernels import DTYPES, ON_A_CPU, check
from triton_kernels import launching, linear_cross_entropy
from triton_kernels.configurations.linear_cross_entropy import (
    CHUNK_BYTES,
    FEWEST_TOKENS,
    OF_GRADIENT,
    chunk,
)
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import linear_cross_entropy as family

Tensor = torch.Tensor
FORWARD, BACKWARD = "cross_entropy_forward_kernel", "cross_entropy_backward_kernel"
SCALED = "scaled_kernel"


def operands(
    tokens: int = 20, features: int = 16, classes: int = 37, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, dtype=dtype, requires_grad=True)
    target = torch.randint(classes, (tokens,))
    target[1::7] = -100
    return hidden, weight, target


def torchs_own(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    losses = functional.cross_entropy(logits, target.flatten(), **options)
    return losses.reshape(target.shape) if options.get("reduction") == "none" else losses


def check_loss(where: str, *inputs: Any, chunk: int, launches: Any = None, **options: Any) -> None:
    def ours(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias=bias, chunk=chunk, **options)

    def torchs(*inputs: Any) -> Tensor:
        return torchs_own(*inputs, **options)

    check(where, ours, torchs, inputs, launches=launches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    kernels = 3 * [FORWARD, BACKWARD]
    kernels += 3 * [FORWARD] if reduction == "none" else 2 * [SCALED]
    inputs = operands(dtype=dtype)
    check_loss(reduction, *inputs, chunk=8, launches=kernels, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_with_a_bias(reduction: str, smoothing: float) -> None:
    bias = torch.randn(37, requires_grad=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check_loss("bias", *operands(), bias, chunk=7, **options)


@pytest.mark.parametrize("ignored", [-100, 5])
def test_another_class_that_is_ignored(ignored: int) -> None:
    hidden, weight, target = operands()
    target = target.where(target >= 0, ignored)
    check_loss("ignored", hidden, weight, target, chunk=6, ignore_index=ignored)


@pytest.mark.parametrize("tokens", [1, 8, 16, 17])
def test_a_last_chunk_of_any_size(tokens: int) -> None:
    check_loss(f"{tokens}", *operands(tokens), chunk=8, reduction="sum")


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_more_dimensions(reduction: str) -> None:
    hidden, weight, target = operands(24)
    hidden = hidden.detach().reshape(4, 6, 16).transpose(0, 1).requires_grad_()
    target = target.reshape(6, 4)
    check_loss("batches", hidden, weight, target, chunk=10, reduction=reduction)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_layouts(layout: str) -> None:
    base = torch.randn(16, 32)
    hidden = {
        "transposed": base.t()[:, :16],
        "expanded": base[:1, :16].expand(16, 16),
        "strided": base[:, ::2],
    }[layout].requires_grad_()
    weight = torch.randn(16, 40).t().requires_grad_()
    target = torch.randint(40, (2 * len(hidden),))[::2]
    check_loss(layout, hidden, weight, target, chunk=9)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wants", ["hidden", "weight", "bias"])
def test_only_what_wants_a_gradient_has_one(wants: str, reduction: str) -> None:
    hidden, weight, target = operands()
    bias = torch.randn(37)
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        tensor.requires_grad_(name == wants)
    check_loss(wants, hidden, weight, target, bias, chunk=8, reduction=reduction)


def test_without_gradients_none_is_computed() -> None:
    hidden, weight, target = operands()
    with launching.watched() as names, torch.no_grad():
        linear_cross_entropy(hidden, weight, target, chunk=10)
    assert names == [FORWARD, FORWARD]


@pytest.mark.parametrize("scale", [2.0**15, 2.0**-14])
def test_a_loss_scale_comes_in_before_anything_is_rounded(scale: float) -> None:
    def scaled(loss: Tensor) -> Tensor:
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale

    check(
        "scaled",
        lambda *inputs: scaled(linear_cross_entropy(*inputs, chunk=8)),
        lambda *inputs: scaled(torchs_own(*inputs)),
        operands(dtype=torch.float16),
    )


def test_a_graph_that_is_used_twice() -> None:
    hidden, weight, target = operands()
    loss = linear_cross_entropy(hidden, weight, target, chunk=8)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_empty(reduction: str) -> None:
    hidden, weight, _ = operands(0)
    target = torch.empty(0, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
    own = torchs_own(hidden, weight, target, reduction=reduction)
    assert loss.shape == own.shape and torch.equal(loss.isnan(), own.isnan())
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert torch.equal(grads[1], torch.zeros_like(weight)) and grads[0].shape == hidden.shape


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nothing_counts(reduction: str) -> None:
    hidden, weight, target = operands()
    target.fill_(-100)
    check_loss("ignored", hidden, weight, target, chunk=8, reduction=reduction)


@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_special_numbers_stand_where_torch_has_them(special: float) -> None:
    hidden, weight, target = operands()
    with torch.no_grad():
        hidden[0, 3] = special
    check_loss("special", hidden, weight, target, chunk=8, reduction="none")
    with torch.no_grad():
        hidden[0, 3], hidden[1, 3] = 0.0, special  # of a token that is ignored
    check_loss("special", hidden, weight, target, chunk=8, reduction="none")


@ON_A_CPU
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_target_that_is_no_class_raises_as_in_torch(reduction: str) -> None:
    hidden, weight, target = operands()
    target[-1] = 37
    with pytest.raises(IndexError, match="Target 37 is out of bounds"):
        linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk=8)


def test_gradients_are_the_same_in_every_run() -> None:
    hidden, weight, target = operands(50)
    runs = [
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, target, chunk=16), (hidden, weight)
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- memory ---------------------------------------------------------------------------------------


_MEANINGS = {
    "sum": family.sum_meaning,
    "rows": family.rows_meaning,
    "backward": family.backward_meaning,
    "scaled": family.scaled_meaning,
}


class _Largest(TorchDispatchMode):
    """The largest tensor that any operator gives, also inside of the operators of this family."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "triton_kernels":
            meaning = _MEANINGS[func._schema.name.rpartition("_")[2]]
            with self:
                return meaning(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return found


@pytest.mark.plain
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_logits_of_all_tokens_never_exist(reduction: str) -> None:
    tokens, features, classes, at_once = 80, 10, 50, 20
    hidden, weight, target = operands(tokens, features, classes)
    bias = torch.randn(classes, requires_grad=True)
    with _Largest() as largest:
        loss = linear_cross_entropy(
            hidden, weight, target, bias=bias, reduction=reduction, chunk=at_once
        )
        loss.sum().backward()
    chunk_of_logits = at_once * classes
    assert largest.numbers <= max(chunk_of_logits, hidden.numel(), weight.numel())
    with _Largest() as largest:
        torchs_own(hidden, weight, target, bias)
    assert largest.numbers == tokens * classes  # what this test would see


@pytest.mark.plain
@pytest.mark.parametrize("tokens", [1, 1000, 4096, 8192, 10_000, 65_536])
@pytest.mark.parametrize("classes", [10, 32_000, 50_257, 128_256, 1_000_000])
@pytest.mark.parametrize("features", [0, 512, 4096])
def test_chunks(tokens: int, classes: int, features: int) -> None:
    at_once = chunk(tokens, classes, features, 2)
    assert at_once >= min(tokens, FEWEST_TOKENS) and at_once % 128 == 0
    most = max(CHUNK_BYTES, OF_GRADIENT * classes * features)
    assert at_once * classes * 2 <= most or at_once <= FEWEST_TOKENS
    several = -(-tokens // at_once)
    assert several == 1 or tokens - (several - 1) * at_once > at_once - 128 * several


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.plain
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_float64_is_computed_in_plain_torch(reduction: str) -> None:
    hidden, weight, target = operands(3, 2, 3, torch.float64)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, chunk=2, reduction=reduction, label_smoothing=0.1
        )

    with launching.watched() as names:
        assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_it_is_traced_whole_with_sizes_that_change(reduction: str) -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, target, chunk=8, reduction=reduction, label_smoothing=smoothing
        )

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens, smoothing in ((20, 0.1), (33, 0.2)):
        inputs = (*operands(tokens), smoothing)
        assert torch.allclose(compiled(*inputs), loss(*inputs))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    hidden, weight, target = operands()
    with pytest.raises(KernelArgumentError, match=r"weight is \(classes, features\), .* with 16"):
        linear_cross_entropy(hidden, weight.t(), target)
    with pytest.raises(KernelArgumentError, match=r"weight is \(classes, features\)"):
        linear_cross_entropy(hidden, weight.double(), target)
    with pytest.raises(KernelArgumentError, match=r"target is int64\[20\], not int64\[19\]"):
        linear_cross_entropy(hidden, weight, target[1:])
    with pytest.raises(KernelArgumentError, match=r"bias has one number for each of 37 classes"):
        linear_cross_entropy(hidden, weight, target, bias=torch.randn(16))
    with pytest.raises(KernelArgumentError, match=r"chunk is a number of tokens, not 0"):
        linear_cross_entropy(hidden, weight, target, chunk=0)
    with pytest.raises(KernelArgumentError, match=r"reduction is one of"):
        linear_cross_entropy(hidden, weight, target, reduction="max")


def test_the_operators_keep_the_rules_of_torch() -> None:
    hidden, weight, target = operands(6, 4, 9)
    inputs = (hidden, weight, None, target, -100, 0.0, 4)
    operators = torch.ops.triton_kernels
    torch.library.opcheck(operators.linear_cross_entropy_sum.default, (*inputs, True, True, False))
    torch.library.opcheck(operators.linear_cross_entropy_rows.default, inputs)
