"""cross_entropy, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, ON_A_CPU, check
from triton_kernels import cross_entropy, launching
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
SHAPES = [(1, 1), (3, 2), (20, 10), (7, 129), (2, 1000), (3, 20000)]  # the last in parts
KERNELS = ["cross_entropy_forward_kernel", "cross_entropy_backward_kernel"]


def operands(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(shape, dtype=dtype)
    targets = torch.randint(shape[1], shape[:1] + shape[2:])
    return logits.requires_grad_(), targets


def check_loss(where: str, logits: Tensor, target: Tensor, **options: Any) -> None:
    weight = options.pop("weight", None)

    def ours(logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        return cross_entropy(logits, target, weight=weight, **options)

    def torchs(logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        return functional.cross_entropy(logits, target, weight, **options)

    check(where, ours, torchs, (logits, target, weight), launches=KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_loss(f"{shape}", *operands(*shape, dtype=dtype))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_options(reduction: str, smoothing: float, weighted: bool) -> None:
    logits, target = operands(9, 37)
    target[2], target[5] = -100, 7
    weight = torch.rand(37) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    check_loss("options", logits, target, **options)
    check_loss("ignoring a class", logits, target.clamp_min(7), ignore_index=7, **options)


@pytest.mark.parametrize("classes", [10, 9000])
def test_smoothed_and_weighted_rows_in_parts(classes: int) -> None:
    logits, target = operands(3, classes)
    weight = torch.rand(classes)
    check_loss("parts", logits, target, weight=weight, label_smoothing=0.3)


def test_one_row_without_a_dimension_of_rows() -> None:
    check_loss("one row", torch.randn(11, requires_grad=True), torch.tensor(4))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_more_dimensions(reduction: str) -> None:
    logits, target = operands(2, 5, 3, 4)
    check_loss("images", logits, target, reduction=reduction)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "sliced"])
def test_layouts(layout: str) -> None:
    base = torch.randn(10, 12)
    logits = {
        "transposed": base.t(),
        "expanded": base[:1].expand(10, 12),
        "strided": base[::2, ::3],
        "sliced": base[2:7, 1:],
    }[layout].requires_grad_()
    target = torch.randint(logits.shape[1], (2 * logits.shape[0],))[::2]
    check_loss(layout, logits, target, reduction="none")


@pytest.mark.parametrize("highest", [5.0, 12.0, 30.0, 100.0])
def test_rows_that_are_nearly_sure_keep_every_digit(highest: float) -> None:
    logits, target = operands(6, 50)
    with torch.no_grad():
        logits.clamp_(-4, 4)[torch.arange(6), target] = highest
    wide = logits.detach().double().requires_grad_()
    loss = cross_entropy(logits, target, reduction="none")
    true = functional.cross_entropy(wide, target, reduction="none")
    # By the other classes: for the highest, float64 has no digits left of 1 - softmax, either.
    odds = (wide - highest).exp().scatter(1, target[:, None], 0.0).sum(1)
    assert torch.allclose(loss.double(), torch.log1p(odds), rtol=3e-6, atol=1e-40)
    if highest < 20:
        assert torch.allclose(true, torch.log1p(odds), rtol=1e-6)
    (got,) = torch.autograd.grad(loss.sum(), logits)
    of_true = got.gather(1, target[:, None])[:, 0]
    assert torch.allclose(of_true.double(), -odds / (1 + odds), rtol=3e-6, atol=1e-40)
    assert torch.allclose(got.sum(1), torch.zeros(6), atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_empty(reduction: str) -> None:
    check = torch.randn(0, 8, requires_grad=True)
    loss = cross_entropy(check, torch.empty(0, dtype=torch.int64), reduction=reduction)
    torchs = functional.cross_entropy(check, torch.empty(0, dtype=torch.int64), reduction=reduction)
    assert torch.equal(loss.isnan(), torchs.isnan()) and loss.shape == torchs.shape
    (grad,) = torch.autograd.grad(loss.sum(), check)
    assert grad.shape == check.shape


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nothing_counts(reduction: str) -> None:
    logits, _ = operands(4, 9)
    check_loss("ignored", logits, torch.full((4,), -100), reduction=reduction)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("classes", [40, 9000])
def test_nan_and_infinities_stand_where_torch_has_them(classes: int, smoothing: float) -> None:
    logits = torch.randn(10, classes)
    target = torch.full((10,), 5)
    logits[0, 3], logits[1, 5] = torch.nan, torch.nan
    logits[2, 3], logits[3, 5] = torch.inf, torch.inf
    logits[4, 3], logits[5, 5] = -torch.inf, -torch.inf
    logits[6] = -torch.inf
    logits[7, 3], target[7] = torch.nan, -100
    logits[8, :-1] = -torch.inf  # only the last part has a number
    options = {"reduction": "none", "label_smoothing": smoothing}
    check_loss("special", logits.requires_grad_(), target, **options)


def test_large_numbers_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 2e4], [-6e4, -6e4, -6e4]], dtype=torch.float16)
    check_loss("large", logits.requires_grad_(), torch.tensor([1, 2]), reduction="none")


def test_the_logits_are_left_as_they_are() -> None:
    logits, target = operands(4, 30)
    before = logits.detach().clone()
    cross_entropy(logits, target).backward()
    assert torch.equal(logits, before)


def test_rows_farther_apart_than_32_bits_count() -> None:
    memory = torch.empty(3 * 2**30 + 8, dtype=torch.float16)  # only what is written takes space
    logits = memory.as_strided((4, 8), (2**30, 1))
    logits.copy_(torch.randn(4, 8))
    check_loss("far apart", logits.requires_grad_(), torch.tensor([3, 1, 7, 0]))


@ON_A_CPU
@pytest.mark.parametrize("target", [12, -1])
def test_a_target_that_is_no_class_raises_as_in_torch(target: int) -> None:
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        cross_entropy(torch.randn(2, 12), torch.tensor([3, target]))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_target_that_is_no_class_reads_nothing_and_gives_nan(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where nobody looks at the numbers before."""
    from triton_kernels.families import cross_entropy as family

    monkeypatch.setattr(family, "_demand_classes", lambda *_: None)
    logits = torch.randn(5, 12, requires_grad=True)
    target = torch.tensor([3, 12, -1, 2**40, -(2**40)])
    loss = cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, True, True, True]
    assert grad.isnan().all(1).tolist() == [False, True, True, True, True]


def test_gradients_are_the_same_in_every_run() -> None:
    logits, target = operands(50, 64)
    runs = [torch.autograd.grad(cross_entropy(logits, target), logits) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])


@pytest.mark.plain
def test_probabilities_and_float64_are_left_to_torch() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 6, -100])
    with launching.watched() as names:
        assert torch.autograd.gradcheck(
            lambda x: cross_entropy(x, target, label_smoothing=0.1), (logits,)
        )
        probabilities = torch.rand(3, 7).softmax(-1)
        got = cross_entropy(torch.ones(3, 7), probabilities)
    assert torch.equal(got, functional.cross_entropy(torch.ones(3, 7), probabilities))
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_meaning_of_the_operators(smoothing: float) -> None:
    from triton_kernels.families.cross_entropy import backward_meaning, forward_meaning

    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target, weight = torch.tensor([1, 6, -100, 0, 3]), torch.rand(7, dtype=torch.float64)
    losses, shares, lse, doubt = forward_meaning(logits, target, weight, -100, smoothing)
    grad = torch.randn(5, dtype=torch.float64)
    (true,) = torch.autograd.grad(losses, logits, grad)
    with torch.no_grad():
        got = backward_meaning(grad, logits, target, weight, lse, doubt, -100, smoothing)
    assert torch.allclose(got, true)
    assert torch.equal(shares, torch.where(target >= 0, weight[target.clamp_min(0)], 0.0))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    logits, target = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(KernelArgumentError, match=r"reduction is one of none, mean, sum, not max"):
        cross_entropy(logits, target, reduction="max")
    with pytest.raises(KernelArgumentError, match=r"label_smoothing is between 0 and 1, not 2"):
        cross_entropy(logits, target, label_smoothing=2.0)
    with pytest.raises(KernelArgumentError, match=r"target is int64\[2\] .* not int64\[1\]"):
        cross_entropy(logits, target[:1])
    with pytest.raises(KernelArgumentError, match=r"weight has one number for each of 4 classes"):
        cross_entropy(logits, target, weight=torch.randn(5))
    with pytest.raises(KernelArgumentError, match="probabilities"):
        cross_entropy(logits, torch.rand(2, 5))
    with pytest.raises(KernelArgumentError, match="logits is a tensor of floats"):
        cross_entropy(torch.ones(2, 4, dtype=torch.int32), target)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    logits, target = operands(3, 20)
    operator = torch.ops.triton_kernels.cross_entropy_forward.default
    torch.library.opcheck(operator, (logits, target, None, -100, 0.1))
