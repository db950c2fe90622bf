"""openmp_convolutions, called directly: several convolutions give what they give one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lowering.convolution_steps import Kind, Step
from lowering.native import library
from tests.kernels.test_convolution_kernel import Problem, compute, expected
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor
# One behind the other. Between two that are computed together lie 64 Ki values or more.
CHAINS = {
    "expand, depthwise": [
        Problem(1, 16, (40, 36), 64, (1, 1)),
        Problem(1, 64, (40, 36), 64, (3, 3), padding=(1, 1), groups=64),
    ],
    "expand, depthwise, project": [
        Problem(1, 24, (56, 50), 72, (1, 1)),
        Problem(1, 72, (56, 50), 72, (5, 5), (2, 2), (2, 2), groups=72),
        Problem(1, 72, (28, 25), 24, (1, 1)),
    ],
    "channels that end within a vector": [
        Problem(2, 7, (33, 31), 45, (1, 1)),
        Problem(2, 45, (33, 31), 45, (3, 3), (2, 1), (1, 0), groups=45),
    ],
    "fewer channels than a vector": [
        Problem(1, 5, (100, 90), 11, (1, 1)),
        Problem(1, 11, (100, 90), 11, (3, 3), padding=(1, 1), groups=11),
    ],
    "dilated, no padding": [
        Problem(1, 12, (44, 44), 48, (1, 1)),
        Problem(1, 48, (44, 44), 48, (3, 3), (1, 1), (0, 0), (3, 2), groups=48),
    ],
    "depthwise behind a dilated one": [
        Problem(1, 40, (40, 44), 48, (3, 3), padding=(2, 2), dilation=(2, 2)),
        Problem(1, 48, (40, 44), 48, (3, 3), padding=(1, 1), groups=48),
        Problem(1, 48, (40, 44), 16, (1, 1)),
    ],
    "depthwise behind groups": [
        Problem(1, 40, (40, 44), 64, (3, 3), padding=(1, 1), groups=2),
        Problem(1, 64, (40, 44), 64, (3, 3), padding=(1, 1), groups=64),
    ],
    "more padding than kernel": [
        Problem(1, 8, (40, 40), 48, (1, 1)),
        Problem(1, 48, (40, 40), 48, (3, 3), (3, 3), (4, 5), groups=48),
    ],
    "strides beyond the kernel": [
        Problem(1, 8, (60, 60), 32, (1, 1)),
        Problem(1, 32, (60, 60), 32, (2, 2), (5, 5), groups=32),
    ],
    "kernel of the image": [
        Problem(3, 8, (12, 12), 200, (1, 1)),
        Problem(3, 200, (12, 12), 200, (12, 12), groups=200),
    ],
    "stem, depthwise": [
        Problem(2, 3, (97, 95), 32, (3, 3), (2, 2), (1, 1)),
        Problem(2, 32, (49, 48), 32, (3, 3), padding=(1, 1), groups=32),
    ],
    "dilated stem, depthwise": [
        Problem(1, 6, (70, 66), 32, (3, 3), padding=(2, 2), dilation=(2, 2)),
        Problem(1, 32, (70, 66), 32, (3, 3), padding=(1, 1), groups=32),
    ],
    "stem of long lines, depthwise": [
        Problem(1, 64, (3, 2100), 32, (3, 3), padding=(1, 1)),
        Problem(1, 32, (3, 2100), 32, (3, 3), padding=(1, 1), groups=32),
    ],
    "depthwise, pointwise": [
        Problem(2, 40, (40, 41), 40, (3, 3), padding=(1, 1), groups=40),
        Problem(2, 40, (40, 41), 70, (1, 1)),
    ],
    "depthwise, pointwise, twice": [
        Problem(1, 32, (57, 57), 32, (3, 3), padding=(1, 1), groups=32),
        Problem(1, 32, (57, 57), 48, (1, 1)),
        Problem(1, 48, (57, 57), 48, (3, 3), (2, 2), (1, 1), groups=48),
        Problem(1, 48, (29, 29), 96, (1, 1)),
    ],
    "stem, depthwise, project": [
        Problem(2, 3, (97, 95), 32, (3, 3), (2, 2), (1, 1)),
        Problem(2, 32, (49, 48), 32, (3, 3), padding=(1, 1), groups=32),
        Problem(2, 32, (49, 48), 16, (1, 1)),
    ],
    "expand, depthwise, project, more than once": [
        Problem(1, 24, (64, 57), 100, (1, 1)),
        Problem(1, 100, (64, 57), 100, (3, 3), padding=(1, 1), groups=100),
        Problem(1, 100, (64, 57), 40, (1, 1)),
        Problem(1, 40, (64, 57), 90, (1, 1)),
        Problem(1, 90, (64, 57), 90, (3, 3), (2, 2), (0, 1), (2, 1), groups=90),
        Problem(1, 90, (30, 29), 33, (1, 1)),
    ],
    "1-D": [
        Problem(2, 20, (900,), 64, (1,)),
        Problem(2, 64, (900,), 64, (5,), padding=(4,), dilation=(2,), groups=64),
        Problem(2, 64, (900,), 20, (1,)),
    ],
    "a line too long for the cache": [
        Problem(1, 4, (9000,), 32, (1,)),
        Problem(1, 32, (9000,), 32, (3,), padding=(1,), groups=32),
        Problem(1, 32, (9000,), 8, (1,)),
    ],
    "nothing to compute together": [
        Problem(2, 6, (9, 9), 8, (3, 3), padding=(1, 1)),
        Problem(2, 8, (9, 9), 8, (3, 3), padding=(1, 1), groups=8),
        Problem(2, 8, (9, 9), 5, (2, 2), (2, 2)),
    ],
    "no image": [Problem(0, 4, (9, 9), 6, (3, 3)), Problem(0, 6, (7, 7), 6, (1, 1))],
}
NOTHING = -1  # is read
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
every_thread_count = pytest.mark.parametrize("threads", [1, 3])


def layers_of(chain: list[Problem]) -> list[dict[str, Any]]:
    """With a bias, a BatchNorm, or neither; with activations of every kind."""
    layers = []
    for index, problem in enumerate(chain):
        _, weight = problem.tensors()
        weight /= weight[0].numel() ** 0.5
        bias = torch.randn(problem.out) if index % 3 != 2 else None
        norm = (None,) * 4
        if index % 3 == 1:
            norm = tuple(torch.rand(problem.out) + 0.5 for _ in range(4))
        activation = ("clamp", "silu", "none", "relu")[index % 4]
        layers.append({"weight": weight, "bias": bias, "norm": norm, "activation": activation})
    return layers


def beside_of(chain: list[Problem], x: Tensor, layers: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    shape = one_by_one(compute, chain, x, layers, (None,) * 3).shape
    return tuple(torch.randn(shape) for _ in range(3))


def one_by_one(
    function: Any, chain: list[Problem], x: Tensor, layers: list[dict[str, Any]], beside: Any
) -> Tensor:
    for problem, layer in zip(chain, layers, strict=True):
        own = {**layer, "beside": beside if layer is layers[-1] else (None,) * 3}
        x = function(problem, x, **own)
    return x


def together(chain: list[Problem], x: Tensor, layers: list[dict[str, Any]], beside: Any) -> Tensor:
    """Each reads what the one before it makes; `beside`: all three tensors, or none."""
    others = [tensor for tensor in beside if tensor is not None]
    reads = [(len(others) + i if i else 0, *[NOTHING] * 3) for i in range(len(chain))]
    reads[-1] = (reads[-1][0], *((1, 2, 3) if others else [NOTHING] * 3))
    return joined(chain, x, layers, others, reads)


def joined(
    problems: Sequence[Problem | None],
    x: Tensor,
    layers: list[dict[str, Any]],
    others: list[Tensor],
    reads: list[tuple[int, ...]],
) -> Tensor:
    """`reads`: the number of each one's image, of what lies beside its output, and of the factors
    of its channels, if there are any. No problem: the mean of the image's pixels."""
    tensors: list[Tensor] = []
    texts: list[str] = []
    for problem, layer, read in zip(problems, layers, reads, strict=True):
        step = Step(Kind.MEAN, *read) if problem is None else step_of(problem, layer, read)
        tensors += [tensor for tensor in step.tensors if tensor is not None]
        texts.append(step.text(lambda number: NOTHING if number is None else number))
    return kernels().openmp_convolutions(x, tensors, " ".join(texts), others)


def step_of(problem: Problem, layer: dict[str, Any], read: tuple[int, ...]) -> Step:
    stride, padding, dilation, groups = problem.geometry()
    _, a, b = ACTIVATIONS[layer["activation"]]
    geometry = (stride, padding, padding, dilation)
    return Step(
        Kind.CONVOLUTION,
        *read,
        tensors=[layer["weight"], layer["bias"], *layer["norm"]],
        window=[one for numbers in geometry for one in numbers * (2 // len(numbers))],
        groups=groups,
        act=list(ACTIVATIONS).index(layer["activation"]),
        numbers=(1e-3, a, b),
    )


def convolutions_ran() -> int:
    return library.counts()[library.COUNTED.index(("convolution", "openmp"))]


def doubled(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(doubled, value))
    if isinstance(value, dict):
        return {key: doubled(one) for key, one in value.items()}
    return value.double() if isinstance(value, Tensor) else value


@every_thread_count
@every_chain
def test_the_numbers_are_those_of_one_convolution_after_the_other(
    chain: list[Problem], threads: int
) -> None:
    torch.set_num_threads(threads)
    x, _ = chain[0].tensors()
    layers = layers_of(chain)
    beside = beside_of(chain, x, layers)
    before = convolutions_ran()
    got = together(chain, x, layers, beside)
    assert convolutions_ran() - before == (len(chain) if got.numel() else 0)
    apart = one_by_one(compute, chain, x, layers, beside)
    assert_bit_identical(got, apart, "together")
    own = one_by_one(expected, chain, x, layers, beside)
    wide = one_by_one(expected, chain, x.double(), doubled(layers), doubled(beside))
    assert_contract(got, own, wide, "several convolutions")
    assert got.movedim(1, -1).is_contiguous(), "channels are not innermost"


@every_chain
def test_the_result_does_not_depend_on_how_the_image_lies(chain: list[Problem]) -> None:
    x, _ = chain[0].tensors()
    layers = layers_of(chain)
    got = together(chain, x.contiguous(), layers, (None,) * 3)
    again = together(chain, x.movedim(1, -1).contiguous().movedim(-1, 1), layers, (None,) * 3)
    assert_bit_identical(got, again, "layouts of the input")
    assert got.numel() == 0 or got.data_ptr() != again.data_ptr()


def test_a_changed_weight_shows_in_the_next_call() -> None:
    chain = CHAINS["expand, depthwise, project"]
    x, _ = chain[0].tensors()
    layers = layers_of(chain)
    together(chain, x, layers, (None,) * 3)
    for layer in layers:
        layer["weight"].mul_(2)
        got = together(chain, x, layers, (None,) * 3)
        assert_bit_identical(got, one_by_one(compute, chain, x, layers, (None,) * 3), "changed")


# Two inverted residuals with sums, a branch of each, and a second image from outside.
GRAPH = [
    Problem(1, 24, (40, 41), 96, (1, 1)),
    Problem(1, 96, (40, 41), 96, (3, 3), padding=(1, 1), groups=96),
    Problem(1, 96, (40, 41), 24, (1, 1)),
    Problem(1, 24, (40, 41), 88, (1, 1)),
    Problem(1, 88, (40, 41), 88, (3, 3), padding=(1, 1), groups=88),
    Problem(1, 88, (40, 41), 24, (1, 1)),
    Problem(1, 24, (40, 41), 24, (3, 3), padding=(1, 1)),
]
X, OUTSIDE, FIRST = 0, 1, 2  # then what each of them makes
GRAPH_READS = [
    (X, NOTHING, NOTHING, NOTHING),
    (FIRST, NOTHING, NOTHING, NOTHING),
    (FIRST + 1, NOTHING, NOTHING, X),
    (FIRST + 2, NOTHING, NOTHING, NOTHING),
    (FIRST + 3, NOTHING, NOTHING, NOTHING),
    (FIRST + 4, FIRST + 2, NOTHING, NOTHING),
    (OUTSIDE, NOTHING, FIRST + 2, FIRST + 5),
]


@every_thread_count
def test_images_may_be_read_by_several(threads: int) -> None:
    torch.set_num_threads(threads)
    x, outside = torch.randn(2, 1, 24, 40, 41)
    layers = layers_of(GRAPH)
    got = joined(GRAPH, x, layers, [outside], GRAPH_READS)
    values = [x, outside]
    for problem, layer, (image, *beside) in zip(GRAPH, layers, GRAPH_READS, strict=True):
        tensors = tuple(values[number] if number >= 0 else None for number in beside)
        values.append(compute(problem, values[image], **layer, beside=tensors))
    assert_bit_identical(got, values[-1], "a graph of convolutions")


@every_thread_count
@pytest.mark.parametrize("channels", [96, 100, 12])
@pytest.mark.parametrize("size", [(40, 41), (7, 7), (1, 3)])
def test_squeeze_and_excitation(size: tuple[int, int], channels: int, threads: int) -> None:
    """A mean of pixels, two layers of it, and their product with the image; of two images."""
    torch.set_num_threads(threads)
    problems = [
        Problem(2, channels, size, channels, (3, 3), padding=(1, 1), groups=channels),
        Problem(2, channels, (1, 1), 8, (1, 1)),
        Problem(2, 8, (1, 1), channels, (1, 1)),
        Problem(2, channels, size, 40, (1, 1)),
    ]
    x, _ = problems[0].tensors()
    x += 3  # so that a mean of many has something to lose
    first, squeeze, excite, project = layers = layers_of(problems)
    excite["activation"] = "sigmoid"
    none = [NOTHING] * 3
    reads = [(0, *none), (1, *none), (2, *none), (3, *none), (1, *none, 4)]
    steps = [problems[0], None, *problems[1:]]
    before = convolutions_ran()
    got = joined(steps, x, [first, {}, squeeze, excite, project], [], reads)
    assert convolutions_ran() - before == len(problems)

    def apart(function: Any, x: Tensor, layers: list[dict[str, Any]]) -> Tensor:
        y = function(problems[0], x, **layers[0])
        gate = function(problems[1], y.mean((2, 3), keepdim=True), **layers[1])
        gate = function(problems[2], gate, **layers[2])
        return function(problems[3], y * gate, **layers[3])

    own, wide = apart(expected, x, layers), apart(expected, x.double(), doubled(layers))
    assert_contract(got, own, wide, "squeeze and excitation")
    torch.set_num_threads(1)
    alone = joined(steps, x, [first, {}, squeeze, excite, project], [], reads)
    assert_bit_identical(got, alone, "one thread")


def test_factors_of_another_convolution_are_refused() -> None:
    problem = Problem(1, 16, (9, 9), 16, (3, 3))
    x, _ = problem.tensors()
    with pytest.raises(RuntimeError, match="factors of channels are for ungrouped convolutions"):
        joined(
            [problem], x, layers_of([problem]), [torch.rand(1, 16, 1, 1)], [(0, *[NOTHING] * 3, 1)]
        )


def test_arguments_that_do_not_belong_together_are_refused() -> None:
    x, weight = CHAINS["expand, depthwise"][0].tensors()
    text = Step(Kind.CONVOLUTION, 0, tensors=[weight, *[None] * 5]).text(lambda number: number or 0)
    for tensors, given, message in (
        ([], text, "these layers have 1 tensors, and here are 0"),
        ([weight], text + " 1", "described by 23 integers, and here are 24"),
        ([weight], text + " one", "described by integers, not by one"),
        ([], "", "described by 23 integers, and here are 0"),
        ([], Step(Kind.SLICE, 0, extent=(0, 1)).text(lambda number: number or 0), "no layer makes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels().openmp_convolutions(x, tensors, given, [])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (1, "layer 0 reads value 1, which is made later"),
        (-1, "layer 0 reads no image: -1"),
    ],
)
def test_values_that_are_not_there_are_refused(image: int, message: str) -> None:
    chain = CHAINS["expand, depthwise"]
    x, _ = chain[0].tensors()
    reads = [(image, *[NOTHING] * 3), (1, *[NOTHING] * 3)]
    with pytest.raises(RuntimeError, match=message):
        joined(chain, x, layers_of(chain), [], reads)
