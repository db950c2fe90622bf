"""Group norm between convolutions, where O1 lays images channels last: it costs no digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kernel_dispatch
from lowering import group_norm, machine
from tests.support.modules import Of
from tests.support.regions import hold

OURS = torch.ops.kernel_dispatch.group_norm.default


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every group norm that is computed by our operator."""
    found: list[Any] = []
    replace = group_norm._replace

    def watched(graph: Any, node: Any, target: Any, *rest: Any) -> Any:
        if target is OURS:
            found.append(node)
        return replace(graph, node, target, *rest)

    monkeypatch.setattr(group_norm, "_replace", watched)
    return found


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("images", "size", "mean"), [(1, 9, 0.0), (3, 40, 50.0), (0, 9, 0.0)])
def test_the_operator(images: int, size: int, mean: float, affine: bool) -> None:
    torch.manual_seed(0)
    image = torch.randn(images, 24, size, size + 3) + mean
    image = image.contiguous(memory_format=torch.channels_last)
    parts = (torch.randn(24), torch.randn(24)) if affine else (None, None)
    got = OURS(image, *parts, 6, 1e-5)
    assert got.stride() == image.stride()
    wide = [None if part is None else part.double() for part in parts]
    exact = functional.group_norm(image.double(), 6, *wide)
    assert got.shape == exact.shape
    if images:
        assert relative(got, exact) < (2e-5 if mean else 5e-7)


def test_some_statistics_are_missing() -> None:
    image = torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(8), torch.randn(8)
    for parts in ((weight, None), (None, bias)):
        expected = functional.group_norm(image, 2, *parts)
        torch.testing.assert_close(OURS(image, *parts, 2, 1e-5), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_large_images_between_convolutions(ours: list[Any], dynamic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 8, 3)
    ).eval()
    compiled = torch.compile(
        model, backend="unified", dynamic=dynamic, options={"level": "O1", "calibration": "off"}
    )
    for size in (96, 80):
        hold(compiled, model, torch.randn(1, 3, size, size))
    assert ours
    counted = [each.as_dict()["regions"] for each in kernel_dispatch.report(compiled)]
    for rows in counted:
        assert {("convolution", "mkldnn", 2)} <= {
            (row["region"], row["provider"], row["count"]) for row in rows
        }


def test_what_torch_computes_as_well_is_left_to_it(ours: list[Any]) -> None:
    """Few pixels; an image of the caller's that lies channels last; half precision."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)).eval()
    options = {"level": "O1", "calibration": "off"}
    hold(torch.compile(model, backend="unified", options=options), model, torch.randn(1, 3, 8, 8))
    image = torch.randn(1, 3, 40, 40).contiguous(memory_format=torch.channels_last)
    theirs = model.to(memory_format=torch.channels_last)
    hold(torch.compile(theirs, backend="unified", options=options, dynamic=False), theirs, image)
    assert not ours


def test_one_image_whose_trace_lies() -> None:
    """Attention over pixels gives one image a stride that the trace takes for channels last and
    torch does not: what was traced raises then, with no convolution of ours around, too."""

    def mixed(m: Any, x: Tensor) -> Tensor:
        y = m.first(x.flatten(2).transpose(1, 2))
        y = m.second(y).transpose(1, 2).reshape(x.shape) + x
        return m.convolution(m.norm(y))

    linear = {"first": nn.Linear(256, 1024), "second": nn.Linear(1024, 256)}
    model = Of(mixed, **linear, norm=nn.GroupNorm(4, 256), convolution=nn.Conv2d(256, 8, 3))
    x = torch.randn(1, 256, 16, 16)
    for disable in ("mkldnn,ipex", "ipex"):
        options = {"level": "O1", "calibration": "off", "disable": disable}
        compiled = torch.compile(model.eval(), backend="unified", options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        (report,) = kernel_dispatch.report(compiled)
        assert not report.fallbacks
        packed_mkl = machine.cpu().vendor == "intel"
        if packed_mkl or (disable == "ipex" and "avx512f" in machine.cpu().isa):
            assert "linear" in {row["region"] for row in report.as_dict()["regions"]}


INSTANCES: dict[str, Any] = {
    "plain": (nn.Conv2d(4, 24, 3), nn.InstanceNorm2d(24)),
    "affine": (nn.Conv2d(4, 24, 3), nn.InstanceNorm2d(24, affine=True)),
    "activated": (nn.Conv2d(4, 24, 3), nn.InstanceNorm2d(24, affine=True), nn.PReLU()),
    "volumes": (nn.ConvTranspose3d(4, 24, 3), nn.InstanceNorm3d(24, affine=True)),
    "of the first layer": (nn.InstanceNorm2d(4), nn.Conv2d(4, 24, 3)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", INSTANCES)
def test_instance_norm(ours: list[Any], name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    layers = INSTANCES[name]
    volumes = name == "volumes"
    last = nn.Conv3d(24, 4, 1) if volumes else nn.Conv2d(24, 4, 3)
    model = nn.Sequential(*layers, last).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    options = {"level": "O1", "calibration": "off"}
    compiled = torch.compile(model, backend="unified", dynamic=dynamic, options=options)
    space = (10, 11, 12) if volumes else (60, 50)
    for images in (1, 3):
        hold(compiled, model, torch.randn(images, 4, *space) + 2)
    assert len(ours) == (
        0 if name == "of the first layer" else 2
    )  # one image is a graph of its own


def test_instance_norm_whose_flat_result_is_used(ours: list[Any]) -> None:
    """A view of the merged batch is handed out, beside the images."""

    def merged(m: Any, x: Tensor) -> list[Tensor]:
        y = m.first(x)
        flat = y.view(1, -1, *y.shape[2:])
        z = torch.instance_norm(flat, None, None, None, None, True, 0.1, 1e-5, False)
        return [z, m.second(z.view(y.shape))]

    model = Of(merged, first=nn.Conv2d(4, 24, 3), second=nn.Conv2d(24, 4, 3))
    options = {"level": "O1", "calibration": "off"}
    compiled = torch.compile(model.eval(), backend="unified", dynamic=False, options=options)
    for images in (1, 2):
        hold(compiled, model, torch.randn(images, 4, 40, 30))
