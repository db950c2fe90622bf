"""Group and instance norm by a kernel of ours: numbers, how images lie, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    details,
    hold,
    kernels,
    no_cached_graphs,
    region_rows,
)

NONE = (0, 0.0, 0.0)  # no activation


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


LAID: dict[str, Any] = {
    "in rows": lambda x: x,
    "channels last": channels_last,
    "turned": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every other, channels last": lambda x: channels_last(x.repeat_interleave(2, -1))[..., ::2],
    "one image for all": lambda x: x[:1].expand_as(x),
}
# Images, groups, channels of a group, space.
SHAPES = [
    (1, 1, 3, (5,)),
    (2, 4, 1, (7, 9)),
    (1, 8, 40, (16, 16)),
    (9, 2, 10, (65, 3)),
    (3, 5, 7, (2, 3, 11)),
    (1, 32, 4, (40, 40)),
    (2, 1, 33, (31, 33)),
    (4, 16, 1, (1, 1)),
]


@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_operator(laid: str, shape: Any, dtype: torch.dtype) -> None:
    images, groups, channels, space = shape
    torch.manual_seed(0)
    for mean, affine in ((0.0, True), (3.0, False)):
        image = LAID[laid](torch.randn(images, groups * channels, *space).add(mean).to(dtype))
        parts = torch.randn(2, groups * channels).to(dtype) if affine else (None, None)
        got = kernels().openmp_group_norm(image, *parts, groups, 1e-5, *NONE)
        own = functional.group_norm(image, groups, *parts)
        wide = [None if part is None else part.double() for part in parts]
        assert_contract(got, own, functional.group_norm(image.double(), groups, *wide), laid)
        assert got.stride() == torch.empty_like(image).stride()


@pytest.mark.parametrize("lay", [lambda x: x, channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("mean", [1e3, -1e6])
def test_far_from_zero(lay: Any, mean: float) -> None:
    """And where the first pixels lie elsewhere than the rest."""
    torch.manual_seed(0)
    image = torch.randn(2, 32, 40, 30) + mean
    image[0, :, 15:25] = 0
    image = lay(image)
    got = kernels().openmp_group_norm(image, None, None, 8, 1e-5, *NONE)
    own = functional.group_norm(image.contiguous(), 8)
    assert_contract(got, own, functional.group_norm(image.double(), 8), "far")


@pytest.mark.parametrize("lay", [lambda x: x, channels_last], ids=["rows", "channels last"])
def test_numbers_that_are_none(lay: Any) -> None:
    """They stay in their group; equal numbers are 0, and what is empty stays empty."""
    image = torch.randn(3, 12, 20, 20)
    image[0, 1, 3, 4], image[1, 5, 0, 0], image[2, :6] = torch.nan, torch.inf, 7.25
    got = kernels().openmp_group_norm(lay(image), None, None, 2, 1e-5, *NONE)
    assert torch.equal(got.isnan(), functional.group_norm(image, 2).isnan())
    assert not got[2, :6].any()
    for empty in ((0, 12, 20, 20), (3, 12, 0, 20)):
        nothing = lay(torch.empty(empty))
        assert kernels().openmp_group_norm(nothing, None, None, 2, 1e-5, *NONE).shape == empty


def test_threads_change_nothing() -> None:
    image = torch.randn(1, 64, 70, 70)
    before = torch.get_num_threads()
    for lay in (lambda x: x, channels_last):
        for groups in (1, 4, 64):
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                args = (lay(image), None, None, groups, 1e-5, *NONE)
                found.append(kernels().openmp_group_norm(*args))
            torch.set_num_threads(before)
            assert torch.equal(found[0], found[1]), groups
            assert torch.equal(found[0], found[2]), groups


def block(norm: nn.Module, act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), norm, act, nn.Conv2d(32, 16, 3)).eval()


MODELS: dict[str, tuple[Any, str]] = {
    "silu": (lambda: block(nn.GroupNorm(8, 32), nn.SiLU()), "with silu"),
    "relu": (lambda: block(nn.GroupNorm(32, 32), nn.ReLU()), "with relu"),
    "gelu": (lambda: block(nn.GroupNorm(1, 32), nn.GELU()), "with gelu_erf"),
    "alone": (lambda: block(nn.GroupNorm(4, 32, affine=False), nn.Identity()), ""),
    "instances": (lambda: block(nn.InstanceNorm2d(32), nn.LeakyReLU(0.2)), "with leaky_relu"),
    "instances with weights": (
        lambda: block(nn.InstanceNorm2d(32, affine=True), nn.ReLU()),
        "with relu",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("name", MODELS)
def test_between_convolutions(name: str, last: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    make, absorbed = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    if last:
        model = model.to(memory_format=torch.channels_last)
    compiled = compile_at("O2", model, dynamic=dynamic)
    sizes = ((40, 36), (50, 31)) if dynamic else ((40, 36),)
    for size in sizes:
        x = torch.randn(2, 3, *size)
        hold(compiled, model, channels_last(x) if last else x)
    times = len(sizes)
    assert_regions(
        compiled, ("convolution", "openmp", 2, 2 * times), ("group_norm", "openmp", 1, times)
    )
    assert details(compiled, "group_norm") == [absorbed]


@pytest.mark.parametrize("affine", [True, False])
def test_instances_of_one_image(affine: bool) -> None:
    """A view of one image as one image is no operator."""
    torch.manual_seed(0)
    model = block(nn.InstanceNorm2d(32, affine=affine), nn.ReLU())
    compiled = compile_at("O2", model, dynamic=False)
    hold(compiled, model, torch.randn(1, 3, 40, 36))
    assert_regions(compiled, ("convolution", "openmp", 2, 2), ("group_norm", "openmp", 1, 1))


@pytest.mark.parametrize("shape", [(65536,), (64, 1024), (2, 4, 8, 32, 32)], ids=str)
def test_instances_in_a_view_of_anything(shape: tuple[int, ...]) -> None:
    def normed(self: Any, x: Tensor) -> Tensor:
        flat = (x * 2).view(1, 64, 1024)
        return torch.instance_norm(flat, None, None, None, None, True, 0.1, 1e-5, False) + 1

    torch.manual_seed(0)
    model = Of(normed)
    compiled = compile_at("O2", model)
    hold(compiled, model, torch.randn(shape))
    assert_regions(compiled, ("group_norm", "openmp", 1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: functional.silu(m.norm(x * 2)), norm=nn.GroupNorm(8, 64)).to(dtype)
    x = channels_last(torch.randn(2, 64, 32, 32).to(dtype))
    compiled = compile_at("O2", model.eval())
    hold(compiled, model, x)
    assert_regions(compiled, ("group_norm", "openmp", 1, 1))


def test_lines_and_volumes() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: functional.silu(m.norm(x * 2)), norm=nn.GroupNorm(8, 64)).eval()
    for space in ((700,), (9, 10, 11)):
        compiled = compile_at("O2", model)
        hold(compiled, model, torch.randn(2, 64, *space))
        hold(compiled, model, channels_last(torch.randn(2, 64, *space)))
        assert {row[:2] for row in region_rows(compiled)} == {("group_norm", "openmp")}


LEFT: dict[str, Any] = {
    "the mean is asked for": lambda x: torch.native_group_norm(
        x * 2, None, None, 2, 64, 1024, 8, 1e-5
    )[:2],
    "double": lambda x: functional.group_norm(x.double() * 2, 8),
    "a flat result that is used": lambda x: torch.instance_norm(
        (x * 2).view(1, -1, 32, 32), None, None, None, None, True, 0.1, 1e-5, False
    ),
    "of the batch": lambda x: functional.batch_norm(x * 2, None, None, training=True),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    torch.manual_seed(0)
    model = Of(lambda self, x: LEFT[name](x))
    compiled = compile_at("O2", model)
    hold(compiled, model, torch.randn(2, 64, 32, 32))
    assert_regions(compiled, *[("batch_norm", "openmp", 1, 1)][: name == "of the batch"])


def test_training_is_left() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.SiLU())
    x = torch.randn(2, 3, 40, 40)
    compiled = compile_at("O2", model)
    got, own = compiled(x), model(x)
    assert_contract(got.detach(), own.detach(), model.double()(x.double()).detach(), "training")
    assert not [row for row in region_rows(compiled) if row[0] == "group_norm"]
