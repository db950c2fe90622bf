"""The convolution region: what is taken, what is folded into it, and where its outputs lie."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from lowering.providers import openmp
from tests.support import torches
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, used, weight
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    hold,
    level_of,
    no_cached_graphs,
    places,
    provider_at,
    region_rows,
)
from tests.support.reports import assert_ran_as_planned, graph_reports

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(openmp, "_FILLS_LANES", 0)  # small groups as well
    with every_row_applies():
        yield


# Inputs, outputs and groups, by who computes them in float32.
FILLING: dict[str, list[tuple[int, int, int]]] = {
    "openmp": [(32, 64, 32), (48, 48, 3), (32, 32, 32), (36, 36, 9), (34, 34, 17), (208, 208, 26)],
    "mkldnn": [(6, 12, 6), (32, 64, 16), (36, 36, 3), (40, 40, 5), (12, 12, 3)],
}


@pytest.mark.parametrize("provider", FILLING)
def test_groups_that_do_not_fill_vectors(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.undo()
    kinds = FILLING[provider]
    layers = [nn.Conv2d(inputs, outputs, 3, groups=groups) for inputs, outputs, groups in kinds]
    images = [torch.randn(1, inputs, 9, 9) for inputs, _, _ in kinds]

    def of_each(m: Any, *images: Tensor) -> dict[str, Tensor]:
        each = zip(kinds, m.layers, images, strict=True)
        return {f"{kind}": layer(x) for kind, layer, x in each}

    model = Of(of_each, layers=nn.ModuleList(layers))
    compiled = compile_at("O2", model)
    hold(compiled, model, *images)
    taken = ("convolution", provider, len(kinds), len(kinds))
    assert region_rows(compiled) == [taken], graph_reports(compiled)
    half = compile_at("O2", model.half())
    hold(half, model, *(x.half() for x in images))
    (*_, last) = region_rows(half)  # the graph that was compiled last
    assert last == ("convolution", "openmp", len(kinds), len(kinds)), graph_reports(half)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("channels", [2, 3, 4, 8, 12, 20])
def test_few_channels_and_neighbouring_pixels_in_a_vector(channels: int) -> None:
    """Of whole and of cut lines, with what is done to outputs, and what is read beside them."""
    kinds = [
        *[{"kernel_size": 3, "padding": 1}, {"kernel_size": (1, 7), "bias": False}],
        *[{"kernel_size": 5, "padding": 4}, {"kernel_size": 3, "padding": 2, "dilation": 2}],
        *[
            {"kernel_size": 3, "padding": 1, "stride": 2},
            {"kernel_size": (9, 1), "padding": (7, 0)},
        ],
    ]
    layers = [nn.Conv2d(channels, channels, groups=channels, **kind) for kind in kinds]
    ends = [functional.hardswish, functional.relu6, torch.sigmoid]

    def forward(m: Any, x: Tensor) -> list[Tensor]:
        first, beside = m.layers[0], x[:, -channels:]  # with other channels between its pixels
        x = x[:, :channels].contiguous(memory_format=torch.channels_last)
        found = [end(layer(x)) for end in ends for layer in m.layers]
        return [*found, first(beside), torch.relu(first(x) + x), first(x) * beside]

    model, x = Of(forward, layers=nn.ModuleList(layers)), image(2, channels + 3, 11, 21)
    compiled = compile_at("O2", model)
    hold(compiled, model, x.to(memory_format=torch.channels_last))
    assert region_rows(compiled) == [("convolution", "openmp", 21, 21)]


@pytest.mark.parametrize(("groups", "taken"), [(3, 4), (4, 3)])
def test_groups_between_other_convolutions(
    monkeypatch: pytest.MonkeyPatch, groups: int, taken: int
) -> None:
    """From 16 outputs on, where a call of oneDNN's between ours would cost more than it gains."""
    monkeypatch.undo()
    layers = [nn.Conv2d(48, 48, 1), nn.Conv2d(48, 48, 3, 1, 1, groups=groups), nn.Conv2d(48, 48, 1)]
    layers.insert(1, nn.Conv2d(48, 48, 3, 2, 1, groups=2))
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 48, 17, 17)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert sum(row[2] for row in region_rows(compiled) if row[1] == "openmp") == taken


def image(batch: int = 2, channels: int = 4, height: int = 10, width: int = 12) -> Tensor:
    return torch.randn(batch, channels, height, width)


def count(compiled: Any, place: str) -> int:
    """Convolutions in the graph."""
    mine = ("convolution", provider_at(place))
    return sum(row[2] for row in region_rows(compiled) if row[:2] == mine)


def each(m: Any, x: Tensor) -> list[Tensor]:
    return [layer(x) for layer in m.layers]


KINDS: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "bias": False},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2, "bias": False},
    {"kernel_size": (2, 5), "stride": (3, 1), "padding": (0, 2), "dilation": (2, 1)},
    {"kernel_size": 3, "padding": 1, "groups": 4},
    {"kernel_size": 5, "padding": 2, "stride": 2, "groups": 4, "bias": False},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 4},
    {"kernel_size": 3, "groups": 2},
    {"kernel_size": 4, "stride": 4},
    {"kernel_size": (4, 3), "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]


@pytest.mark.sampled(2)
@places()
@pytest.mark.parametrize("batch", [1, 3])
def test_kinds(place: str, batch: int) -> None:
    """Outputs lie as eager's do, for plain images and for channels last."""
    layers = nn.ModuleList([nn.Conv2d(4, 8, **kind) for kind in KINDS])
    model, compiled = Of(each, layers=layers), None
    compiled = compile_in(place, model, dynamic=False)
    hold(compiled, model, image(batch), where="contiguous")
    convolutions = ("convolution", provider_at(place), len(KINDS), len(KINDS))
    assert_regions(compiled, convolutions, ("resampling", "eager", 1, 1))
    if batch == 3:
        if why := torches.pads_otherwise_than_it_says():
            pytest.skip(why)
        innermost = image(batch).contiguous(memory_format=torch.channels_last)
        hold(compiled, model, innermost, where="channels last")
        assert count(compiled, place) == 2 * len(KINDS)
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_one_dimension(place: str) -> None:
    """oneDNN's operator is for images: it leaves these alone."""
    kinds = [kind for kind in KINDS if not isinstance(kind["kernel_size"], tuple)]
    layers = nn.ModuleList([nn.Conv1d(4, 8, **kind) for kind in kinds])
    model = Of(each, layers=layers)
    compiled = compile_in(place, model)
    hold(compiled, model, torch.randn(3, 4, 29))
    expected = len(kinds) if provider_at(place) == "openmp" else 0
    assert count(compiled, place) == expected
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_functional_spellings(place: str) -> None:
    """Lists of one number, images without a batch, empty batches."""

    def spelled(m: Any, x: Tensor, none: Tensor) -> list[Tensor]:
        return [
            functional.conv2d(x, m.w, None, stride=(2,), padding=(1,)),
            functional.conv2d(x, m.w, m.b, stride=2, dilation=[1, 2]),
            functional.conv2d(x[0], m.w, m.b),
            torch.conv2d(x, m.w, m.b, padding=2),
            functional.relu(functional.conv2d(none, m.w, m.b)),
        ]

    model = Of(spelled, w=weight(8, 4, 3, 3), b=weight(8))
    compiled = compile_in(place, model)
    with no_cached_graphs():  # which would show only what ran
        hold(compiled, model, image(), image(0))
    assert count(compiled, place) == 5
    assert_ran_as_planned(compiled, level_of(place))


@places()
def test_operands_are_what_torch_writes_into_code(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.10 it wrote an enum as `<Way.PLAIN: 0>`, which is none."""
    operands: list[Any] = []
    ours = fx.Graph.call_function

    def call(graph: fx.Graph, target: Any, args: Any = (), *rest: Any, **named: Any) -> fx.Node:
        if str(target).startswith("kernel_dispatch.openmp_convolution"):
            operands.extend(args)
        return ours(graph, target, args, *rest, **named)

    monkeypatch.setattr(fx.Graph, "call_function", call)
    model = Of(lambda m, x: functional.conv2d(x, m.w, padding=1).relu(), w=weight(8, 4, 3, 3))
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, image())
    assert bool(operands) == (provider_at(place) == "openmp")
    assert not [one for one in operands if isinstance(one, enum.Enum)]


@places()
def test_what_is_not_taken(place: str) -> None:
    def spelled(m: Any, x: Tensor, w: Tensor) -> list[Tensor]:
        return [
            functional.conv2d(x, w),
            functional.conv2d(x, m.w * x.mean()),
        ]

    model = Of(spelled, w=weight(8, 4, 3, 3))
    compiled = compile_in(place, model)
    hold(compiled, model, image(), torch.randn(8, 4, 3, 3))
    assert_regions(compiled)
    assert_ran_as_planned(compiled, level_of(place))


# --- BatchNorm and what follows -------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, BatchNorm, activation; with a shortcut, as in ResNet."""

    def __init__(
        self,
        activation: nn.Module,
        *,
        shortcut: str = "",
        bias: bool = False,
        groups: int = 1,
        **norm: Any,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias, groups=groups)
        self.norm = nn.BatchNorm2d(8, **norm)
        self.activation, self.shortcut = activation, shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.shortcut == "before":
            return self.activation(y + x)
        y = self.activation(y)
        return x + y if self.shortcut == "after" else y


@places()
def test_batch_norms(place: str) -> None:
    blocks = nn.ModuleList(
        [
            Block(nn.ReLU()),
            Block(nn.ReLU6(), bias=True),
            Block(nn.Hardswish(), affine=False),
            Block(nn.SiLU(), eps=0.1, groups=8),
            Block(nn.Identity(), affine=False, eps=1.0),
            Block(nn.ReLU(), shortcut="before"),
            Block(nn.ReLU6(), shortcut="after"),
            Block(nn.Identity(), shortcut="after", groups=8, bias=True),
            Block(nn.LeakyReLU(0.2), shortcut="before", groups=2),
        ]
    )

    def chained(m: Any, x: Tensor) -> list[Tensor]:
        found = [m.stem(x)]
        for block in m.blocks:
            found.append(block(found[-1]))
        return found[1:]

    model = used(Of(chained, stem=nn.Conv2d(4, 8, 1), blocks=blocks), image())
    compiled = compile_in(place, model)
    with no_cached_graphs():
        hold(compiled, model, image())
    assert_regions(compiled, ("convolution", provider_at(place), 10, 10))
    (absorbed,) = details(compiled, "convolution")
    expected = {"relu", "clamp", "hardswish", "silu"}
    if provider_at(place) == "openmp":
        expected |= {"add+relu", "clamp+add", "add", "add+leaky_relu"}
    assert set(absorbed.removeprefix("with ").split(", ")) == expected


@places()
def test_norms_that_share(place: str) -> None:
    """One weight before two norms; one convolution before two; a norm of the batch's own."""

    def spelled(m: Any, x: Tensor) -> list[Tensor]:
        shared = m.conv(x)
        return [
            functional.relu(m.one(functional.conv2d(x, m.w))),
            m.two(functional.conv2d(x + 1, m.w)),
            functional.conv2d(x, m.w, stride=2),
            m.one(shared) + m.two(shared),
            m.own(functional.conv2d(x - 1, m.w)),
            functional.batch_norm(m.conv(x * 2), m.one.running_mean, m.one.running_var),
            m.one(x @ m.square).relu(),
        ]

    model = Of(
        spelled, conv=nn.Conv2d(8, 8, 3), w=weight(8, 8, 3, 3), one=nn.BatchNorm2d(8),
        two=nn.BatchNorm2d(8, eps=0.1), own=nn.BatchNorm2d(8, track_running_stats=False),
        square=weight(12, 12),
    )  # fmt: skip
    used(model, image(4, 8))
    compiled = compile_in(place, model)
    for call in range(2):
        hold(compiled, model, image(2, 8), where=f"call {call}")
    provider = provider_at(place)
    rows = [("convolution", provider, 6, 12), ("linear", provider, 1, 2)]
    sums_of_its_own = [("batch_norm", "openmp", 1, 2)] if place == "O2 openmp" else []
    assert_regions(compiled, *rows, *sums_of_its_own)


# --- what reads the memory of an output -----------------------------------------------------------


@places()
def test_views_behind_convolutions(place: str) -> None:
    """As ViT, ConvNeXt, super-resolution and detectors have them."""

    def spelled(m: Any, x: Tensor) -> list[Tensor]:
        y = m.conv(x)
        tokens = m.patches(x).flatten(2).transpose(1, 2)
        inner = m.depthwise(x).permute(0, 2, 3, 1)
        left, right = m.conv(x * 2).chunk(2, 1)
        return [
            m.head(tokens),
            x + m.narrow(functional.gelu(m.wide(m.norm(inner)))).permute(0, 3, 1, 2),
            functional.pixel_shuffle(y, 2),
            y.reshape(2, 8, 2, -1).permute(0, 3, 2, 1).contiguous(),
            left * right.sigmoid(),
            functional.adaptive_avg_pool2d(m.conv(x + 1), 1).flatten(1),
            m.conv(x - 1).view(2, -1),
            functional.unfold(m.conv(x - 2), 2),
            functional.interpolate(m.conv(x / 2), scale_factor=2),
            torch.cat([m.conv(x / 3), m.conv(x / 4)], 1),
            functional.max_pool2d(m.conv(x / 5), 2),
        ]

    model = Of(
        spelled, conv=nn.Conv2d(4, 16, 3), patches=nn.Conv2d(4, 16, 5, 5),
        depthwise=nn.Conv2d(4, 4, 3, padding=1, groups=4), norm=nn.LayerNorm(4),
        wide=nn.Linear(4, 16), narrow=nn.Linear(16, 4), head=nn.Linear(16, 6),
    )  # fmt: skip
    compiled = compile_in(place, model)
    hold(compiled, model, image(2, 4, 10, 10))
    provider = provider_at(place)
    repeated = ("eager", 1, 1) if level_of(place) == "O1" else ("inductor", 1, None)
    assert_regions(
        compiled,
        ("convolution", provider, 11, 11),
        ("linear", provider, 3, 3),
        ("resampling", *repeated),
    )


@places()
def test_an_image_of_one_channel_is_named_as_in_eager(place: str) -> None:
    """Rows and channels last are the same memory then; whoever lays out what follows asks."""
    model = Of(
        lambda m, x: [m.mask(x).sigmoid(), m.mask(x + 1), m.relu(m.mask(x - 1)), m.pool(m.wide(x))],
        mask=nn.Conv2d(4, 1, 3, padding=1), wide=nn.Conv2d(4, 8, 3, padding=1), relu=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    compiled = compile_in(place, model, dynamic=False)
    for x in (image(2, 4, 9, 12), image(1, 4, 1, 1)):
        hold(compiled, model, x)
        with torch.no_grad():
            assert [y.stride() for y in compiled(x)] == [y.stride() for y in model(x)]
    assert count(compiled, place) >= 4


@places()
def test_outputs_share_memory_as_in_eager(place: str) -> None:
    def spelled(m: Any, x: Tensor) -> list[Tensor]:
        y = m.conv(x)
        return [y, y.view(-1), y.permute(0, 2, 3, 1), y[:, :2], y.unsqueeze(0).expand(3, *y.shape)]

    model = Of(spelled, conv=nn.Conv2d(4, 8, 3))
    compiled, x = compile_in(place, model), image()
    hold(compiled, model, x)
    with torch.no_grad():
        whole, flat, *parts = compiled(x)
        flat.zero_()
    assert not whole.any()
    assert not any(part.any() for part in parts)
    assert count(compiled, place) == 1
    assert_ran_as_planned(compiled, level_of(place))


def test_operators_that_read_memory_as_it_lies() -> None:
    """as_strided, views as another type, views as complex numbers: they read eager's layout."""

    def strided(m: Any, x: Tensor) -> Tensor:
        return m.conv(x).as_strided((2, 8, 8), (640, 80, 10))

    def other_type(m: Any, x: Tensor) -> Tensor:
        return m.conv(x).view(torch.int16)

    def complex_numbers(m: Any, x: Tensor) -> Tensor:
        return torch.view_as_complex(m.conv(x).reshape(2, 8, 8, 5, 2)).abs()

    for place in ("O1 mkldnn", "O2 openmp"):
        for function in (strided, other_type, complex_numbers):
            model = Of(function, conv=nn.Conv2d(4, 8, 3))
            compiled, x = compile_in(place, model), image()
            with torch.no_grad():
                got, own = compiled(x), model(x)
            if function is other_type:
                got, own = got.view(torch.float32), own.view(torch.float32)
            torch.testing.assert_close(got, own)
            assert_ran_as_planned(compiled, level_of(place))
            # At O1 a graph with complex numbers is not traced: torch's own tracing breaks some.
            untraced = function is complex_numbers and level_of(place) == "O1"
            assert count(compiled, place) == (0 if untraced else 1)


NORMED: dict[str, Any] = {
    "some channels": lambda y: functional.group_norm(y[:, :4], 2),
    "parts of a split": lambda y: torch.cat(
        [functional.group_norm(part, 1) for part in y.split((2, 6), 1)], 1
    ),
    "lines": lambda y: functional.group_norm(y.flatten(2), 4),
    "every channel": lambda y: functional.group_norm(y, 2),
    "distances": lambda y: functional.pdist(y.permute(0, 2, 3, 1)[0, :, 0, :]),
}


@places()
def test_operators_that_take_dense_memory_only(place: str) -> None:
    """Torch's own callers see to it that what they read has no gaps; the trace has only that."""

    def between(m: Any, *images: Tensor) -> dict[str, list[Tensor]]:
        found = {}
        for (name, norm), x in zip(NORMED.items(), images, strict=True):
            y = m.first(x)
            found[name] = [m.second(y), norm(y)]
        return found

    model = Of(between, first=nn.Conv2d(4, 8, 3), second=nn.Conv2d(8, 4, 3))
    compiled = compile_in(place, model)
    for _ in range(2):
        hold(compiled, model, *(image(batch=1) for _ in NORMED))
    assert count(compiled, place) == 2 * len(NORMED)
    assert_ran_as_planned(compiled, level_of(place))


LONG_SUMS: dict[str, Any] = {
    "relu": lambda: nn.Sequential(nn.Conv2d(512, 40, 3, padding=1), nn.ReLU()),
    "silu": lambda: nn.Sequential(nn.Conv2d(96, 40, 3), nn.SiLU()),
    "nothing": lambda: nn.Conv2d(300, 40, 3, stride=2, bias=False),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(400, 40, 3), nn.BatchNorm2d(40), nn.ReLU6()),
    "large kernel": lambda: nn.Conv2d(100, 40, (5, 7), padding=(2, 3)),
    "dilated": lambda: nn.Conv2d(512, 40, 3, dilation=2),
    "groups": lambda: nn.Conv2d(256, 64, 3, groups=2),
    "one pixel": lambda: nn.Conv2d(640, 40, 1),
}


@pytest.mark.parametrize("name", LONG_SUMS)
def test_long_sums_are_as_exact_as_in_rows(name: str) -> None:
    """Between convolutions images lie channels last, where oneDNN would add up in one chain."""
    torch.manual_seed(0)
    middle = LONG_SUMS[name]()
    channels = next(m for m in middle.modules() if isinstance(m, nn.Conv2d)).in_channels
    out = 64 if name == "groups" else 40
    model = nn.Sequential(nn.Conv2d(4, channels, 3), middle, nn.Conv2d(out, 4, 1)).eval()
    compiled = compile_in("O1 mkldnn", model)
    for _ in range(2):
        for batch in (1, 3):
            hold(compiled, model, image(batch))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert count(compiled, "O1 mkldnn") == 2 * 3  # a second graph for any batch


UNFOLDED: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "images": (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 16, 16), True),
    "many channels": (nn.Conv2d(512, 64, 3, padding=1), (1, 512, 6, 6), True),
    "strided and dilated": (nn.Conv2d(160, 32, 3, stride=2, dilation=2), (1, 160, 11, 9), True),
    "a tall kernel": (nn.Conv2d(100, 40, (5, 3)), (1, 100, 12, 12), True),
    "volumes": (nn.Conv3d(40, 24, 3, padding=1), (1, 40, 9, 9, 9), False),
    "long volumes": (nn.Conv3d(32, 16, 3), (1, 32, 8, 9, 40), False),
    "short sums": (nn.Conv2d(32, 64, 3), (1, 32, 20, 20), False),
    "a large kernel": (nn.Conv2d(64, 32, 5), (1, 64, 12, 12), False),
    "two images": (nn.Conv2d(64, 64, 3, padding=1), (2, 64, 9, 9), False),
    "a large image": (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 20, 20), False),
    "groups": (nn.Conv2d(256, 64, 3, groups=2), (1, 256, 8, 8), False),
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", UNFOLDED)
def test_what_torch_multiplies_as_matrices_stays_as_exact(name: str, normed: bool) -> None:
    """Small single images, which oneDNN would add up in one chain: three times beyond the contract
    with 512 channels."""
    layer, shape, torchs = UNFOLDED[name]
    norms = (nn.BatchNorm2d, nn.BatchNorm3d)
    last = norms[len(shape) - 4](layer.out_channels) if normed else nn.ReLU()
    model = used(nn.Sequential(layer, last), torch.randn(shape))
    compiled = compile_in("O1 mkldnn", model)
    for _ in range(3):
        hold(compiled, model, torch.randn(shape))
        with torch.no_grad():
            layer.weight.mul_(1.5)
    ran = {row[1]: row[3] for row in region_rows(compiled)}
    assert ran == ({"mkldnn": 0, "eager": 3} if torchs else {"mkldnn": 3})


DRAWN: dict[str, Any] = {
    "dropout": lambda y: functional.dropout(y, 0.4),
    "dropped channels": lambda y: functional.dropout2d(y, 0.4),
    "noise": lambda y: y + torch.randn_like(y),
    "bernoulli": lambda y: y * torch.bernoulli(y.sigmoid()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_between_convolutions_are_eagers_at_o1(name: str) -> None:
    """They fill memory in its order, so images channels last would give them to other pixels."""

    def between(m: Any, x: Tensor) -> Tensor:
        return m.second(DRAWN[name](m.first(x)))

    model = Of(between, first=nn.Conv2d(4, 8, 3), second=nn.Conv2d(8, 4, 3))
    compiled, x = compile_in("O1 mkldnn", model), image()
    for seed in (1, 2):
        found = []
        for run in (compiled, model):
            torch.manual_seed(seed)
            with torch.no_grad():
                found.append(run(x))
        torch.testing.assert_close(*found)
    assert count(compiled, "O1 mkldnn") == 2
    assert_ran_as_planned(compiled, "O1")


@places()
def test_operators_of_the_users_behind_convolutions(place: str) -> None:
    """Which may rely on how eager's output lies in memory."""

    @torch.library.custom_op("kernel_dispatch_tests::flat", mutates_args=())
    def flat(x: Tensor) -> Tensor:
        return x.view(-1) * 2

    flat.register_fake(lambda x: x.new_empty(x.numel()))
    model = Of(lambda m, x: flat(m.conv(x)), conv=nn.Conv2d(4, 8, 3))
    compiled, x = compile_in(place, model), image()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert_ran_as_planned(compiled, level_of(place))


# --- sizes, dtypes, modes -------------------------------------------------------------------------


def small_resnet() -> nn.Module:
    layers = (
        nn.Conv2d(4, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(nn.ReLU(), shortcut="before"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    return used(nn.Sequential(*layers), image(8))


@places()
def test_dynamic_sizes(place: str) -> None:
    model = small_resnet()
    compiled = compile_in(place, model, dynamic=True)
    for batch, height, width in [(2, 10, 12), (3, 17, 16), (5, 33, 9)]:
        hold(compiled, model, image(batch, 4, height, width), where=f"{batch} {height} {width}")
    provider = provider_at(place)
    assert_regions(compiled, ("convolution", provider, 2, 6), ("linear", provider, 1, 3))


@places()
def test_dynamic_sizes_of_a_returned_image(place: str) -> None:
    model = Of(lambda m, x: [m.conv(x), m.conv(x) + x[:, :1]], conv=nn.Conv2d(4, 8, 3, padding=1))
    compiled = compile_in(place, model, dynamic=True)
    for batch, height in [(2, 10), (3, 7), (1, 12)]:
        hold(compiled, model, image(batch, 4, height, height), where=f"{batch} {height}")
    assert count(compiled, place) >= 1
    assert_ran_as_planned(compiled, level_of(place))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@places()
def test_half_precision(place: str, dtype: torch.dtype) -> None:
    """As the model's own dtype, and through autocast, where the weight stays float32."""
    plain, x = small_resnet(), image()
    reference = copy.deepcopy(plain).double()(x.double())
    narrow = copy.deepcopy(plain).to(dtype)
    compiled = compile_in(place, narrow)
    with torch.no_grad():
        wide = copy.deepcopy(narrow).double()(x.to(dtype).double())
        assert_contract(compiled(x.to(dtype)), narrow(x.to(dtype)), wide, "model")
        assert count(compiled, place) == 2
        autocast = compile_in(place, plain)
        with torch.autocast("cpu", dtype):
            assert_contract(autocast(x), plain(x), reference, "autocast")
    assert_ran_as_planned(compiled, level_of(place))
    assert_ran_as_planned(autocast, level_of(place))


@places()
def test_inference_mode(place: str) -> None:
    model, x = small_resnet(), image()
    compiled = compile_in(place, model)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
        loaded = copy.deepcopy(model)  # without version counters: nobody packs these
        other = compile_in(place, loaded)
        torch.testing.assert_close(other(x), loaded(x))
        loaded[1].running_mean.add_(1)
        loaded[0].weight[3].mul_(3)
        torch.testing.assert_close(other(x), loaded(x))
    assert (count(compiled, place), count(other, place)) == (2, 0)
    assert_ran_as_planned(other, level_of(place))


@places()
def test_training_is_not_touched(place: str) -> None:
    model = small_resnet().train()
    twin, x = copy.deepcopy(model), image()
    compiled = compile_in(place, model)
    compiled(x).sum().backward()
    twin(x).sum().backward()
    for got, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, eager.grad, rtol=1e-3, atol=1e-4)
    assert count(compiled, place) == 0


@places("O2 mkldnn", "O2 openmp")
def test_random_numbers_beside_regions(place: str) -> None:
    """They change from call to call and follow the seed."""

    def spelled(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.gelu(m.conv(functional.gelu(x))), torch.rand(8)

    model = Of(spelled, conv=nn.Conv2d(4, 8, 3))
    compiled, x = compile_in(place, model), image()
    with torch.no_grad():
        first, second = compiled(x)[1], compiled(x)[1]
        seeded = []
        for _ in range(2):
            torch.manual_seed(5)
            seeded.append(compiled(x)[1])
    assert not torch.equal(first, second)
    assert torch.equal(*seeded)
    assert count(compiled, place) == 1
    assert_ran_as_planned(compiled, "O2")
