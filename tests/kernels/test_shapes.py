"""What tracing is told of the operators is what they return: shapes, dtypes, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowering.convolution_steps import Kind, Step
from tests.kernels.test_convolution_kernel import PROBLEMS, Problem, norm_of
from tests.support.regions import kernels

CHECKS = ("test_schema", "test_faketensor")


def opcheck(name: str, *args: Any) -> None:
    operator = getattr(kernels(), name).default
    torch.library.opcheck(operator, args, test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(13,), (3, 13), (2, 3, 13), (2, 1, 3, 13), (0, 13)], ids=str)
def test_linear(shape: tuple[int, ...]) -> None:
    opcheck(
        "openmp_linear", torch.randn(shape), torch.randn(5, 13), torch.randn(5),
        None, None, torch.randn(*shape[:-1], 5), 1, 0.0, 0.0,
    )  # fmt: skip


def test_linears() -> None:
    gate, up, other = torch.randn(5, 13), torch.randn(5, 13), torch.randn(13, 7)
    tensors = [gate, up, other, torch.randn(7)]
    integers = [4, 0, -1, 0, 0, 0, 0, 17, -1]
    opcheck("openmp_linears", torch.randn(2, 3, 13), tensors, integers, [])
    opcheck("openmp_gated_linear", torch.randn(2, 3, 13), [gate, up], [4, 0, -1, 0, 0, 0], [])


@pytest.mark.parametrize("gate", [0, 2])
@pytest.mark.parametrize("in_out", [False, True])
def test_grouped_linear(in_out: bool, gate: int) -> None:
    rows, weight = torch.randn(9, 13), torch.randn(3, *((13, 6) if in_out else (6, 13)))
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    opcheck("openmp_grouped_linear", rows, weight, ends, in_out, gate, 4, 0.0, 0.0)
    opcheck("openmp_gathered_linear", rows, weight, torch.arange(18) % 3, in_out)


@pytest.mark.parametrize("with_end", [False, True])
def test_embedding_bags(with_end: bool) -> None:
    tables, numbers = [torch.randn(9, 13), torch.randn(5, 4)], [torch.arange(5)] * 2
    begins = [torch.tensor([0, 2, 2, 5])] * 2
    opcheck("openmp_embedding_bags", tables, numbers, begins, [], [-1, 3], True, with_end)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (1, 0, 3, 2)], ids=str)
def test_group_norm(order: tuple[int, ...]) -> None:
    image = torch.randn(2, 4, 5, 6).permute(order)
    opcheck("openmp_group_norm", image, None, None, 1, 1e-5, 4, 0.0, 0.0)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_convolution(problem: Problem) -> None:
    x, weight = problem.tensors()
    opcheck(
        "openmp_convolution", x, weight, None, *norm_of(problem.out), 1e-3,
        *problem.geometry(), None, None, None, 4, 0.0, 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("size", [(12,), (9, 12)], ids=["1-D", "2-D"])
def test_convolutions(size: tuple[int, ...]) -> None:
    dims = len(size)
    first, second = torch.randn(8, 5, *[1] * dims), torch.randn(8, 1, *[3] * dims)
    steps = [
        Step(
            Kind.CONVOLUTION,
            0,
            tensors=[first, torch.randn(8), *[None] * 4],
            window=[1, 1, 0, 0, 0, 0, 1, 1],
            groups=1,
            act=4,
        ),
        Step(
            Kind.CONVOLUTION,
            2,
            tensors=[second, None, *norm_of(8)],
            window=[2, 2, 0, 1, 2, 1, 1, 1],
            groups=8,
            act=1,
            numbers=(1e-3, 0.0, 0.0),
        ),
    ]
    check_steps(steps, *torch.randn(2, 2, 5, *size))


def check_steps(steps: list[Step], x: torch.Tensor, other: torch.Tensor) -> None:
    tensors = [tensor for step in steps for tensor in step.tensors if tensor is not None]
    text = " ".join(step.text(lambda number: -1 if number is None else number) for step in steps)
    opcheck("openmp_convolutions", x, tensors, text, [other])


@pytest.mark.parametrize("kind", Kind)
def test_what_is_between_convolutions(kind: Kind) -> None:
    """Two images in channels 0..2 and 2..7 of one, and one thing that is done to it."""
    parts = [Step(Kind.PART, 0, extent=(0, 7)), Step(Kind.PART, 1, 2, extent=(2, 7))]
    extent = {Kind.SLICE: (3, 4), Kind.PART: (0, 7), Kind.CONVOLUTION: (0, 0)}.get(kind, (2, 3))
    weight = torch.randn(7, 1, 3, 3) if kind is Kind.CONVOLUTION else None
    tensors = [weight, None, *(norm_of(7) if kind is Kind.POINTWISE else [None] * 4)]
    window = [2, 2, 0, 1, 1, 0, 1, 1]
    last = Step(kind, 3, tensors=tensors, window=window, groups=7, extent=extent)
    behind = [Step(Kind.MEAN, 4)] if kind is Kind.SLICE else []  # which is not the last one
    x, other = torch.randn(2, 2, 9, 12), torch.randn(2, 5, 9, 12)
    check_steps([*parts, last, *behind], x, other)


@pytest.mark.parametrize("size", [(12,), (9, 12)], ids=["1-D", "2-D"])
def test_transposed_convolution(size: tuple[int, ...]) -> None:
    dims = len(size)
    x, weight = torch.randn(2, 5, *size), torch.randn(5, 8, *[4] * dims)
    geometry = ([3] * dims, [1] * dims, [2] * dims)
    arguments = (x, weight, torch.randn(8), *norm_of(8), 1e-3, *geometry, 1, 0.0, 0.0)
    opcheck("openmp_transposed_convolution", *arguments)


@pytest.mark.parametrize("lie", ["one head after the other", "side by side"])
def test_attention(lie: str) -> None:
    q, k, v = (torch.randn(2, 6, 20, 16) for _ in range(3))
    if lie == "side by side":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    for mask in (None, torch.rand(20, 20) > 0.5, torch.randn(2, 1, 1, 20)):
        opcheck("mha_attention", q, k, v, mask, mask is None, 0.3)
    opcheck("mha_attention", q[:, :, :1], k[:, :2], v[:, :2], None, False, 0.3)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("states", [1, 2])
def test_recurrent(batch_first: bool, states: int) -> None:
    gates = {1: 3, 2: 4}[states]
    weights = [torch.randn(gates * 7, 5), torch.randn(gates * 7, 7)] * 2
    state = [torch.randn(2, 3, 7) for _ in range(states)]
    x = torch.randn(*(3, 4) if batch_first else (4, 3), 5)
    cell = {1: 1, 2: 0}[states]
    opcheck("openmp_recurrent", x, state, weights, cell, False, True, batch_first)
