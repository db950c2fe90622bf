"""Convolutions by products of halves: sums are floats, images may be halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowering.convolution_steps import Kind, Step, Way
from tests.kernels.conftest import Halves
from tests.kernels.test_convolution_kernel import PROBLEMS, Problem, compute, expected
from tests.kernels.test_convolutions_kernel import doubled, step_of
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

Tensor = torch.Tensor

# Over several parts of k, blocks of rows and strips of panels, with channels that end within pairs,
# tiles and vectors.
LARGE = {
    "stem": Problem(2, 3, (90, 95), 64, (7, 7), (2, 2), (3, 3)),
    "3x3": Problem(1, 64, (40, 37), 64, (3, 3), padding=(1, 1)),
    "3x3, wide lines": Problem(1, 32, (70, 130), 80, (3, 3), padding=(1, 1)),
    "3x3, short lines": Problem(2, 96, (13, 12), 40, (3, 3), padding=(1, 1)),
    "3x3, strided": Problem(3, 32, (41, 75), 33, (3, 3), (2, 2), (1, 1)),
    "3x3, deep": Problem(1, 384, (9, 21), 64, (3, 3), padding=(1, 1)),
    "3x3, nothing around": Problem(2, 64, (19, 40), 16, (3, 3)),
    "line, whole tiles": Problem(9, 32, (300,), 48, (5,), padding=(2,)),
    "kernels of lines": Problem(2, 32, (20, 36), 24, (1, 5), padding=(0, 2)),
    "3x3, lines apart": Problem(1, 64, (24, 33), 32, (3, 3), padding=(2, 1), dilation=(2, 1)),
    "grouped, whole tiles": Problem(2, 128, (18, 19), 64, (3, 3), padding=(1, 1), groups=2),
    "3x3, small images": Problem(3, 130, (7, 7), 66, (3, 3), padding=(1, 1)),
    "3x3, odd channels": Problem(2, 67, (17, 18), 33, (3, 3), (2, 2), (1, 1)),
    "grouped": Problem(2, 96, (14, 15), 48, (3, 3), padding=(1, 1), groups=3),
    "grouped, odd": Problem(2, 51, (14, 15), 48, (3, 3), padding=(1, 1), groups=3),
    "pointwise, deep": Problem(1, 1100, (9, 9), 70, (1, 1)),
    "pointwise, many pixels": Problem(1, 48, (150, 160), 200, (1, 1)),
    "pointwise, strided": Problem(2, 200, (29, 30), 100, (1, 1), (2, 2)),
    "one pixel": Problem(1, 300, (1, 1), 40, (1, 1)),
    "line": Problem(2, 40, (500,), 48, (7,), (2,), (3,)),
}


def operands(problem: Problem, half: Halves) -> dict[str, Any]:
    """Weights in half precision, all else in floats."""
    x, weight = problem.tensors()
    norm = tuple(torch.rand(problem.out) + 0.5 for _ in range(4))
    shape = expected(problem, x, weight).shape
    return {
        "x": half.rounded(x),
        "weight": half.rounded(weight / weight[0].numel() ** 0.5),
        "bias": torch.randn(problem.out),
        "norm": norm,
        "beside": tuple(torch.randn(shape) for _ in range(3)),
        "activation": "silu",
    }


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *LARGE.values()], ids=repr)
def test_of_numbers_that_are_halves_it_is_as_exact_as_with_floats(
    problem: Problem, half: Halves
) -> None:
    """Neither weights nor the norm behind them are rounded again."""
    given = operands(problem, half)
    got, own = compute(problem, **given, way=half.way), expected(problem, **given)
    reference = expected(problem, **doubled(given))
    assert_contract(
        got,
        own.to(memory_format=torch.channels_last) if own.dim() == 4 else own,
        reference,
        "halves",
    )


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *LARGE.values()], ids=repr)
def test_images_in_halves(
    problem: Problem, rows: bool, memory: torch.memory_format, half: Halves
) -> None:
    """They give the same as the same numbers in floats, rounded once."""
    given = operands(problem, half)
    if given["x"].dim() == 4:
        given["x"] = given["x"].contiguous(memory_format=memory)
    given["beside"] = tuple(map(half.rounded, given["beside"]))
    given_halves = {**given, "x": given["x"].to(half.dtype), "beside": half.of(given["beside"])}
    got = compute(problem, **given_halves, way=half.way, rows=rows)
    assert got.dtype is half.dtype
    floats = compute(problem, **given, way=half.way, rows=rows)
    assert_bit_identical(got, floats.to(half.dtype), "halves")


def test_other_inputs_are_rounded_on_the_way(half: Halves) -> None:
    problem = LARGE["3x3"]
    given = operands(problem, half)
    given["x"] += 2e-3 * torch.randn_like(given["x"])
    as_rounded = {**given, "x": half.rounded(given["x"])}
    got = compute(problem, **given, way=half.way)
    assert_bit_identical(got, compute(problem, **as_rounded, way=half.way), "rounded")
    assert not torch.equal(got, compute(problem, **given))


@pytest.mark.parametrize("name", ["stem", "grouped", "pointwise, deep", "3x3", "3x3, small images"])
@pytest.mark.parametrize("floats", [True, False])
def test_the_number_of_threads_does_not_show(name: str, floats: bool, half: Halves) -> None:
    problem = LARGE[name]
    given = operands(problem, half)
    if not floats:
        given["x"], given["beside"] = half.of(given["x"]), half.of(given["beside"])
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(compute(problem, **given, way=half.way))
    for other in results[1:]:
        assert_bit_identical(results[0], other, name)


@pytest.mark.parametrize("floats", [True, False])
def test_not_a_number_stays_in_its_window(floats: bool, half: Halves) -> None:
    problem = Problem(1, 32, (20, 20), 32, (3, 3), padding=(1, 1))
    given = operands(problem, half)
    given["x"][0, 5, 10, 10] = torch.nan
    if not floats:
        given["x"], given["beside"] = half.of(given["x"]), half.of(given["beside"])
    there = compute(problem, **given, way=half.way).isnan()
    assert there[0, :, 9:12, 9:12].all() and int(there.sum()) == 9 * 32


# --- several, of which some images are kept in half precision ------------------------------------

# What each reads: its image, what lies before, beside and after it, as numbers of values.
NOTHING = -1
GRAPHS: dict[str, tuple[list[Problem], list[tuple[int, ...]]]] = {
    "one behind the other": (
        [
            Problem(2, 20, (30, 29), 64, (1, 1)),
            Problem(2, 64, (30, 29), 66, (3, 3), (2, 2), (1, 1)),
            Problem(2, 66, (15, 15), 40, (1, 1)),
        ],
        [(0, *[NOTHING] * 3), (1, *[NOTHING] * 3), (2, *[NOTHING] * 3)],
    ),
    "residual": (
        [
            Problem(1, 16, (21, 20), 64, (1, 1)),
            Problem(1, 64, (21, 20), 32, (1, 1)),
            Problem(1, 32, (21, 20), 32, (3, 3), padding=(1, 1)),
            Problem(1, 32, (21, 20), 64, (1, 1)),
            Problem(1, 64, (21, 20), 40, (1, 1), (2, 2)),
        ],
        [
            (0, *[NOTHING] * 3),
            (1, *[NOTHING] * 3),
            (2, *[NOTHING] * 3),
            (3, NOTHING, 1, 1),
            (4, *[NOTHING] * 3),
        ],
    ),
    "read by one of each channel too": (
        [
            Problem(1, 16, (21, 20), 48, (3, 3), padding=(1, 1)),
            Problem(1, 48, (21, 20), 48, (3, 3), padding=(1, 1), groups=48),
            Problem(1, 48, (21, 20), 48, (1, 1)),
            Problem(1, 48, (21, 20), 32, (3, 3)),
        ],
        [
            (0, *[NOTHING] * 3),
            (1, *[NOTHING] * 3),
            (1, 2, NOTHING, NOTHING),
            (3, *[NOTHING] * 3),
        ],
    ),
    "odd channels in between": (
        [
            Problem(2, 16, (12, 13), 33, (3, 3), padding=(1, 1)),
            Problem(2, 33, (12, 13), 34, (3, 3), padding=(1, 1), groups=1),
            Problem(2, 34, (12, 13), 32, (3, 3), padding=(1, 1), groups=2),
        ],
        [(0, *[NOTHING] * 3), (1, *[NOTHING] * 3), (2, *[NOTHING] * 3)],
    ),
}


def joined(
    problems: Sequence[Problem],
    layers: Sequence[dict[str, Any]],
    reads: Sequence[Any],
    x: Tensor,
    way: Way,
) -> Tensor:
    tensors: list[Tensor] = []
    texts: list[str] = []
    for problem, layer, read in zip(problems, layers, reads, strict=True):
        step = replace(step_of(problem, layer, read), way=way)
        tensors += [tensor for tensor in step.tensors if tensor is not None]
        texts.append(step.text(lambda number: NOTHING if number is None else number))
    return kernels().openmp_convolutions(x, tensors, " ".join(texts), [])


def one_by_one(
    problems: Sequence[Problem], layers: Sequence[dict[str, Any]], reads: Sequence[Any], x: Tensor
) -> Tensor:
    values = [x]
    for problem, layer, (image, *beside) in zip(problems, layers, reads, strict=True):
        others = tuple(None if number == NOTHING else values[number] for number in beside)
        values.append(expected(problem, values[image], **layer, beside=others))
    return values[-1]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_kept_images_cost_no_more_than_their_rounding(
    name: str, threads: int, half: Halves
) -> None:
    torch.set_num_threads(threads)
    problems, reads = GRAPHS[name]
    layers = []
    for index, problem in enumerate(problems):
        given = operands(problem, half)
        norm = given["norm"] if index % 2 else (None,) * 4
        layers.append({**{k: given[k] for k in ("weight", "bias", "activation")}, "norm": norm})
    x = operands(problems[0], half)["x"]
    got = joined(problems, layers, reads, x, half.way)
    reference = one_by_one(problems, doubled(layers), reads, x.double())
    halves = [{k: half.of(v) for k, v in layer.items()} for layer in layers]
    eager = one_by_one(problems, halves, reads, x.to(half.dtype))
    error, eagers = ((it.double() - reference).norm() / reference.norm() for it in (got, eager))
    assert 1e-5 < error <= eagers  # something was rounded, not more than by eager


def test_an_image_of_which_a_window_is_taken_is_of_floats(half: Halves) -> None:
    problem = Problem(1, 16, (20, 20), 32, (3, 3), padding=(1, 1))
    layer = {k: operands(problem, half)[k] for k in ("weight", "bias", "norm", "activation")}
    nothing = [NOTHING] * 3
    steps = [
        replace(step_of(problem, layer, (0, *nothing)), way=half.way),
        Step(Kind.LARGEST, 1, window=(2, 2, 0, 0, 0, 0, 1, 1), extent=(2, 2)),
    ]
    x = operands(problem, half)["x"]
    text = " ".join(s.text(lambda number: NOTHING if number is None else number) for s in steps)
    tensors = [t for step in steps for t in step.tensors if t is not None]
    got = kernels().openmp_convolutions(x, tensors, text, [])
    alone = compute(problem, x, **layer, way=half.way)
    assert_bit_identical(got, torch.nn.functional.max_pool2d(alone, 2), "max_pool")
