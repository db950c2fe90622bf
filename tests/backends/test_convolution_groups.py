"""Convolutions that read each other become one call; what others read of it stays outside."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_dispatch import profiling
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, used
from tests.support.regions import assert_regions, hold

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def calls(compiled: Any, *inputs: Tensor) -> list[str]:
    """The operators of ours that one call runs."""
    with torch.no_grad(), torch.profiler.profile(activities=profiling.activities()) as profile:
        compiled(*inputs)
    names = [event.key for event in profile.key_averages() for _ in range(event.count)]
    return sorted(n.removeprefix("kernel_dispatch::") for n in names if "openmp_conv" in n)


def block(expansion: int, stride: int = 1) -> nn.Sequential:
    wide = 16 * expansion
    return nn.Sequential(
        nn.Conv2d(16, wide, 1, bias=False),
        nn.BatchNorm2d(wide),
        nn.ReLU6(),
        nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
        nn.SiLU(),
        nn.Conv2d(wide, 16, 1, bias=False),
        nn.BatchNorm2d(16),
    )


def test_an_inverted_residual_is_one_call() -> None:
    x = torch.randn(2, 16, 40, 40)
    model = used(Of(lambda self, x: x + self.block(x), block=block(4)), x)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 3, 6))


def test_blocks_behind_each_other_are_one_call_with_the_sums_between_them() -> None:
    def blocks(self: Any, x: Tensor) -> Tensor:
        y = x + self.a(x)
        return self.c(y + self.b(y))

    x = torch.randn(1, 16, 33, 35)
    model = used(Of(blocks, a=block(6), b=block(2), c=block(3, stride=2)), x)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 9, 18))


def branches(self: Any, x: Tensor) -> Tensor:
    """A residual network's block whose shortcut is a convolution, and one more behind it."""
    y = functional.relu(self.two(functional.relu(self.one(x))) + self.shortcut(x))
    return self.last(y)


def read_twice_by_one(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    return self.three(self.two(y) * y + y)


def two_images_from_outside(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.relu(self.two(self.one(x)) + self.shortcut(y) + x.mean())


@pytest.mark.parametrize("function", [branches, read_twice_by_one, two_images_from_outside])
def test_graphs_of_convolutions(function: Any) -> None:
    images = [torch.randn(1, 24, 30, 31)] * (2 if function is two_images_from_outside else 1)
    names = ("one", "two", "three", "shortcut", "last")
    layers = {name: nn.Conv2d(24, 24, 3, 1, 1) for name in names}
    model = Of(function, **layers)
    compiled = compile_at("O2", model)
    hold(compiled, model, *images)
    used_layers = sum(f"self.{name}(" in inspect.getsource(function) for name in names)
    assert calls(compiled, *images).count("openmp_convolutions") == 1
    assert_regions(compiled, ("convolution", "openmp", used_layers, 2 * used_layers))


def added(self: Any, x: Tensor) -> Tensor:
    """Nobody else reads what is added: the sum may lie there."""
    y = self.one(x)
    return self.three(self.two(self.wide(y)) + y)


def added_and_read_again(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    return self.three(self.two(self.wide(y)) + y) * y


def added_and_multiplied(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    z = self.three(x)
    return self.wide(torch.relu(self.two(self.wide(y)) + y) * z)


def added_twice(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    return self.three(self.three(self.two(self.wide(y)) + y) + y)


def a_part_of_what_is_added(self: Any, x: Tensor) -> Tensor:
    y = self.wide(x)
    return self.three(self.three(y[:, :24]) + y[:, :24]) + y[:, 24:48]


def of_another_size(self: Any, x: Tensor) -> Tensor:
    return self.three(self.three(x) + self.one(x).transpose(2, 3).reshape(x.shape))


def a_part_that_outlives_the_whole(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    whole = torch.cat([y, self.three(x)], 1)
    return self.three(self.both(whole)) + y


def a_slice_that_outlives_the_whole(self: Any, x: Tensor) -> Tensor:
    y = self.wide(self.one(x))
    return self.three(self.two(y)) + y[:, :24]


def given(self: Any, x: Tensor) -> Tensor:
    return self.three(self.two(self.wide(x)) + x)


IN_PLACE = [
    added,
    added_and_read_again,
    added_and_multiplied,
    added_twice,
    a_part_of_what_is_added,
    a_part_that_outlives_the_whole,
    a_slice_that_outlives_the_whole,
    of_another_size,
    given,
]


def with_layers(function: Any, wide: int) -> Of:
    layers = {
        "one": nn.Conv2d(24, 24, 3, 1, 1),
        "wide": nn.Conv2d(24, wide, 1),
        "two": nn.Conv2d(wide, 24, 1),
        "three": nn.Conv2d(24, 24, 1),
        "both": nn.Conv2d(48, 24, 1),
    }
    return Of(function, **layers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", IN_PLACE)
def test_sums_may_lie_where_one_of_their_terms_lay(function: Any) -> None:
    """Of products of single pixels; deep ones (300) are stored before they are finished."""
    x, y = torch.randn(2, 24, 30, 31), torch.randn(2, 24, 30, 31)
    own = x.clone(), y.clone()

    def both(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"48": m.flat(x), "300": m.deep(y)}

    model = Of(both, flat=with_layers(function, 48), deep=with_layers(function, 300))
    compiled = compile_at("O2", model)
    first = hold(compiled, model, x, y)
    assert torch.equal(x, own[0]) and torch.equal(y, own[1])
    with torch.no_grad():
        again = compiled(x, y)
    assert all(torch.equal(again[wide], first[wide]) for wide in first)
    ran = calls(compiled, x, y)
    assert len(ran) >= 2 and set(ran) <= {"openmp_convolution", "openmp_convolutions"}


def test_what_is_also_returned_is_not_inside() -> None:
    def returned(self: Any, x: Tensor) -> list[Tensor]:
        y = self.one(x)
        return [self.three(self.two(y)), y]

    x = torch.randn(1, 24, 30, 31)
    model = Of(returned, **{name: nn.Conv2d(24, 24, 3) for name in ("one", "two", "three")})
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolution", "openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 3, 6))


class Squeezing(nn.Module):
    """A depthwise convolution, factors of its channels computed of its output, a projection."""

    def __init__(self, gate: nn.Module, kernel: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(48, 48, 3, 1, 1, groups=48)
        self.squeeze, self.excite, self.gate = nn.Conv2d(48, 8, 1), nn.Conv2d(8, 48, 1), gate
        self.project = nn.Conv2d(48, 24, kernel, 1, kernel // 2, groups=groups)

    def factors(self, y: Tensor) -> Tensor:
        return self.gate(self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.depthwise(x))
        return self.project(self.factors(y) * y)


class Pooling(Squeezing):
    def factors(self, y: Tensor) -> Tensor:
        return self.gate(self.excite(self.squeeze(functional.adaptive_avg_pool2d(y, 1)).relu()))


def test_squeeze_and_excitation_is_part_of_the_call() -> None:
    """Of each: there is one call for every image."""
    models = {
        "sigmoid": Squeezing(nn.Sigmoid()),
        "hardsigmoid": Squeezing(nn.Hardsigmoid()),
        "tanh": Squeezing(nn.Tanh()),
        "pooling": Pooling(nn.Sigmoid()),
    }

    def each(m: Any, *images: Tensor) -> dict[str, Tensor]:
        return {name: model(x) for name, model, x in zip(models, m.models, images, strict=True)}

    model = Of(each, models=nn.ModuleList(models.values()))
    given = [torch.randn(2, 48, 30, 31) + 2 for _ in models]
    compiled = compile_at("O2", model)
    hold(compiled, model, *given)
    assert calls(compiled, *given) == ["openmp_convolutions"] * len(models)
    assert_regions(compiled, ("convolution", "openmp", 4 * len(models), 8 * len(models)))
    with torch.no_grad():
        for one in models.values():
            one.squeeze.weight.mul_(-1.5)
    hold(compiled, model, *given, where="after a layer of the factors changed")


def test_squeeze_and_excitation_of_sizes_that_change() -> None:
    model = Squeezing(nn.Sigmoid())
    compiled = compile_at("O2", model, dynamic=True)
    for size in (30, 7, 41):
        hold(compiled, model, torch.randn(2, 48, size, size + 2))
    assert calls(compiled, torch.randn(2, 48, 12, 13)) == ["openmp_convolutions"]


@pytest.mark.parametrize("kernel, groups", [(3, 1), (1, 2)])
def test_other_convolutions_read_the_product(kernel: int, groups: int) -> None:
    x = torch.randn(1, 48, 30, 31)
    model = Squeezing(nn.Sigmoid(), kernel, groups)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert "openmp_convolutions" in calls(compiled, x)
    assert_regions(compiled, ("convolution", "openmp", 4, 8))


class Returning(Squeezing):
    """What is between is the caller's, too."""

    def forward(self, x: Tensor) -> Any:
        y = functional.silu(self.depthwise(x))
        factors = self.factors(y)
        product = factors * y
        return self.project(product), y, factors, product


class ByHand(Squeezing):
    """Factors of other shapes, of the image itself, and a mean over one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x)
        lines = y.mean((2,), keepdim=True)
        return self.project(y * lines) + self.project(y * y) + self.project(y * 0.5) + lines.mean()


@pytest.mark.parametrize("kind", [Returning, ByHand])
def test_products_that_are_no_factors_of_channels_stay(kind: type[Squeezing]) -> None:
    x = torch.randn(1, 48, 30, 31)
    model = kind(nn.Sigmoid())
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "openmp", 4, 4))


def test_an_image_of_one_pixel() -> None:
    x = torch.randn(3, 48, 1, 1)
    model = Squeezing(nn.Sigmoid())
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "openmp", 4, 4))


def between_is_returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    middle = self.first(x)
    return self.second(middle), middle


def between_is_sorted(self: Any, x: Tensor) -> Tensor:
    return self.second(self.first(x).sort(1).values)


@pytest.mark.parametrize("function", [between_is_returned, between_is_sorted])
def test_what_is_between_is_kept_where_it_is_read(function: Any) -> None:
    x = torch.randn(1, 16, 40, 40)
    layers = {"first": nn.Conv2d(16, 48, 1), "second": nn.Conv2d(48, 48, 3, 1, 1, groups=48)}
    model = Of(function, **layers)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolution"] * 2
    assert_regions(compiled, ("convolution", "openmp", 2, 4))


def test_a_convolution_of_itself_by_itself() -> None:
    """The same layer twice, and an addend that is the input of both."""
    x = torch.randn(1, 48, 40, 40)
    layer = nn.Conv2d(48, 48, 3, 1, 1, groups=48)
    model = Of(lambda self, x: self.layer(self.layer(x)) + x, layer=layer)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 2, 4))


def test_sizes_that_change() -> None:
    x = torch.randn(1, 16, 40, 40)
    model = used(block(4), x)
    compiled = compile_at("O2", model, dynamic=True)
    for size in (40, 37, 9, 64):
        hold(compiled, model, torch.randn(2, 16, size, size + 3))
    assert calls(compiled, torch.randn(2, 16, 33, 36)) == ["openmp_convolutions"]


def test_changed_weights_show() -> None:
    x = torch.randn(1, 16, 40, 40)
    model = used(block(4), x)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    for index in (0, 1, 3, 4, 6, 7):
        with torch.no_grad():
            model[index].weight.mul_(1.5)
        hold(compiled, model, x, where=f"after layer {index} changed")


@pytest.mark.parametrize("around", [(0, 1, 0, 1), (2, 1), (1, 0, 0, 3), (0, 0, 2, 2)], ids=str)
def test_zeros_around_an_image_are_the_convolutions(around: tuple[int, ...]) -> None:
    """As models from TensorFlow have them; the padding is gone, and the pair is one."""
    x = torch.randn(1, 16, 41, 40)
    layers = {"first": nn.Conv2d(16, 48, 1), "second": nn.Conv2d(48, 48, 3, 2, 1, groups=48)}
    model = Of(lambda self, x: self.second(functional.pad(self.first(x).relu(), around)), **layers)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 2, 4))


@pytest.mark.parametrize("around", [(1, 1, 1, 1, 1, 1), (-1, 1), (1, 1)], ids=str)
def test_other_padding_stays(around: tuple[int, ...]) -> None:
    """Around channels, negative, of ones."""
    x = torch.randn(1, 16, 41, 40)
    channels = 18 if len(around) == 6 else 16
    value = 1.0 if around == (1, 1) else 0.0
    layer = nn.Conv2d(channels, 32, 3)
    model = Of(lambda self, x: self.layer(functional.pad(x, around, value=value)), layer=layer)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "openmp", 1, 1))


def test_padded_images_with_other_readers_and_lines() -> None:
    def spelled(self: Any, x: Tensor, lines: Tensor) -> list[Tensor]:
        padded = functional.pad(x, (1, 2, 0, 1))
        return [self.image(padded), padded.relu(), self.line(functional.pad(lines, (4, 0)))]

    model = Of(spelled, image=nn.Conv2d(16, 32, 3), line=nn.Conv1d(8, 32, 5))
    compiled = compile_at("O2", model)
    hold(compiled, model, torch.randn(2, 16, 20, 20), torch.randn(2, 8, 50))
    assert_regions(compiled, ("convolution", "openmp", 2, 2))


def test_half_precision_in_float32() -> None:
    x = torch.randn(1, 16, 40, 40, dtype=torch.float16)
    model = used(block(4), x.float()).half()
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "openmp", 3, 3))


MIXED: dict[str, Any] = {
    "sum, the narrow one first": lambda narrow, wide: narrow + wide,
    "sum, the wide one first": lambda narrow, wide: wide + narrow,
    "side by side": lambda narrow, wide: torch.cat([narrow, wide], 1),
    "the wide one narrowed": lambda narrow, wide: narrow + wide.to(narrow.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_two_dtypes_in_one_graph(name: str, dtype: torch.dtype) -> None:
    """They are no parts of one call, whoever multiplies them."""
    join = MIXED[name]

    def both(m: Any, x: Tensor) -> Tensor:
        joined = torch.relu(join(m.narrow(x.to(dtype)), m.wide(x)))
        return m.last(joined.float())

    channels = 64 if name == "side by side" else 32
    layers = {
        "narrow": nn.Conv2d(16, 32, 3, padding=1).to(dtype),
        "wide": nn.Conv2d(16, 32, 3, padding=1),
        "last": nn.Conv2d(channels, 16, 1),
    }
    model = Of(both, **layers).eval()
    compiled = compile_at("O2", model)
    x = torch.randn(2, 16, 14, 14)
    with torch.no_grad():
        got, own = compiled(x), model(x)
    assert got.dtype is own.dtype
    torch.testing.assert_close(got, own, atol=0.03, rtol=0.03)


def test_lines() -> None:
    x = torch.randn(2, 24, 1500)
    layers = nn.Sequential(
        nn.Conv1d(24, 48, 1),
        nn.PReLU(),
        nn.Conv1d(48, 48, 5, padding=4, dilation=2, groups=48),
        nn.ReLU(),
        nn.Conv1d(48, 24, 1),
    ).eval()
    compiled = compile_at("O2", layers)
    hold(compiled, layers, x)
    assert calls(compiled, x) == ["openmp_convolution", "openmp_convolutions"]


def test_the_time_is_named_after_the_region() -> None:
    assert profiling._operator("kernel_dispatch", "openmp_convolutions") == (
        profiling.REGION,
        "openmp",
        "convolution",
    )


@pytest.mark.parametrize(("channels", "size", "stride"), [(64, 14, 1), (25, 29, 2), (40, 7, 1)])
def test_many_threads_cut_a_pair_into_more_parts_and_change_no_result(
    channels: int, size: int, stride: int
) -> None:
    """More threads than the machine has: what is cut for them is the same."""
    wide = 6 * channels
    model = nn.Sequential(
        nn.Conv2d(channels, wide, 1),
        nn.ReLU6(),
        nn.Conv2d(wide, wide, 3, stride, 1, groups=wide),
        nn.ReLU6(),
        nn.Conv2d(wide, channels, 1),
    )
    x = torch.randn(3, channels, size, size)
    compiled = compile_at("O2", used(model, x))
    hold(compiled, model, x)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            results = {}
            for threads in (1, 2, 6, 9, 40):
                torch.set_num_threads(threads)
                results[threads] = compiled(x)
    finally:
        torch.set_num_threads(before)
    for threads, result in results.items():
        assert torch.equal(result, results[1]), threads
