"""openmp_convolution, called directly: 1-D and 2-D, with BatchNorm and what may follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from lowering.convolution_steps import Way
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor


@dataclass(frozen=True)
class Problem:
    """Extents of one convolution; `size` has one entry for 1-D, two for 2-D."""

    batch: int
    channels: int
    size: tuple[int, ...]
    out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def tensors(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.batch, self.channels, *self.size)
        return x, torch.randn(self.out, self.channels // self.groups, *self.kernel)

    def geometry(self) -> tuple[Any, ...]:
        dims = len(self.kernel)
        return (
            list(self.stride or (1,) * dims),
            list(self.padding or (0,) * dims),
            list(self.dilation or (1,) * dims),
            self.groups,
        )


PROBLEMS = {
    "3x3": Problem(2, 5, (9, 11), 7, (3, 3)),
    "3x3 padded": Problem(1, 16, (13, 14), 33, (3, 3), padding=(1, 1)),
    "stem": Problem(1, 3, (33, 31), 20, (7, 7), (2, 2), (3, 3)),
    "uneven": Problem(3, 4, (10, 17), 6, (2, 5), (3, 2), (1, 0), (2, 1)),
    "dilated": Problem(1, 6, (15, 15), 5, (3, 3), (1, 1), (2, 2), (2, 2)),
    "more padding than kernel": Problem(1, 2, (4, 3), 3, (2, 2), (1, 1), (3, 4)),
    "wide": Problem(2, 5, (17, 30), 7, (3, 3), padding=(1, 1)),
    "wide, stem": Problem(1, 3, (21, 63), 20, (7, 7), (2, 2), (3, 3)),
    "wide, dilated": Problem(1, 6, (9, 40), 5, (3, 3), (1, 1), (2, 2), (2, 2)),
    "wide, taps of a line apart": Problem(1, 48, (6, 30), 20, (3, 3), (1, 2), (1, 2), (1, 2)),
    "wide, many channels": Problem(1, 120, (5, 20), 40, (3, 3), padding=(1, 1)),
    "wide, more padding than kernel": Problem(1, 2, (4, 30), 3, (2, 2), (1, 1), (3, 4)),
    "kernel of the image": Problem(3, 8, (6, 6), 40, (6, 6)),
    "one pixel": Problem(2, 3, (1, 1), 4, (1, 1)),
    "patches": Problem(2, 3, (16, 24), 40, (8, 8), (8, 8)),
    "pointwise": Problem(3, 37, (5, 7), 65, (1, 1)),
    "pointwise, strided": Problem(1, 16, (9, 9), 32, (1, 1), (2, 2)),
    "pointwise, padded": Problem(1, 8, (5, 5), 8, (1, 1), padding=(1, 1)),
    "one channel": Problem(2, 1, (12, 10), 1, (3, 3), padding=(1, 1)),
    "grouped": Problem(2, 12, (9, 8), 18, (3, 3), (1, 1), (1, 1), groups=3),
    "groups of 8, overlapping vectors": Problem(2, 40, (9, 8), 40, (3, 3), groups=5),
    "groups of 4, overlapping vectors": Problem(1, 36, (9, 8), 36, (3, 3), (2, 2), groups=9),
    "groups of 2, overlapping vectors": Problem(
        1, 18, (9, 8), 18, (3, 3), (1, 1), (1, 1), groups=9
    ),
    "grouped pointwise": Problem(1, 12, (6, 6), 8, (1, 1), groups=4),
    "depthwise": Problem(2, 35, (11, 12), 35, (3, 3), padding=(1, 1), groups=35),
    "depthwise, strided": Problem(1, 64, (14, 15), 64, (5, 5), (2, 2), (2, 2), groups=64),
    "depthwise, dilated": Problem(1, 16, (17, 9), 16, (3, 3), (1, 1), (2, 2), (2, 2), groups=16),
    "depthwise, uneven": Problem(3, 7, (8, 19), 7, (1, 7), (2, 3), (0, 3), groups=7),
    "depthwise, 7x7": Problem(1, 24, (9, 9), 24, (7, 7), padding=(3, 3), groups=24),
    "depthwise, edges on both sides": Problem(2, 50, (3, 4), 50, (5, 5), padding=(2, 2), groups=50),
    "depthwise, narrower than the kernel": Problem(
        1, 33, (9, 2), 33, (3, 7), padding=(1, 3), groups=33
    ),
    "depthwise, more padding than kernel": Problem(
        1, 32, (5, 3), 32, (3, 3), padding=(4, 6), groups=32
    ),
    "depthwise, strided edges": Problem(1, 40, (12, 13), 40, (3, 3), (2, 2), (1, 1), groups=40),
    "depthwise, padded unevenly": Problem(1, 24, (9, 17), 24, (5, 3), (1, 2), (2, 0), groups=24),
    "depthwise, many vectors": Problem(1, 333, (29, 31), 333, (3, 3), padding=(1, 1), groups=333),
    "depthwise, two outputs each": Problem(1, 6, (7, 7), 12, (3, 3), groups=6),
    "two outputs each, strided": Problem(2, 48, (14, 15), 96, (7, 7), (2, 2), (3, 3), groups=48),
    "three outputs each, dilated": Problem(
        1, 25, (13, 9), 75, (3, 3), padding=(2, 2), dilation=(2, 2), groups=25
    ),
    "five outputs each, beyond the image": Problem(
        2, 9, (4, 3), 45, (3, 3), padding=(5, 4), groups=9
    ),
    "two outputs each, in one line": Problem(1, 20, (9, 17), 40, (1, 7), padding=(0, 3), groups=20),
    "33 outputs each": Problem(1, 3, (9, 8), 99, (3, 3), (1, 2), (1, 1), groups=3),
    "two outputs each, in bands": Problem(1, 80, (40, 61), 160, (5, 5), padding=(2, 2), groups=80),
    "1-D, four outputs each": Problem(2, 20, (57,), 80, (4,), (2,), (3,), groups=20),
    "direct": Problem(2, 16, (21, 20), 24, (5, 5), padding=(2, 2)),
    "direct, strided": Problem(1, 19, (20, 23), 33, (3, 3), (2, 2)),
    "direct, in pieces": Problem(2, 200, (9, 8), 40, (3, 3), (1, 2), (1, 1)),
    "direct, dilated lines": Problem(1, 48, (350,), 20, (3,), padding=(4,), dilation=(4,)),
    "by taps": Problem(2, 50, (15, 13), 20, (3, 2), padding=(2, 3), dilation=(2, 3)),
    "by taps, strided": Problem(1, 33, (21, 18), 70, (3, 3), (2, 3), (4, 4), (4, 4)),
    "by taps, beyond the image": Problem(2, 40, (9, 8), 33, (3, 3), (1, 1), (30, 30), (30, 30)),
    "by taps, no padding": Problem(1, 32, (19, 17), 16, (5, 3), dilation=(3, 2)),
    "by taps, more padding": Problem(1, 32, (6, 5), 16, (3, 3), (1, 1), (9, 11), (2, 3)),
    "by taps, in pieces": Problem(1, 600, (7, 6), 40, (3, 3), padding=(2, 2), dilation=(2, 2)),
    "by taps, wide": Problem(1, 32, (5, 700), 20, (3, 3), padding=(2, 3), dilation=(2, 3)),
    "direct, wide": Problem(1, 8, (6, 333), 17, (3, 3), padding=(1, 1)),
    "direct, more padding than kernel": Problem(1, 9, (4, 3), 18, (2, 2), padding=(3, 4)),
    "direct, lines": Problem(2, 24, (350,), 16, (7,), (1,), (9,), (3,)),
    "direct, lines in parts": Problem(1, 64, (5000,), 24, (3,), padding=(1,)),
    "direct, lines in parts, strided": Problem(2, 40, (9001,), 16, (4,), (2,)),
    "direct, wide lines in parts": Problem(1, 24, (3, 3001), 20, (3, 3), padding=(1, 1)),
    "direct, grouped": Problem(2, 60, (9, 8), 57, (3, 3), (1, 1), (1, 1), groups=3),
    "direct, grouped, unpadded": Problem(1, 40, (9, 8), 40, (3, 3), groups=2),
    "direct, grouped, strided": Problem(1, 50, (21, 18), 66, (3, 3), (2, 2), (1, 1), groups=2),
    "direct, grouped, dilated": Problem(1, 96, (15, 13), 40, (3, 3), (1, 1), (2, 2), (2, 2), 2),
    "direct, grouped, in pieces": Problem(2, 600, (9, 8), 99, (3, 3), (1, 2), (1, 1), groups=3),
    "direct, grouped lines in parts": Problem(1, 64, (5000,), 48, (3,), padding=(1,), groups=2),
    "direct, runs in two steps": Problem(1, 48, (9, 10), 20, (5, 3), padding=(2, 1)),
    "two channels": Problem(2, 2, (18, 21), 24, (3, 3), padding=(1, 1)),
    "four channels": Problem(2, 4, (18, 21), 24, (3, 3), (2, 2), padding=(1, 1)),
    "1-D": Problem(2, 5, (23,), 9, (3,), padding=(1,)),
    "1-D strided": Problem(3, 8, (40,), 33, (10,), (5,), (2,)),
    "1-D dilated": Problem(1, 4, (30,), 4, (3,), (1,), (4,), (4,)),
    "1-D depthwise": Problem(2, 20, (15,), 20, (4,), padding=(3,), groups=20),
    "1-D pointwise": Problem(2, 9, (15,), 31, (1,)),
    "no image": Problem(0, 4, (5, 5), 6, (3, 3)),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def compute(
    problem: Problem,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor | None, ...] = (None,) * 4,
    beside: tuple[Tensor | None, ...] = (None,) * 3,
    activation: str = "none",
    eps: float = 1e-3,
    *,
    way: Way = Way.PLAIN,
    rows: bool = False,
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    number = list(ACTIVATIONS).index(activation)
    return kernels().openmp_convolution(
        x, weight, bias, *norm, eps, *problem.geometry(), *beside, number, a, b, way, rows=rows
    )


def expected(
    problem: Problem,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor | None, ...] = (None,) * 4,
    beside: tuple[Tensor | None, ...] = (None,) * 3,
    activation: str = "none",
    eps: float = 1e-3,
) -> Tensor:
    convolve = functional.conv1d if weight.dim() == 3 else functional.conv2d
    out = convolve(x, weight, bias, *problem.geometry())
    gain, offset, mean, var = norm
    if mean is not None:
        out = functional.batch_norm(out, mean, var, gain, offset, training=False, eps=eps)
    before, times, after = beside
    out = out if before is None else out + before
    out = ACTIVATIONS[activation][0](out)
    out = out if times is None else out * times
    return out if after is None else out + after


def check(where: str, problem: Problem, *args: Any, **kwargs: Any) -> Tensor:
    got, own = compute(problem, *args, **kwargs), expected(problem, *args, **kwargs)

    def doubled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(doubled, value))
        return value.double() if isinstance(value, Tensor) else value

    wide = expected(problem, *map(doubled, args), **{k: doubled(v) for k, v in kwargs.items()})
    assert_contract(got, own, wide, where)
    assert got.movedim(1, -1).is_contiguous(), "channels are not innermost"
    return got


def norm_of(channels: int) -> tuple[Tensor, ...]:
    mean, var = torch.randn(channels), torch.rand(channels) + 0.1
    return torch.randn(channels), torch.randn(channels), mean, var


@every_problem
def test_problems(problem: Problem) -> None:
    x, weight = problem.tensors()
    bias, norm = torch.randn(problem.out), norm_of(problem.out)
    out = check("plain", problem, x, weight)
    check("with a bias", problem, x, weight, bias)
    check("with a norm", problem, x, weight, None, norm)
    check("with bias and norm", problem, x, weight, bias, norm, activation="relu")
    check("with a norm that is not affine", problem, x, weight, bias, (None, None, *norm[2:]))
    beside = tuple(torch.randn_like(out) for _ in range(3))
    check("with everything", problem, x, weight, bias, norm, beside, activation="hardswish")
    plain_beside = tuple(t.contiguous() for t in beside)
    check("beside images", problem, x, weight, None, norm, plain_beside, activation="silu")


@every_problem
def test_layouts(problem: Problem) -> None:
    """The same image with its channels innermost, cut out of a larger one, and repeated."""
    x, weight = problem.tensors()
    got = check("contiguous", problem, x, weight)
    innermost = x.movedim(1, -1).contiguous().movedim(-1, 1)
    assert_bit_identical(compute(problem, innermost, weight), got, "channels innermost")
    frame = torch.full((*x.shape[:-1], x.shape[-1] + 2), float("nan"))
    frame[..., 1:-1] = x
    assert_bit_identical(compute(problem, frame[..., 1:-1], weight), got, "within a frame")
    same = torch.randn(1, *x.shape[1:]).expand(x.shape)
    check("one image several times", problem, same, weight)
    flipped = weight.transpose(0, -1).contiguous().transpose(0, -1)
    assert_bit_identical(compute(problem, x, flipped), got, "another layout of the weight")


@every_problem
def test_the_thread_count_changes_no_bit(problem: Problem) -> None:
    x, weight = problem.tensors()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(compute(problem, x, weight, norm=norm_of_ones(problem.out), activation="elu"))
    for other in found[1:]:
        assert_bit_identical(other, found[0], "another number of threads")


def norm_of_ones(channels: int) -> tuple[Tensor, ...]:
    ones = torch.ones(channels)
    return ones, ones, ones, ones


@pytest.mark.parametrize("name", ["3x3 padded", "pointwise", "depthwise", "1-D", "by taps"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(name: str, activation: str) -> None:
    problem = PROBLEMS[name]
    x, weight = problem.tensors()
    out = compute(problem, x, weight)
    for given in range(8):
        beside = tuple(torch.randn_like(out) if given >> i & 1 else None for i in range(3))
        check(f"{given:03b}", problem, x * 3, weight, beside=beside, activation=activation)


@pytest.mark.parametrize(
    "name",
    [
        *["3x3 padded", "stem", "pointwise", "grouped", "depthwise", "1-D"],
        *["by taps, strided", "direct, grouped", "depthwise, edges on both sides"],
        "two outputs each, strided",
    ],
)
def test_special_values(name: str) -> None:
    """One NaN and one infinity reach the pixels under their windows and no others."""
    problem = PROBLEMS[name]
    x, weight = problem.tensors()
    x[0, 0].view(-1)[7], x[-1, -1].view(-1)[-1] = float("nan"), float("inf")
    for activation in ("none", "relu", "clamp", "sigmoid"):
        check(activation, problem, x, weight, activation=activation)


def test_one_weight_before_several_norms() -> None:
    """Each of them makes another packed form, and so does another eps."""
    problem = PROBLEMS["3x3"]
    x, weight = problem.tensors()
    first, second = norm_of(problem.out), norm_of(problem.out)
    for _ in range(2):
        for norm, eps in [(first, 1e-5), (second, 1e-5), (first, 0.5), ((None,) * 4, 1e-5)]:
            check(f"eps {eps}", problem, x, weight, None, norm, eps=eps)


def test_one_weight_for_images_of_several_sizes() -> None:
    """And with another stride, padding and dilation: the packed form has none of them in it."""
    weight = torch.randn(9, 4, 3, 3)
    for size, stride, padding, dilation in [
        (9, 1, 0, 1),
        (30, 2, 1, 1),
        (12, 1, 2, 2),
        (3, 1, 0, 1),
    ]:
        pair = lambda number: (number, number)  # noqa: E731
        problem = Problem(1, 4, pair(size), 9, (3, 3), pair(stride), pair(padding), pair(dilation))
        check(str(problem), problem, torch.randn(1, 4, size, size), weight)


def test_half_precision_weights() -> None:
    problem = PROBLEMS["grouped"]
    x, weight = problem.tensors()
    norm = norm_of(problem.out)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        narrow = weight.to(dtype)
        narrow_norm = tuple(t.to(dtype) for t in norm)
        got = compute(problem, x, narrow, None, narrow_norm)
        same = tuple(t.float() for t in narrow_norm)
        wide = expected(problem, x.double(), narrow.double(), None, tuple(t.double() for t in same))
        assert_contract(got, expected(problem, x, narrow.float(), None, same), wide, str(dtype))


UNEVEN = {
    "below and to the right": Problem(2, 6, (9, 11), 8, (3, 3), (2, 2)),
    "pointwise": Problem(1, 5, (6, 7), 8, (1, 1)),
    "depthwise": Problem(1, 20, (9, 12), 20, (5, 5), (2, 2), groups=20),
    "beyond the kernel": Problem(1, 4, (5, 5), 6, (2, 2)),
    "1-D": Problem(2, 5, (23,), 9, (4,)),
    "1-D depthwise": Problem(2, 20, (15,), 20, (4,), groups=20),
}


@pytest.mark.parametrize("winograd", [False, True])
@pytest.mark.parametrize("problem", UNEVEN.values(), ids=UNEVEN.keys())
def test_sides_with_paddings_of_their_own(problem: Problem, winograd: bool) -> None:
    x, w = problem.tensors()
    dims = len(problem.kernel)
    before, behind = [0, 2][-dims:], [3, 1][-dims:]
    stride, _, dilation, groups = problem.geometry()
    if winograd:
        if dims == 1:
            pytest.skip("Winograd's tiles are of images")
        w, stride = torch.randn(problem.out, problem.channels // groups, 3, 3), [1, 1]
    got = kernels().openmp_convolution(
        x, w, None, *(None,) * 4, 0.0, stride, [*before, *behind], dilation, groups,
        *(None,) * 3, 0, 0.0, 0.0, winograd,
    )  # fmt: skip
    convolve = functional.conv1d if dims == 1 else functional.conv2d
    around = [n for pair in zip(before[::-1], behind[::-1], strict=True) for n in pair]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return convolve(functional.pad(x, around), w, None, stride, 0, dilation, groups)

    assert_contract(got, plain(x, w), plain(x.double(), w.double()), "padded unevenly")
