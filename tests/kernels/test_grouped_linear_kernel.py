"""openmp_grouped_linear, called directly: rows[group] @ weight[group], gated or not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowering.native import library
from lowering.regions.grouped_linear import Gate
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.regions import kernels

Tensor = torch.Tensor
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# More than a panel, more than what is computed at once, few enough for sums without panels, none.
COUNTS = ((5, 0, 17, 1), (0, 0, 300), (1, 2, 3, 4), (64,), (0, 33, 0), (0, 0))


@dataclass(frozen=True)
class Problem:
    counts: tuple[int, ...] = (5, 0, 17, 1)
    inner: int = 64
    outputs: int = 96
    in_out: bool = False
    gate: Gate = Gate.NONE
    activation: str = "none"
    dtype: torch.dtype = torch.float32
    behind: int = 0  # rows of no group

    @property
    def tolerance(self) -> float:
        """Of the largest result: sums of floats, and one rounding."""
        return 2e-6 + torch.finfo(self.dtype).eps


def check(problem: Problem) -> None:
    p = problem
    rows = torch.randn(sum(p.counts) + p.behind, p.inner).to(p.dtype)
    sizes = (p.inner, p.outputs) if p.in_out else (p.outputs, p.inner)
    weight = (torch.randn(len(p.counts), *sizes) / p.inner**0.5).to(p.dtype)
    ends = torch.tensor(p.counts).cumsum(0).to(random.choice((torch.int32, torch.int64)))
    _, a, b = ACTIVATIONS[p.activation]
    act = list(ACTIVATIONS).index(p.activation)
    got = kernels().openmp_grouped_linear(
        rows, weight, ends, p.in_out, int(p.gate), act, float(a), float(b)
    )
    exact = wanted(p, rows.double(), weight.double())
    assert (got.shape, got.dtype) == (exact.shape, p.dtype), p
    if exact.numel():
        assert (got - exact).abs().max() <= p.tolerance * exact.abs().max().clamp(min=1), p


def wanted(p: Problem, rows: Tensor, weight: Tensor) -> Tensor:
    apply, *_ = ACTIVATIONS[p.activation]
    parts, first = [], 0
    for group, count in enumerate(p.counts):
        matrix = weight[group] if p.in_out else weight[group].T
        sums = rows[first : first + count] @ matrix
        first += count
        if p.gate is Gate.NONE:
            parts.append(apply(sums))
        else:
            halves = sums.chunk(2, dim=1)
            factor, other = halves if p.gate is Gate.FIRST else halves[::-1]
            parts.append(apply(factor) * other)
    return torch.cat([*parts, rows.new_zeros(p.behind, parts[0].shape[1])])


def takes(dtype: torch.dtype) -> bool:
    kernels()
    return dtype is torch.float32 or library.multiplies(dtype)


@pytest.fixture(params=FLOATS, ids=str)
def dtype(request: Any) -> torch.dtype:
    if not takes(request.param):
        pytest.skip(f"{request.param} is not multiplied here")
    return request.param


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups(dtype: torch.dtype, counts: tuple[int, ...], in_out: bool) -> None:
    for gate in Gate:
        check(Problem(counts, in_out=in_out, gate=gate, dtype=dtype, activation="silu"))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(dtype: torch.dtype, activation: str) -> None:
    check(Problem(activation=activation, dtype=dtype))
    check(Problem(activation=activation, dtype=dtype, gate=Gate.SECOND))


@pytest.mark.parametrize("inner", [1, 2, 7, 33, 300, 1024])
@pytest.mark.parametrize("outputs", [2, 10, 34, 290])
def test_odd_sizes(dtype: torch.dtype, inner: int, outputs: int) -> None:
    for in_out in (False, True):
        for gate in (Gate.NONE, Gate.FIRST):
            check(Problem((3, 20, 7), inner, outputs, in_out, gate, "gelu_erf", dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_any(seed: int) -> None:
    random.seed(seed)
    pick = random.choice
    check(
        Problem(
            counts=tuple(
                pick((0, 0, 1, 3, 8, 15, 16, 31, 90, 270)) for _ in range(pick((1, 3, 9)))
            ),
            inner=pick((3, 16, 64, 100, 257, 768)),
            outputs=2 * pick((1, 8, 23, 64, 129, 200)),
            in_out=pick((False, True)),
            gate=pick(list(Gate)),
            activation=pick(list(ACTIVATIONS)),
            dtype=pick([dtype for dtype in FLOATS if takes(dtype)]),
            behind=pick((0, 0, 5)),
        )
    )


def test_rows_of_no_group_are_zeros(dtype: torch.dtype) -> None:
    """As in transformers' own operator, whose results are read there and multiplied by 0."""
    check(Problem((2, 3), dtype=dtype, behind=4))
    check(Problem((0, 0), dtype=dtype, behind=4))


def test_memory_in_pieces() -> None:
    rows, weight = torch.randn(20, 128)[:, ::2], torch.randn(3, 64, 80)[:, :, ::2].mT
    ends = torch.tensor([4, 9, 20, 0])[:3]
    assert not weight.is_contiguous()
    got = kernels().openmp_grouped_linear(rows, weight, ends, False, 0, 0, 0.0, 0.0)
    plain = (rows.contiguous(), weight.contiguous(), ends)
    assert torch.equal(got, kernels().openmp_grouped_linear(*plain, False, 0, 0, 0.0, 0.0))


@pytest.mark.parametrize("ends", [[5, 3, 20], [5, 8, 21], [-1, 8, 20]], ids=str)
def test_ends_that_are_no_groups(ends: list[int]) -> None:
    rows, weight = torch.randn(20, 64), torch.randn(3, 32, 64)
    with pytest.raises(RuntimeError, match="of a grouped product ends at row"):
        kernels().openmp_grouped_linear(rows, weight, torch.tensor(ends), False, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "weight", "groups", "gate"),
    [
        ((20, 64), (3, 32, 60), 3, 0),
        ((20, 64), (3, 32, 64), 4, 0),
        ((20, 64), (32, 64), 3, 0),
        ((2, 20, 64), (3, 32, 64), 3, 0),
        ((20, 64), (3, 33, 64), 3, 1),
    ],
)
def test_sizes_that_do_not_fit(
    rows: tuple[int, ...], weight: tuple[int, ...], groups: int, gate: int
) -> None:
    ends = torch.full((groups,), 20)
    with pytest.raises(RuntimeError, match="a grouped product of"):
        kernels().openmp_grouped_linear(
            torch.randn(rows), torch.randn(weight), ends, False, gate, 0, 0.0, 0.0
        )


def test_other_kinds_of_numbers() -> None:
    doubles = torch.randn(4, 8).double(), torch.randn(1, 8, 8).double(), torch.tensor([4])
    with pytest.raises(RuntimeError, match="grouped products of Double"):
        kernels().openmp_grouped_linear(*doubles, False, 0, 0, 0.0, 0.0)
    mixed = torch.randn(4, 8), torch.randn(1, 8, 8).bfloat16(), torch.tensor([4])
    with pytest.raises(RuntimeError, match="has weights of BFloat16"):
        kernels().openmp_grouped_linear(*mixed, False, 0, 0, 0.0, 0.0)


def test_several_threads_at_once() -> None:
    def run(seed: int) -> None:
        for counts in COUNTS[:3]:
            check(Problem(counts, inner=96 + seed, gate=Gate.FIRST, activation="silu"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(8)))
