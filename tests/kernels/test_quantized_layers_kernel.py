"""openmp_quantized_convolution and openmp_quantized_linear, called directly.

quantize(act(layer(dequantize(x), dequantize(weight)) + bias + dequantize(other)))
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from lowering.native.shapes import QUANTIZED_RESULTS
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.regions import kernels

Tensor = torch.Tensor
BYTES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class Problem:
    """Sizes: images, inputs, outputs, height and width."""

    sizes: tuple[int, int, int, int, int] = (2, 16, 24, 9, 10)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    alone: bool = False  # each channel with a kernel of its own
    image: torch.dtype = torch.uint8
    result: torch.dtype = torch.uint8
    activation: str = "none"
    adds: bool = False
    bias: bool = True
    one_step: bool = False
    zero: int | None = None  # of the image; None: any

    @property
    def groups(self) -> int:
        return self.sizes[1] if self.alone else 1

    @property
    def geometry(self) -> tuple[Any, ...]:
        return list(self.stride), list(self.padding), list(self.dilation), self.groups

    def fits(self) -> bool:
        extents = zip(self.sizes[3:], self.kernel, self.padding, self.dilation, strict=True)
        return all(size + 2 * p >= d * (k - 1) + 1 for size, k, p, d in extents)


def any_bytes(dtype: torch.dtype, *shape: int) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


def check(problem: Problem) -> None:
    p, step = problem, 0.02
    images, inputs, outputs, *size = p.sizes
    outputs = inputs if p.alone else outputs
    x = any_bytes(p.image, images, inputs, *size).to(memory_format=torch.channels_last)
    weight = any_bytes(torch.int8, outputs, inputs // p.groups, *p.kernel)
    steps = None if p.one_step else torch.rand(outputs) * 0.01 + 0.002
    bias = torch.randn(outputs) if p.bias else None
    limits = torch.iinfo(p.image)
    zero = random.randint(limits.min, limits.max) if p.zero is None else p.zero

    by_output = (-1, 1, 1, 1)
    exact_weight = weight.double() * (0.004 if steps is None else steps.double().view(by_output))
    exact = functional.conv2d(
        (x.double() - zero) * step,
        exact_weight,
        None if bias is None else bias.double(),
        *p.geometry,
    )
    unit, other = float(exact.abs().max()) / 100 + 0.01, None
    if p.adds and p.result in BYTES:
        other = any_bytes(p.result, *exact.shape)
        exact = exact + (other.double() - 7) * (unit / 2)
    elif p.adds:
        other = torch.randn(exact.shape) * 5
        exact = exact + other.double()
    apply, a, b = ACTIVATIONS[p.activation]
    exact = apply(exact)

    got = kernels().openmp_quantized_convolution(
        *(x, weight, steps, None, bias, other),
        *([0.004, step, unit, unit / 2], [0, zero, 3, 7]),
        *(QUANTIZED_RESULTS.index(p.result), list(ACTIVATIONS).index(p.activation), a, b),
        *p.geometry,
    )
    assert (got.shape, got.dtype) == (exact.shape, p.result), p
    assert got.is_contiguous(memory_format=torch.channels_last), p
    compare(got, exact, unit, p)


def compare(got: Tensor, exact: Tensor, unit: float, where: Any) -> None:
    """Of a grid of this step whose zero is 3: another byte only where two are equally near."""
    if got.dtype not in BYTES:
        assert (got - exact).abs().max() <= 2e-6 * exact.abs().max(), where
        return
    limits = torch.iinfo(got.dtype)
    places = exact / unit
    wanted = (places.round() + 3).clamp(limits.min, limits.max)
    tie = ((places - places.floor()) - 0.5).abs() < 1e-3
    assert (got.double() - wanted).abs().max() <= 1, where
    assert torch.equal(got.double()[~tie], wanted[~tie]), where


def some_problem() -> Problem:
    pick = random.choice
    both = lambda *options: (pick(options), pick(options))  # noqa: E731
    return Problem(
        sizes=(
            *(pick((1, 1, 2, 3)), pick((1, 3, 16, 17, 40, 64, 130)), pick((1, 8, 24, 40, 130))),
            *both(7, 8, 15, 28),
        ),
        kernel=pick(((1, 1), (1, 1), (3, 3), (5, 3), (7, 7), (1, 9))),
        stride=both(1, 1, 2, 3),
        padding=both(0, 1, 2, 3),
        dilation=both(1, 1, 2),
        alone=pick((False, False, True)),
        image=pick(BYTES),
        result=pick(QUANTIZED_RESULTS),
        activation=pick(("none", "relu", "clamp", "silu", "hardswish", "gelu_erf")),
        adds=pick((False, True)),
        bias=pick((False, True)),
        one_step=pick((False, True)),
    )


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(40))
def test_any_convolution(seed: int) -> None:
    random.seed(seed)
    problems = [problem for problem in (some_problem() for _ in range(12)) if problem.fits()]
    assert len(problems) > 4
    for problem in problems:
        check(problem)


@pytest.mark.quick
@pytest.mark.parametrize("rows", [1, 3, 7, 40, 200])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("found", [False, True], ids=["fixed", "found in each call"])
def test_linear_layers(rows: int, in_out: bool, found: bool) -> None:
    random.seed(rows)
    for k, n in ((1, 5), (64, 33), (130, 64), (700, 200)):
        for image, result in ((torch.uint8, torch.uint8), (torch.int8, torch.float32)):
            x, weight = any_bytes(image, 2, rows, k), any_bytes(torch.int8, n, k)
            steps, bias = torch.rand(n) * 0.01 + 0.002, torch.randn(n)
            zero = random.randint(*((0, 255) if image is torch.uint8 else (-128, 127)))
            grid = (torch.tensor(0.02), torch.tensor(zero)) if found else (None, None)
            given = (1.0, 0) if found else (0.02, zero)
            real = (weight.double() * steps.double()[:, None]).t()
            exact = functional.relu((x.double() - zero) * 0.02 @ real + bias.double())
            unit = float(exact.abs().max()) / 100 + 0.01
            got = kernels().openmp_quantized_linear(
                *(x, weight.t().contiguous() if in_out else weight, steps, None, bias, None, *grid),
                *([1.0, given[0], unit, 1.0], [0, given[1], 3, 0]),
                *(QUANTIZED_RESULTS.index(result), list(ACTIVATIONS).index("relu"), 0.0, 0.0),
                in_out,
            )
            assert (got.shape, got.dtype) == ((2, rows, n), result)
            # Steps are floats: their rounding is that of the double precision here.
            compare(got, exact, unit, (k, n, image))


PLAIN = Problem()
LARGE = {
    "several blocks of rows": Problem((1, 64, 48, 60, 60), (1, 1), padding=(0, 0)),
    "several parts of the sum": Problem((1, 300, 40, 9, 9)),
    "whole rows as they lie": Problem((2, 128, 70, 13, 13), (1, 1), padding=(0, 0)),
    "one pixel": Problem((1, 100, 60, 1, 1), (1, 1), padding=(0, 0)),
    "a few pixels": Problem((1, 100, 60, 2, 2)),
    "each channel, many lines": Problem((2, 72, 72, 57, 57), alone=True, stride=(2, 2)),
    "each channel, small images": Problem((3, 200, 200, 7, 7), (5, 5), padding=(2, 2), alone=True),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", LARGE)
def test_threads(name: str, count: int, cpu_kernels: None) -> None:
    torch.set_num_threads(count)
    for image in BYTES:
        check(replace(LARGE[name], image=image, activation="relu"))


@pytest.mark.parametrize("zero", [0, 255])
def test_a_zero_at_the_end_of_the_bytes(zero: int) -> None:
    """What stands for zero around an image is that byte."""
    for alone in (False, True):
        check(replace(PLAIN, zero=zero, padding=(3, 3), alone=alone))
        check(replace(PLAIN, image=torch.int8, zero=zero - 128, padding=(3, 3), alone=alone))


def test_numbers_beyond_the_bytes_stay_at_their_ends() -> None:
    x = torch.full((1, 16, 3, 3), 255, dtype=torch.uint8)
    weight = torch.full((8, 16, 1, 1), 127, dtype=torch.int8)
    weight[4:] = -128
    given = ([1e-3, 1.0, 1e-12, 1.0], [0, 0, 100, 0], 0, 0, 0.0, 0.0, [1, 1], [0, 0], [1, 1], 1)
    got = kernels().openmp_quantized_convolution(x, weight, None, None, None, None, *given)
    assert (got[:, :4] == 255).all()
    assert (got[:, 4:] == 0).all()


def test_images_in_rows_and_none() -> None:
    x, weight = any_bytes(torch.uint8, 2, 16, 9, 9), any_bytes(torch.int8, 8, 16, 3, 3)
    given = ([1e-3, 0.1, 0.5, 1.0], [0, 7, 100, 0], 0, 1, 0.0, 0.0, [1, 1], [1, 1], [1, 1], 1)
    compute = kernels().openmp_quantized_convolution
    last = x.to(memory_format=torch.channels_last)
    results = [compute(image, weight, None, None, None, None, *given) for image in (x, last)]
    assert torch.equal(*results)
    assert compute(x[:0], weight, None, None, None, None, *given).shape == (0, 8, 9, 9)


def test_many_callers() -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check, PLAIN) for _ in range(16)]:
            done.result()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"zero": torch.ones(8, dtype=torch.int64)}, "zero of a weight of bytes is not 0"),
        ({"x": torch.zeros(2, 15, 9, 9, dtype=torch.uint8)}, "no convolution of bytes"),
        ({"x": torch.zeros(2, 16, 9, 9)}, "no convolution of bytes"),
        ({"zeros": [0, 300, 0, 0]}, "is 300"),
        ({"groups": 2}, "2 groups|no convolution of bytes"),
        ({"other": torch.zeros(2, 8, 9, 9)}, "no such tensor"),
        ({"step": torch.ones(3)}, "steps for 8 outputs"),
        ({"bias": torch.ones(3)}, "numbers for 8 outputs"),
        ({"result": 5}, "kind 0 to 2"),
        ({"stride": [1]}, "two dimensions"),
        ({"x": any_bytes(torch.uint8, 2, 16, 1, 9), "padding": [0, 0]}, "does not fit"),
    ],
)
def test_mistakes_are_refused(change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {
        "x": any_bytes(torch.uint8, 2, 16, 9, 9),
        "weight": any_bytes(torch.int8, 8, 16, 3, 3),
        **dict.fromkeys(("step", "zero", "bias", "other")),
        "steps": [1e-3, 0.1, 0.5, 1.0],
        "zeros": [0, 7, 100, 0],
        "result": 0,
        "act": 0,
        "a": 0.0,
        "b": 0.0,
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "groups": 1,
    }
    with pytest.raises(RuntimeError, match=says):
        kernels().openmp_quantized_convolution(*(arguments | change).values())
