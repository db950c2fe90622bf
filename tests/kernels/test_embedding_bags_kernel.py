"""openmp_embedding_bags, called directly: sums and means of bags, of all widths, on all threads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.regions import kernels

Tensor = torch.Tensor
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Less than a vector, whole ones, strips of eight and what is left, on every instruction set.
WIDTHS = (1, 3, 8, 16, 31, 64, 100, 128, 257)


def _bags(count: int, rows: int, longest: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, longest + 1, (count,))
    begins = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return torch.randint(0, rows, (int(begins[-1]),)), begins


def _wanted(
    table: Tensor, numbers: Tensor, begins: Tensor, factors: Tensor, padding: int, mean: bool
) -> Tensor:
    result = torch.zeros(len(begins) - 1, table.shape[1], dtype=torch.float64)
    for bag in range(len(begins) - 1):
        own = slice(int(begins[bag]), int(begins[bag + 1]))
        kept = numbers[own] != padding
        read = (table.double()[numbers[own]] * factors.double()[own, None])[kept]
        result[bag] = read.sum(0) / (max(len(read), 1) if mean else 1)
    return result


def check(widths: Sequence[int], dtype: torch.dtype, **given: Any) -> None:
    mean, padded = given.get("mean", False), given.get("padded", False)
    weighed, with_end = given.get("weighed", False), given.get("with_end", True)
    rows, count = random.choice((1, 9, 50)), random.choice((1, 4, 37))
    tables = [torch.randn(rows, width).to(dtype) for width in widths]
    bags = [_bags(count, rows, given.get("longest", 6)) for _ in widths]
    numbers, begins = [one for one, _ in bags], [other for _, other in bags]
    factors = [
        torch.randn(len(one)).to(dtype) if weighed else torch.ones(len(one)) for one in numbers
    ]
    padding = [random.randrange(rows) if padded else -1 for _ in widths]
    got = kernels().openmp_embedding_bags(
        tables,
        numbers,
        begins if with_end else [one[:-1] for one in begins],
        factors if weighed else [],
        padding,
        mean,
        with_end,
    )
    exact = torch.cat(
        [
            _wanted(*one, mean)
            for one in zip(tables, numbers, begins, factors, padding, strict=True)
        ],
        dim=1,
    )
    assert (got.shape, got.dtype) == (exact.shape, dtype)
    tolerance = 2e-6 + torch.finfo(dtype).eps
    largest = exact.abs().amax().clamp(min=1) if exact.numel() else 1
    assert ((got - exact).abs() <= tolerance * largest).all(), (widths, dtype, given)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width: int, dtype: torch.dtype) -> None:
    check([width], dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_end", [False, True])
def test_kinds_of_bags(mean: bool, padded: bool, with_end: bool, dtype: torch.dtype) -> None:
    check((16, 5, 130), dtype, mean=mean, padded=padded, with_end=with_end)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_factors(padded: bool, dtype: torch.dtype) -> None:
    check((16, 5, 130), dtype, weighed=True, padded=padded)


@pytest.mark.parametrize("seed", range(8))
def test_anything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        widths = [random.randint(1, 300) for _ in range(random.randint(1, 6))]
        weighed = random.random() < 0.5
        check(
            widths,
            random.choice(FLOATS),
            weighed=weighed,
            mean=not weighed and random.random() < 0.5,
            padded=random.random() < 0.5,
            with_end=random.random() < 0.5,
            longest=random.choice((0, 1, 6, 60)),
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_bags_on_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tables = [torch.randn(500, 64) for _ in range(3)]
        numbers = [torch.randint(0, 500, (4000,)) for _ in tables]
        begins = [torch.arange(0, 4000, 10) for _ in tables]
        got = kernels().openmp_embedding_bags(tables, numbers, begins, [], [-1] * 3, False, False)
        each = zip(tables, numbers, strict=True)
        exact = torch.cat([t.double()[n].view(400, 10, 64).sum(1) for t, n in each], 1)
        assert (got - exact).abs().max() < 1e-5
    finally:
        torch.set_num_threads(before)


def _call(numbers: Any, begins: Any, with_end: bool = False, **given: Any) -> Tensor:
    table = torch.arange(12.0).view(6, 2)
    factors = given.get("factors", [])
    return kernels().openmp_embedding_bags(
        [table], [torch.tensor(numbers)], [torch.tensor(begins)], factors, [-1], False, with_end
    )


WRONG = {
    "a number beyond the table": (([1, 6], [0]), "number 6 is no row of table 0.*6 rows"),
    "a negative number": (([1, -1], [0]), "number -1 is no row of table 0"),
    "a late begin": (([1, 2], [1]), "begin at 0, not at 1"),
    "begins that fall": (([1, 2, 3], [0, 2, 1]), "bag 1 .* begins at 2 and ends at 1"),
    "an end beyond the numbers": (([1, 2], [0, 3], True), "begins at 3 and ends at 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    given, words = WRONG[case]
    with pytest.raises(RuntimeError, match=words):
        _call(*given)


def test_factors_are_as_many_as_numbers() -> None:
    with pytest.raises(RuntimeError, match=r"factors of \[3\] and numbers of \[2\]"):
        _call([1, 2], [0], factors=[torch.ones(3)])


def test_no_bags() -> None:
    empty = torch.empty(0, dtype=torch.long)
    for begins, with_end in ((empty, False), (torch.zeros(1, dtype=torch.long), True)):
        table = [torch.randn(3, 4)]
        got = kernels().openmp_embedding_bags(table, [empty], [begins], [], [-1], False, with_end)
        assert got.shape == (0, 4)
