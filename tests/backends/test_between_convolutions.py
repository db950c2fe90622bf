"""What stands between convolutions and is computed in one call with them.

Pools, concatenations, channels taken apart, BatchNorm before its convolution: the numbers, how
often convolutions ran, and in how many calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.backends.test_convolution_groups import calls
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, used
from tests.support.regions import assert_regions, details, hold, no_cached_graphs

Tensor = torch.Tensor
ONE_CALL = ["openmp_convolutions"]


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies(), no_cached_graphs():
        yield


def held_as_one(model: nn.Module, x: Tensor, convolutions: int, *names: str) -> Any:
    """In one call that has these things besides convolutions."""
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ONE_CALL
    assert_regions(compiled, ("convolution", "openmp", convolutions, 2 * convolutions))
    (detail,) = details(compiled, "convolution")
    assert set(names) <= set(detail.removeprefix("with ").split(", ")), detail
    return compiled


def layer(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Branches(nn.Module):
    """An Inception block."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.one, self.pool = layer(24, 20), pool
        self.two = nn.Sequential(layer(24, 12), layer(12, 24, 3))
        self.four = layer(24, 9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x), self.four(self.pool(x))], 1)


POOLS: dict[str, tuple[nn.Module, str]] = {
    "largest": (nn.MaxPool2d(3, 1, 1), "max_pool"),
    "average": (nn.AvgPool2d(3, 1, 1), "avg_pool"),
    "average of what is inside": (nn.AvgPool2d(3, 1, 1, count_include_pad=False), "avg_pool"),
}


@pytest.mark.parametrize("pool, name", POOLS.values(), ids=POOLS.keys())
def test_branches_are_put_together(pool: nn.Module, name: str) -> None:
    x = torch.randn(2, 16, 23, 25)
    parts = [layer(16, 24, 3), Branches(pool), layer(53, 24), Branches(pool), layer(53, 8, 3)]
    model = used(nn.Sequential(*parts), x)
    held_as_one(model, x, 11, "concatenation", name)


SHRINKING: dict[str, nn.Module] = {
    "3x3": nn.MaxPool2d(3, 2, 1),
    "3x3, the last one cut off": nn.MaxPool2d(3, 2, ceil_mode=True),
    "2x2": nn.MaxPool2d(2),
    "dilated": nn.MaxPool2d(3, 2, 1, dilation=2),
    "2x3": nn.MaxPool2d((2, 3), (3, 2), (1, 0)),
    "average of 2x2": nn.AvgPool2d(2),
    "average of 2x3": nn.AvgPool2d((2, 3), (3, 2), (0, 1), count_include_pad=False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pool", SHRINKING.values(), ids=SHRINKING.keys())
def test_pools(pool: nn.Module) -> None:
    """Of more channels than two vectors have, of one vector's, and of fewer: a call for each."""
    x, channels = torch.randn(2, 3, 23, 26), (70, 16, 5)
    each = [nn.Sequential(layer(3, wide, 3), pool, layer(wide, 8, 3)) for wide in channels]
    model = used(Of(of_each, models=nn.ModuleList(each)), *[x] * 3)
    given = [torch.randn_like(x) for _ in channels]
    compiled = compile_at("O2", model)
    hold(compiled, model, *given)
    assert calls(compiled, *given) == ONE_CALL * 3
    assert_regions(compiled, ("convolution", "openmp", 6, 12))
    (detail,) = details(compiled, "convolution")
    assert ("max_pool" if isinstance(pool, nn.MaxPool2d) else "avg_pool") in detail


def of_each(self: Any, *images: Tensor) -> list[Tensor]:
    return [model(x) for model, x in zip(self.models, images, strict=True)]


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3), nn.LPPool2d(2, 2)],
    ids=["cut off", "another divisor", "of powers"],
)
def test_other_pools_stay(pool: nn.Module) -> None:
    x = torch.randn(2, 3, 24, 26)
    model = used(nn.Sequential(layer(3, 16, 3), pool, layer(16, 8, 3)), x)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolution"] * 2


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_passes_a_pool_as_in_eager(odd: float) -> None:
    x = torch.randn(1, 3, 20, 20)
    x[0, :, 3, 4] = odd
    first, last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 24, 1)
    held_as_one(nn.Sequential(first, nn.MaxPool2d(3, 2, 1), last).eval(), x, 2, "max_pool")


class Growing(nn.Module):
    """A DenseNet's block: each layer reads what all before it made."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(layers):
            wide = inputs + index * growth
            parts = (nn.BatchNorm2d(wide), nn.ReLU(), layer(wide, 2 * growth))
            self.layers.append(nn.Sequential(*parts, nn.Conv2d(2 * growth, growth, 3, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = torch.cat([x, one(x)], 1)
        return x


@pytest.mark.parametrize("growth", [16, 10])
def test_dense_blocks(growth: int) -> None:
    x = torch.randn(2, 3, 30, 31)
    wide = 24 + 3 * growth
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3),
        *(Growing(24, growth, 3), nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, 20, 1)),
        *(nn.AvgPool2d(2), Growing(20, growth, 2), nn.BatchNorm2d(20 + 2 * growth), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    compiled = held_as_one(
        used(model, x), x, 12, "concatenation", "norm_before", "avg_pool", "mean"
    )
    for norm in [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]:
        with torch.no_grad():
            norm.running_mean.add_(0.5)
            norm.weight.mul_(-1.5)
        hold(compiled, model, x, where="after a norm changed")


def norm_of_any_kind(self: Any, x: Tensor) -> Tensor:
    """Without weights, without an activation, with one that is not taken; read twice."""
    y = self.first(x)
    plain, bare = functional.silu(self.norm(y)), self.bare(y)
    return self.last(torch.cat([functional.relu(bare), bare, self.second(plain)], 1))


def test_norms_of_any_kind() -> None:
    x = torch.randn(2, 3, 20, 21)
    model = Of(
        norm_of_any_kind,
        first=nn.Conv2d(3, 20, 3),
        norm=nn.BatchNorm2d(20),
        bare=nn.BatchNorm2d(20, affine=False),
        second=nn.Conv2d(20, 24, 3, 1, 1),
        last=nn.Conv2d(64, 8, 3),
    )
    compiled = compile_at("O2", used(model, x))
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "openmp", 3, 3))


class Halves(nn.Module):
    """YOLO's block: a half goes through layers with residuals, and all are put together."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.take = take
        self.wide, self.last = layer(16, 48), layer(96, 16)
        self.a = nn.Sequential(layer(24, 24, 3), layer(24, 24, 3))
        self.b = nn.Sequential(layer(24, 24, 3), layer(24, 24, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.take(self.wide(x))
        third = second + self.a(second)
        return self.last(torch.cat([first, second, third, third + self.b(third)], 1))


TAKEN = {
    "chunk": lambda y: y.chunk(2, 1),
    "split": lambda y: torch.split(y, [24, 24], 1),
    "slices": lambda y: (y[:, :24], y[:, -24:]),
    "overlapping slices": lambda y: (y[:, 7:31], y[:, 20:44]),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN.keys())
def test_channels_are_taken_apart(take: Any) -> None:
    x = torch.randn(2, 16, 20, 21)
    held_as_one(used(Halves(take), x), x, 6, "slice", "concatenation")


KERNELS: dict[str, nn.Module] = {
    "pointwise": nn.Conv2d(24, 16, 1),
    "pointwise with a stride": nn.Conv2d(24, 16, 1, 2),
    "3x3, direct": nn.Conv2d(24, 16, 3, 2, 1),
    "3x3, Winograd": nn.Conv2d(24, 32, 3, 1, 1),
    "5x5": nn.Conv2d(24, 16, 5, 1, 2),
    "many outputs": nn.Conv2d(24, 200, 3, 2, 1),
    "dilated": nn.Conv2d(24, 16, 3, 1, 5, dilation=5),
    "groups": nn.Conv2d(24, 48, 3, 1, 1, groups=3),
    "depthwise": nn.Conv2d(24, 24, 3, 1, 1, groups=24),
    "depthwise, 7x7": nn.Conv2d(24, 24, 7, 1, 3, groups=24),
    "groups of few channels": nn.Conv2d(24, 24, 3, 1, 1, groups=12),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_every_kernel_reads_and_writes_some_channels(kernel: nn.Conv2d) -> None:
    """Of a larger image, whose other channels stay what they are."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        side = functional.relu(self.kernel(y[:, 3:27]))
        beside = self.beside(y)[..., : side.shape[2], : side.shape[3]]
        return self.last(torch.cat([self.side(side), side, self.side(side)], 1)) + beside

    x = torch.randn(2, 3, 28, 26)
    outputs = kernel.out_channels
    model = Of(
        forward,
        first=nn.Conv2d(3, 30, 3, 1, 1),
        kernel=kernel,
        side=nn.Conv2d(outputs, 5, 1),
        beside=nn.Conv2d(30, 8, 1),
        last=nn.Conv2d(10 + outputs, 8, 1),
    )
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    (detail,) = details(compiled, "convolution")
    assert "concatenation" in detail and "slice" in detail
    assert "openmp_convolutions" in calls(compiled, x)


def test_pairs_and_bottlenecks_write_some_channels() -> None:
    """Where neighbours share lines, too."""

    def residual(wide: int, kernel: int) -> nn.Sequential:
        depthwise = nn.Conv2d(wide, wide, kernel, 1, kernel // 2, groups=wide)
        return nn.Sequential(nn.Conv2d(16, wide, 1), nn.ReLU6(), depthwise, nn.ReLU6())

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        three = self.project(self.three(y))
        half = y[:, 2:18]
        return self.last(
            torch.cat([self.two(half), three, self.pointwise(self.depthwise(half))], 1)
        )

    x = torch.randn(1, 3, 66, 64)
    model = Of(
        forward,
        first=nn.Conv2d(3, 16, 3, 1, 1),
        three=residual(96, 3),
        project=nn.Conv2d(96, 20, 1),
        two=residual(96, 5),
        depthwise=nn.Conv2d(16, 16, 3, 1, 1, groups=16),
        pointwise=nn.Conv2d(16, 28, 1),
        last=nn.Conv2d(144, 8, 1),
    )
    model.first = nn.Conv2d(3, 18, 3, 1, 1)
    model.three[0] = nn.Conv2d(18, 96, 1)
    held_as_one(model.eval(), x, 9, "concatenation", "slice")


class Around(nn.Module):
    """Parts that others read, the same part twice, parts of parts, parts from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 24, 3, 1, 1), nn.Conv2d(24, 16, 3, 1, 1)
        self.c, self.last = nn.Conv2d(40, 8, 1), nn.Conv2d(136, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        inner = torch.cat([a, b], 1)
        return self.last(
            torch.cat([inner, b, a, self.c(inner), torch.cat([inner, self.c(inner)], 1)], 1)
        )


def test_parts_of_several_images() -> None:
    x = torch.randn(2, 8, 19, 18)
    held_as_one(Around().eval(), x, 5, "concatenation")


def returned(self: Any, x: Tensor) -> list[Tensor]:
    a, b = self.a(x), self.b(x)
    both, pooled = torch.cat([a, b], 1), functional.max_pool2d(a, 2)
    return [self.last(both), both, self.pooled(pooled), pooled, a.mean((2, 3), keepdim=True)]


def used_elsewhere(self: Any, x: Tensor) -> list[Tensor]:
    a, b = self.a(x), self.b(x)
    both = torch.cat([a, b.sin()], 1)
    return [self.last(both), self.pooled(functional.max_pool2d(a + 1, 2)), both.cumsum(1)]


def along_other_dimensions(self: Any, x: Tensor) -> list[Tensor]:
    a, b = self.a(x), self.b(x)
    return [
        self.pooled(torch.cat([a, b], 2)),
        self.pooled(torch.cat([a, b])),
        self.pooled(a[:, :, 1:]),
        self.pooled(b.chunk(2, 3)[1]),
        self.pooled(a[:, ::2].repeat(1, 2, 1, 1)),
    ]


@pytest.mark.parametrize("function", [returned, used_elsewhere, along_other_dimensions])
def test_what_others_need_stays_outside(function: Any) -> None:
    x = torch.randn(2, 8, 20, 18)
    model = Of(
        function,
        a=nn.Conv2d(8, 24, 3, 1, 1),
        b=nn.Conv2d(8, 24, 1),
        last=nn.Conv2d(48, 16, 1),
        pooled=nn.Conv2d(24, 16, 3),
    )
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert "openmp_convolution" in calls(compiled, x)


def test_sizes_that_change() -> None:
    """Windows that may be cut off need to know them; everything else does not."""
    x = torch.randn(2, 16, 20, 22)
    model = used(nn.Sequential(layer(16, 24, 3), Growing(24, 16, 2), layer(56, 16)), x)
    compiled = compile_at("O2", model, dynamic=True)
    for size in (20, 9, 31):
        hold(compiled, model, torch.randn(3, 16, size, size + 1))
    assert calls(compiled, torch.randn(3, 16, 12, 13)) == ONE_CALL
    pooled = used(nn.Sequential(layer(16, 24, 3), nn.MaxPool2d(3, 2, 1), layer(24, 16)), x)
    compiled = compile_at("O2", pooled, dynamic=True)
    for size in (20, 9, 31):
        hold(compiled, pooled, torch.randn(3, 16, size, size + 1))


def test_lines() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        left, right = y.chunk(2, 1)
        return self.last(torch.cat([self.second(left), right, functional.relu(self.norm(y))], 1))

    x = torch.randn(2, 8, 300)
    model = Of(
        forward,
        first=nn.Conv1d(8, 48, 3),
        second=nn.Conv1d(24, 32, 5),
        norm=nn.BatchNorm1d(48),
        last=nn.Conv1d(104, 16, 1),
    )
    model.second = nn.Conv1d(24, 32, 5, padding=2)
    held_as_one(used(model, x), x, 3, "concatenation", "slice", "norm_before")


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(2, 3, 40, 41)
    parts = (layer(3, 24, 3), Growing(24, 16, 2), nn.MaxPool2d(3, 2, 1), layer(56, 16))
    model = used(nn.Sequential(*parts), x)
    compiled = held_as_one(model, x, 6, "max_pool")
    with torch.no_grad():
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(compiled(x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
