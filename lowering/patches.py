"""A convolution that reads every pixel once is a linear layer of patches, and is written as one.

Where its kernel is as large as the image, there is one patch, and nothing is moved: Qwen2-VL and
its family cut videos into such images ahead of the graph; the last layer of many critics, and of
classifiers that became convolutions, is another. Torch's libraries go through them as through
images of a single pixel: 256 images of 3x2x14x14 to 1280 channels take 31 ms, as a layer 5, in
bfloat16 125 and 1.1. In videos the stride is as large as the kernel: VideoMAE's patches of 16
images take 28 and 24, in bfloat16 22 and 4 (a core of a Xeon with AMX, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.attention_in_four import method
from lowering.contract import Request
from lowering.graphs import same_sizes
from lowering.levels import Level
from lowering.regions.calls import arguments, has_transforms, name_of, value_of

_DIMENSIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True)
class _Patches:
    node: fx.Node
    image: fx.Node
    weight: fx.Node
    bias: Any
    counts: Sequence[int]  # of patches, in each dimension
    kernel: Sequence[int]

    @property
    def is_whole_image(self) -> bool:
        return all(count == 1 for count in self.counts)


def write_as_linear(request: Request) -> bool:
    """For a graph as Dynamo captured it, and those in it; whether there was one. O0 computes what
    eager does."""
    if request.level < Level.O1:
        return False
    parts = [part for part in request.graph.modules() if isinstance(part, fx.GraphModule)]
    written = [_write_all(part) for part in parts if not has_transforms(part.graph)]
    return any(written)


def _write_all(part: fx.GraphModule) -> bool:
    written = False
    for node in list(part.graph.nodes):  # one may read another one's result
        if (found := _patches(node)) is not None:
            _write(part.graph, found)
            written = True
    if written:
        part.recompile()
    return written


def _is_as_exact(dtype: torch.dtype) -> bool:
    """Who lets products of float32 lose bits has not said so of convolutions."""
    if dtype is not torch.float32:
        return True
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was said with the interface of torch 2.9 and later
        of_onednn: Any = torch.backends.mkldnn
        return bool(of_onednn.matmul.fp32_precision == of_onednn.conv.fp32_precision)


def _patches(node: fx.Node) -> _Patches | None:
    dimensions = _DIMENSIONS.get(name_of(node), 0)
    given = arguments(node, _ARGUMENTS, _DEFAULTS) if dimensions else {}
    image, weight, whole = (
        value_of(one) for one in (given.get("input"), given.get("weight"), node)
    )
    if image is None or weight is None or whole is None:
        return None
    if not image.dim() == weight.dim() == dimensions + 2 or given["groups"] != 1:
        return None
    if not image.device.type == weight.device.type == "cpu" or not _is_plain(given):
        return None
    if whole.dtype not in _DTYPES or not _is_as_exact(whole.dtype):
        return None
    if not all(isinstance(size, int) and size > 0 for size in weight.shape):
        return None
    kernel = weight.shape[2:]
    counts = _counts(image.shape[2:], kernel, given["stride"])
    if counts is None or math.prod(kernel) == 1 or not _can_lie_so(whole):
        return None  # single pixels are computed with what is around them
    return _Patches(node, given["input"], given["weight"], given["bias"], counts, kernel)


def _is_plain(given: dict[str, Any]) -> bool:
    padding = given["padding"]
    without_edge = padding == "valid" or all(one == 0 for one in _each(padding, 1))
    return without_edge and all(one == 1 for one in _each(given["dilation"], 1))


def _each(given: Any, dimensions: int) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given] * dimensions


def _counts(image: Sequence[Any], kernel: Sequence[Any], stride: Any) -> list[int] | None:
    """None where patches overlap, have gaps, or pixels are left over; and in images, where kernels
    of convolutions take as long."""
    if same_sizes(image, kernel):
        return [1] * len(kernel)
    if len(kernel) < 3:
        return None
    strides = _each(stride, len(kernel))
    if not all(isinstance(size, int) for size in (*image, *strides)):
        return None
    if len(strides) == 1:  # a list of one stands for all
        strides *= len(kernel)
    if strides != list(kernel) or any(size % k for size, k in zip(image, kernel, strict=True)):
        return None
    return [size // k for size, k in zip(image, kernel, strict=True)]


def _can_lie_so(result: torch.Tensor) -> bool:
    """A layer's outputs lie pixel by pixel, and can be copied to lie channel by channel."""
    return result.is_contiguous() or result.movedim(1, -1).is_contiguous()


def _write(graph: fx.Graph, found: _Patches) -> None:
    node = found.node
    with graph.inserting_before(node):
        rows = _rows(graph, found)
        weight = method(graph, "flatten", found.weight, 1)
        layer = graph.call_function(functional.linear, (rows[-1], weight, found.bias))
        layer.meta["example_value"] = _outputs(found)
        results = _one_after_another(graph, layer, _image_again(found))
    for new in (*rows, weight, layer, *results):
        new.meta = {**node.meta, **new.meta}
    node.replace_all_uses_with(results[-1])
    graph.erase_node(node)


def _outputs(found: _Patches) -> torch.Tensor:
    """What the layer gives, without computing it."""
    image = value_of(found.node)
    pixels: torch.Tensor = image.flatten(1) if found.is_whole_image else image.movedim(1, -1)
    return pixels.contiguous()


def _image_again(found: _Patches) -> list[tuple[Any, ...]]:
    if found.is_whole_image:
        return [("unsqueeze", -1)] * len(found.kernel)
    copied = [("contiguous",)] if value_of(found.node).is_contiguous() else []
    return [("movedim", -1, 1), *copied]


def _rows(graph: fx.Graph, found: _Patches) -> list[fx.Node]:
    """What each output is computed from, in the order of a kernel's numbers."""
    if found.is_whole_image:
        return [method(graph, "flatten", found.image, 1)]
    dimensions = len(found.kernel)
    parted = [
        ("unflatten", 2 + i, (found.counts[i], found.kernel[i]))
        for i in reversed(range(dimensions))
    ]
    places, within = range(2, 2 + 2 * dimensions, 2), range(3, 3 + 2 * dimensions, 2)
    moves = [*parted, ("permute", 0, *places, 1, *within), ("flatten", dimensions + 1)]
    return _one_after_another(graph, found.image, moves)


def _one_after_another(
    graph: fx.Graph, node: fx.Node, calls: Sequence[tuple[Any, ...]]
) -> list[fx.Node]:
    made: list[fx.Node] = []
    for name, *given in calls:
        made.append(method(graph, name, made[-1] if made else node, *given))
    return made
