"""Interpolation, sampling at a grid and padding: torch's own kernels, in eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowering import resampled
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_bit_identical
from tests.support.regions import hold, region_rows
from tests.support.reports import assert_ran_as_planned, fallbacks_of

IMAGE, LINE, VOLUME = (2, 3, 12, 15), (2, 3, 20), (2, 3, 6, 7, 8)
GRID = torch.rand(2, 9, 11, 2, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2

CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda x: functional.interpolate(x, scale_factor=1.7, mode="linear"), LINE),
    "bilinear by a factor": (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear by two factors": (
        lambda x: functional.interpolate(x, None, (1.5, 0.4), "bilinear", True),
        IMAGE,
    ),
    "bilinear to a size": (lambda x: functional.interpolate(x, (7, 23), mode="bilinear"), IMAGE),
    "bilinear to a square": (lambda x: functional.interpolate(x, 9, mode="bilinear"), IMAGE),
    "bicubic": (nn.Upsample((30, 20), mode="bicubic", align_corners=True), IMAGE),
    "trilinear": (lambda x: functional.interpolate(x, scale_factor=2.0, mode="trilinear"), VOLUME),
    "sampled": (lambda x: functional.grid_sample(x, GRID, align_corners=False), IMAGE),
    "sampled bicubic, reflected": (
        lambda x: functional.grid_sample(x, GRID, "bicubic", "reflection", True),
        IMAGE,
    ),
    "sampled nearest, at the border": (
        lambda x: functional.grid_sample(x, GRID, "nearest", "border", False),
        IMAGE,
    ),
    "reflected": (nn.ReflectionPad2d((1, 2, 3, 4)), IMAGE),
    "reflected line": (nn.ReflectionPad1d(5), LINE),
    "reflected volume": (nn.ReflectionPad3d(2), VOLUME),
    "replicated": (lambda x: functional.pad(x, (3, 1, 0, 2), mode="replicate"), IMAGE),
    "replicated line": (nn.ReplicationPad1d((2, 0)), LINE),
    "wrapped": (nn.CircularPad2d((1, 2, 3, 0)), IMAGE),
    "wrapped line": (nn.CircularPad1d((0, 5)), LINE),
    "wrapped volume": (lambda x: functional.pad(x, (1, 0, 2, 1, 3, 1), mode="circular"), VOLUME),
    "replicated volume": (nn.ReplicationPad3d(1), VOLUME),
}
LEFT = {
    "antialiased": (
        lambda x: functional.interpolate(x, (7, 7), mode="bilinear", antialias=True),
        IMAGE,
    ),
    "factor computed again": (
        lambda x: functional.interpolate(
            x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True
        ),
        IMAGE,
    ),
    "zeros around": (lambda x: functional.pad(x, (1, 2, 3, 4)), IMAGE),
    "wrapped and cut": (lambda x: functional.pad(x, (1, -2, 3, 4), mode="circular"), IMAGE),
}


def around(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (function(x * 1.5) + 0.25).tanh()


def images(shape: tuple[int, ...], layout: str, training: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    return x.clone().requires_grad_(training), x.clone().requires_grad_(training)


LAID_OUT = [
    (name, layout)
    for name, (_, shape) in CASES.items()
    for layout in ("contiguous", *(["channels last"] if len(shape) == 4 else []))
    if (name, layout) != ("wrapped", "channels last")  # torch takes them to rows
]


# What one graph of O2 has: a graph for each of them would take four times as long to compile.
TOGETHER = {
    "lines": [(name, layout) for name, layout in LAID_OUT if CASES[name][1] is LINE],
    "images": [one for one in LAID_OUT if CASES[one[0]][1] is IMAGE and one[1] == "contiguous"],
    "channels last": [one for one in LAID_OUT if one[1] == "channels last"],
    "volumes": [(name, layout) for name, layout in LAID_OUT if CASES[name][1] is VOLUME],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_outputs_and_gradients(name: str, layout: str, training: bool) -> None:
    assert_computed("O1", [(name, layout)], training)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER)
def test_outputs_and_gradients_at_o2(cases: list[tuple[str, str]], training: bool) -> None:
    assert_computed("O2", cases, training)


def assert_computed(level: str, cases: list[tuple[str, str]], training: bool) -> None:
    def function(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: around(CASES[name][0])(x) for name, x in given.items()}

    made = {name: images(CASES[name][1], layout, training) for name, layout in cases}
    given, again = ({name: both[i] for name, both in made.items()} for i in (0, 1))
    with size_limits_lifted(), torch.set_grad_enabled(training):
        compiled = compile_at(level, function)
        out, expected = compiled(given), function(again)
        torch.testing.assert_close(out, expected)
        assert strides(out) == strides(expected)
        if training:
            gradients = [torch.randn_like(y) for y in expected.values()]
            for found in (out, expected):
                torch.autograd.backward([*found.values()], gradients)
            torch.testing.assert_close(
                *({n: x.grad for n, x in of.items()} for of in (given, again))
            )
    assert_ran_as_planned(compiled, level)
    taken = [("resampling", "eager", len(cases), len(cases))]
    assert region_rows(compiled) == ([] if (level, training) == ("O1", True) else taken)


def strides(found: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: x.stride() for name, x in found.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("shape", [LINE, IMAGE, VOLUME], ids=["line", "image", "volume"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nearest_neighbours(level: str, shape: tuple[int, ...], mode: str) -> None:
    """Inductor generates them well; op by op they stay the one operator that they are."""
    layer = nn.Conv1d(3, 3, 1) if shape is LINE else nn.Conv2d(3, 3, 1)
    layer = nn.Conv3d(3, 3, 1) if shape is VOLUME else layer
    model = nn.Sequential(layer, nn.Upsample(scale_factor=1.7, mode=mode)).eval()
    x = torch.randn(*shape)
    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at(level, model)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert_ran_as_planned(compiled, level)
    (row,) = [row for row in region_rows(compiled) if row[0] == "resampling"]
    assert row[1:3] == ("eager" if level == "O1" else "inductor", 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_others(name: str) -> None:
    function, shape = LEFT[name]
    function = around(function)
    x, again = images(shape, "contiguous", False)
    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at("O2", function)
        torch.testing.assert_close(compiled(x), function(again))
    assert_ran_as_planned(compiled, "O2")
    assert region_rows(compiled) == []


def test_wrapped_images_channels_last_are_left_to_torch() -> None:
    x = torch.randn(IMAGE).contiguous(memory_format=torch.channels_last)
    function = around(nn.CircularPad2d(2))
    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at("O2", function)
        out, expected = compiled(x), function(x)
    torch.testing.assert_close(out, expected)
    assert out.stride() == expected.stride()
    assert region_rows(compiled) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_wrapped_between_convolutions(level: str) -> None:
    """Where one leaves an image channels last, the padded one lies so as well."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=(2, 1), padding_mode="circular"),
    ).eval()
    x = torch.randn(2, 16, 20, 24)
    compiled = compile_at(level, model)
    hold(compiled, model, x)
    assert ("resampling", "eager", 2, 2) in region_rows(compiled)


def test_gradients_of_a_grid() -> None:
    def warped(x: Tensor, grid: Tensor) -> Tensor:
        return functional.grid_sample(x, grid.tanh(), align_corners=False).sigmoid()

    x, (grid, again) = torch.randn(IMAGE), (GRID.clone().requires_grad_() for _ in range(2))
    with size_limits_lifted():
        compiled = compile_at("O2", warped)
        compiled(x, grid).square().sum().backward()
    warped(x, again).square().sum().backward()
    torch.testing.assert_close(grid.grad, again.grad, rtol=1e-4, atol=1e-4)
    assert region_rows(compiled) == [("resampling", "eager", 1, 1)]


def test_sizes_that_change() -> None:
    def resized(x: Tensor, like: Tensor) -> Tensor:
        larger = functional.interpolate(x, like.shape[2:], mode="bilinear")
        return functional.pad(larger, (2, 2, 2, 2), mode="reflect") * 2

    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at("O2", resized, dynamic=True)
        for height, width in ((12, 15), (9, 20), (31, 7)):
            x, like = torch.randn(2, 3, 8, 9), torch.empty(1, 1, height, width)
            torch.testing.assert_close(compiled(x, like), resized(x, like))
    assert_ran_as_planned(compiled, "O2")
    assert sum(row[2] for row in region_rows(compiled)) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["vmap", "jvp", "grad"])
def test_function_transforms(kind: str, level: str) -> None:
    """They have no rules for operators of ours, which stay out of them."""

    def padded(x: Tensor) -> Tensor:
        return functional.pad(x, (2, 1, 3, 0), mode="reflect").sin()

    def function(x: Tensor) -> Tensor:
        if kind == "vmap":
            return torch.func.vmap(padded)(x)
        if kind == "jvp":
            return torch.func.jvp(padded, (x,), (x * 2,))[1]
        return torch.func.grad(lambda x: padded(x).sum())(x)

    x = torch.randn(IMAGE)
    with size_limits_lifted():
        compiled = compile_at(level, function)
        torch.testing.assert_close(compiled(x), function(x))
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_training_without_inductor(mode: str) -> None:
    """Torch alone runs it: gradients of gradients are there, as in eager."""

    def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    function = around(lambda x: functional.interpolate(x, scale_factor=2.0, mode=mode))
    x, again = images(IMAGE, "contiguous", True)
    with size_limits_lifted():
        compiled = compile_at("O2", function, options={"disable": ["inductor"]})
        torch.testing.assert_close(gradient(compiled, x), gradient(function, again))
    assert not fallbacks_of(compiled)
    assert region_rows(compiled) == []


def test_a_function_of_the_same_name_is_not_ours() -> None:
    @torch.compiler.allow_in_graph
    def interpolate(x: Tensor, scale_factor: float, mode: str) -> Tensor:
        return x * scale_factor

    x = torch.randn(IMAGE)
    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at("O2", lambda x: interpolate(x, scale_factor=2.0, mode="bilinear"))
        torch.testing.assert_close(compiled(x), x * 2)
    assert region_rows(compiled) == []


def test_a_small_one_stays_with_inductor() -> None:
    with torch.no_grad():
        compiled = compile_at("O2", around(nn.ReflectionPad2d(1)))
        compiled(torch.randn(1, 1, 8, 8))
    assert region_rows(compiled) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_between_convolutions_nothing_is_copied(level: str) -> None:
    """A region at O1 takes the graph apart; interpolation stays one operator, in either layout."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(32, 16, 3),
    ).eval()
    x = torch.randn(1, 16, 40, 40)
    with torch.no_grad():
        compiled = compile_at(level, model)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert_ran_as_planned(compiled, level)
    assert ("resampling", "eager", 2, 2) in region_rows(compiled)


@pytest.mark.parametrize(
    ("name", "rest"),
    [("interpolate", (None, [2.0, 2.0], "bilinear", False)), ("pad", ([1, 2, 3, 4], "reflect"))],
)
def test_one_image_is_not_copied_for_the_stride_of_its_batch(name: str, rest: tuple) -> None:
    """Inductor may name any; by some, torch's kernels would take the image for one in rows."""
    image = torch.randn(1, 8, 20, 30).contiguous(memory_format=torch.channels_last)
    odd = image.as_strided(image.shape, (8, *image.stride()[1:]))
    operator = getattr(resampled.ours, name).default
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = operator(odd, *rest)
    assert not {event.name for event in profile.events()} & {"aten::copy_", "aten::clone"}
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert_bit_identical(result, operator(image, *rest), name)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("interpolate", (None, [2.0, 1.5], "bilinear", False)),
        ("interpolate", ([7, 9], None, "bicubic", True)),
        ("grid_sample", (GRID.double(), "bilinear", "zeros", False)),
        ("pad", ([1, 2, 3, 4], "reflect")),
        ("pad", ([1, 2, 3, 0], "circular")),
    ],
)
def test_operators_keep_torchs_rules(name: str, rest: tuple) -> None:
    """Fake results as real ones, gradients registered, nothing written."""
    x = torch.randn(IMAGE, dtype=torch.float64, requires_grad=True)
    operator = getattr(resampled.ours, name).default
    torch.library.opcheck(operator, (x, *rest))
    assert torch.autograd.gradcheck(lambda x: operator(x, *rest), (x,), fast_mode=True)
