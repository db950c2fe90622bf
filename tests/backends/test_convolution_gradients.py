"""Training of convolutions: gradients in groups channels last, sums in parts, where weights lie."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import convolution_gradients
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

BACKWARD = torch.ops.aten.convolution_backward.default


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


# A layer, an image, whether its gradients are computed channels last.
CASES: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "depthwise 7x7": (nn.Conv2d(12, 12, 7, padding=3, groups=12), (2, 12, 15, 13), True),
    "depthwise 5x5, strided": (
        nn.Conv2d(12, 24, 5, stride=2, groups=12, bias=False),
        (3, 12, 15, 13),
        True,
    ),
    "groups": (nn.Conv2d(16, 24, 3, padding=1, groups=4), (2, 16, 9, 8), True),
    "groups, dilated": (nn.Conv2d(16, 16, 3, dilation=2, groups=2), (2, 16, 9, 8), True),
    "one row": (nn.Conv2d(16, 16, (1, 3), groups=2), (2, 16, 1, 8), True),
    "depthwise 3x3": (nn.Conv2d(12, 12, 3, groups=12), (2, 12, 9, 8), False),
    "lines": (nn.Conv1d(12, 12, 11, groups=12), (2, 12, 50), False),
    "transposed": (nn.ConvTranspose2d(16, 16, 4, stride=2, groups=4), (2, 16, 9, 8), False),
    "of all channels": (nn.Conv2d(12, 20, 7), (2, 12, 15, 13), False),
}


def trained(model: Any, of: nn.Module, x: Tensor, first: bool = False) -> list[Tensor]:
    own = x.clone().requires_grad_(not first)
    of.zero_grad()
    out = model(own)
    out.mul(torch.linspace(-1, 2, out.numel(), dtype=x.dtype).view(out.shape)).sum().backward()
    grads = [one.grad.clone() for one in of.parameters()]
    return [out.detach(), *grads, *([] if first else [own.grad])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["as torch lays them", "channels last"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str, first: bool, layout: str) -> None:
    """In the first layer of a network nobody asks for the gradient of the image."""
    layer, sizes, _ = CASES[name]
    model, x = nn.Sequential(copy.deepcopy(layer), nn.SiLU()), torch.randn(sizes)
    if layout == "channels last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", model)
    got = trained(compiled, model, x, first)
    exact = trained(wide, wide, x.double(), first)
    eager = trained(own, own, x, first)
    assert_contract(got, eager, exact, name)
    for mine, eagers in zip(got[1:], eager[1:], strict=True):
        assert mine.is_contiguous() or not eagers.is_contiguous()
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_in_the_graph(name: str) -> None:
    layer, sizes, replaced = CASES[name]
    x = torch.randn(sizes)

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        own = x.detach().requires_grad_()
        return torch.autograd.grad(layer(own).sin().sum(), [own, *layer.parameters()])

    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    convolution_gradients.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    ours = torch.ops.kernel_dispatch.grouped_convolution_backward.default
    assert len(graph.graph.find_nodes(op="call_function", target=ours)) == replaced
    torch.testing.assert_close(graph(x), gradients(x), rtol=1e-4, atol=1e-4)


def weights_laid_out_again(code: str) -> bool:
    return "(144, 1, 48, 16)" in code  # the strides of 16x16x3x3 with channels last


def generated_for(model: nn.Module, x: Tensor, wanted: bool | None) -> str:
    from torch._inductor.utils import run_and_get_code

    own = {} if wanted is None else {"layout_optimization": wanted}
    compiled = compile_at("O2", model, options={"inductor": own})
    _, code = run_and_get_code(compiled, x)
    assert_ran_as_planned(compiled, "O2")
    return "".join(code)


@pytest.mark.parametrize(("wanted", "size"), [(None, 9), (True, 9), (None, 60), (False, 60)])
def test_weights_are_laid_out_again_for_large_images(wanted: bool | None, size: int) -> None:
    """Channels last, every step copies them, and their gradients back. The user's wish counts."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    code = generated_for(model, torch.randn(2, 16, size, 8), wanted)
    assert weights_laid_out_again(code) is (size == 60 if wanted is None else wanted)


def test_images_lie_channels_last_where_no_weight_is_copied() -> None:
    """1x1 and depthwise kernels are the same memory: MobileNetV3 took 1.2 times as long in rows."""
    convolutions = [nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 16, 1)]
    model = nn.Sequential(
        *(nn.Sequential(one, nn.BatchNorm2d(one.out_channels)) for one in convolutions)
    )
    code = generated_for(model, torch.randn(1, 16, 5, 5), None)
    assert "(800, 1, 160, 32)" in code, "32 channels of 5x5, channels last"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nn.Conv1d(8, 12, 3), (2, 8, 40)),
        (nn.Conv2d(8, 12, 3, groups=2), (2, 8, 15, 13)),
        (nn.Conv3d(8, 12, 3), (1, 8, 9, 9, 9)),
        (nn.ConvTranspose2d(8, 12, 3), (2, 8, 15, 13)),
    ],
    ids=["lines", "groups", "volumes", "transposed"],
)
def test_biases_are_summed_up_by_inductor(layer: nn.Module, sizes: tuple[int, ...]) -> None:
    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x).sin().sum(), [*layer.parameters()])

    x = torch.randn(sizes)
    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    convolution_gradients.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for node in graph.graph.find_nodes(op="call_function", target=BACKWARD):
        assert node.args[-1][2] is False
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    torch.testing.assert_close(graph(x), gradients(x), rtol=1e-4, atol=1e-4)


def test_biases_keep_the_contract() -> None:
    """oneDNN's sum over all pixels was a chain where they lie channels last."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()), torch.randn(4, 16, 80, 80)
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", model)
    got = trained(compiled, model, x)
    assert_contract(got, trained(own, own, x), trained(wide, wide, x.double()), "")
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (16, 3), (8, 24)])
def test_gradients_of_few_channels_are_summed_up_in_parts(inputs: int, outputs: int) -> None:
    """Of 1x1 kernels; in one chain they were up to 3 times beyond the contract."""
    torch.manual_seed(0)
    given = [torch.randn(2, outputs, 96, 96), torch.randn(2, inputs, 96, 96)]
    weight = torch.randn(outputs, inputs, 1, 1)
    laid_out = [one.to(memory_format=torch.channels_last) for one in given]
    module = gradients_of_weights(*laid_out, weight)
    convolution_gradients.put_right(module.graph)
    module.recompile()
    assert not module.graph.find_nodes(op="call_function", target=BACKWARD)
    got = module(*laid_out, weight)
    eager, exact = (
        gradients_of_weights(*values)(*values)
        for values in ([*given, weight], [one.double() for one in (*given, weight)])
    )
    assert_contract(got, eager, exact, f"{inputs} inputs and {outputs} outputs")


def gradients_of_weights(grad: Tensor, image: Tensor, weight: Tensor) -> torch.fx.GraphModule:
    """Of weight and bias, as AOTAutograd asks for them."""

    def backward(grad: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ones, none, mask = [1, 1], [0, 0], [False, True, True]
        where = ([weight.shape[0]], ones, none, ones, False, none, 1, mask)
        return BACKWARD(grad, image, weight, *where)[1:]

    return make_fx(backward, tracing_mode="fake")(grad, image, weight)
