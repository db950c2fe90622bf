"""The resampling region: interpolation, sampling at a grid, padding with what is in the image.

Found where Dynamo sees it. Below, interpolation is taken apart into some forty operators, whose
gradients are scattered number by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering import outputs, sizes_in_tensors
from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.calls import arguments, dtype_name, has_transforms, value_of

_NEAREST = ("nearest", "nearest-exact")
_INTERPOLATED = {
    3: ("linear", *_NEAREST),
    4: ("bilinear", "bicubic", *_NEAREST),
    5: ("trilinear", *_NEAREST),
}
_PADDED = ("reflect", "replicate", "circular")


@dataclass(frozen=True)
class Resampling:
    """One match: which operator of ours stands for it (`lowering/resampled.py`), and with what."""

    node: fx.Node
    operator: str
    operands: tuple[Any, ...]
    absorbed: Sequence[fx.Node] = ()

    @property
    def repeats(self) -> bool:
        """Each output is a copy of one input, which generated code does well."""
        return self.operator == "interpolate" and self.operands[3] in _NEAREST

    def work(self) -> Work:
        values = [value_of(self.node), value_of(self.operands[0])]
        sizes = [math.prod(hint(size) for size in value.shape) for value in values]
        return Work(
            region="resampling",
            dtypes=frozenset({dtype_name(values[0])}),
            op_count=1,
            bytes_moved=sum(sizes) * values[0].dtype.itemsize,
            dynamic=any(not isinstance(size, int) for value in values for size in value.shape),
        )


def find(graph: fx.Graph) -> Iterator[Resampling]:
    if has_transforms(graph):  # our operators have no rules for them
        return
    for node in list(graph.nodes):
        match = read(node)
        if match is not None and _is_plain(match):
            yield match


def read(node: fx.Node) -> Resampling | None:
    """What a node computes now: its operands change when another region is replaced."""
    if node.op != "call_function" or value_of(node) is None or sizes_in_tensors.has_them(node):
        return None
    reader = _READERS.get(node.target)
    return reader(node) if reader is not None else None


def _is_plain(match: Resampling) -> bool:
    """One dtype in and out (autocast is at work otherwise), all of it on the CPU."""
    tensors = [match.node, *(one for one in match.operands if value_of(one) is not None)]
    values = [value_of(one) for one in tensors]
    return len({value.dtype for value in values}) == 1 and all(
        value.device.type == "cpu" for value in values
    )


def _interpolation(node: fx.Node) -> Resampling | None:
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias".split()
    given = arguments(node, names, {"mode": "nearest"})
    image = value_of(given["input"])
    if image is None or given["mode"] not in _INTERPOLATED.get(image.dim(), ()):
        return None
    if given["recompute_scale_factor"] or given["antialias"]:
        return None
    size = _each(given["size"], image.dim() - 2)
    scales = _each(given["scale_factor"], image.dim() - 2)
    if (size is None) == (scales is None) or not all(
        isinstance(scale, int | float) for scale in scales or ()
    ):
        return None
    scales = None if scales is None else [float(scale) for scale in scales]
    if given["align_corners"] and given["mode"] in _NEAREST:  # torch will say that it is wrong
        return None
    corners = bool(given["align_corners"])
    return Resampling(node, "interpolate", (given["input"], size, scales, given["mode"], corners))


def _grid_sample(node: fx.Node) -> Resampling | None:
    names = "input grid mode padding_mode align_corners".split()
    given = arguments(node, names, {"mode": "bilinear", "padding_mode": "zeros"})
    image = value_of(given["input"])
    if image is None or image.dim() != 4 or value_of(given["grid"]) is None:
        return None
    corners = bool(given["align_corners"])
    ways = (given["mode"], given["padding_mode"])
    return Resampling(node, "grid_sample", (given["input"], given["grid"], *ways, corners))


def _padding(node: fx.Node) -> Resampling | None:
    given = arguments(node, "input pad mode value".split(), {"mode": "constant"})
    if given["mode"] not in _PADDED or value_of(given["input"]) is None:
        return None
    if not isinstance(given["pad"], list | tuple):
        return None
    if given["mode"] == "circular" and not _is_wrapped_once(value_of(given["input"]), given["pad"]):
        return None
    return Resampling(node, "pad", (given["input"], list(given["pad"]), given["mode"]))


def _is_wrapped_once(image: torch.Tensor, pad: Sequence[Any]) -> bool:
    """Torch has the words for what it refuses, cuts where a number is negative, and takes images
    channels last to rows."""
    padded = image.shape[image.dim() - len(pad) // 2 :]
    if len(pad) % 2 or not 0 < len(pad) // 2 < image.dim():
        return False
    if not all(isinstance(number, int) for number in (*padded, *pad)):
        return False
    sizes = [size for size in reversed(padded) for _ in ("before", "after")]
    fits = all(0 <= number <= size for number, size in zip(pad, sizes, strict=True))
    return fits and outputs.order_of(image) is torch.contiguous_format


_READERS: dict[Any, Callable[[fx.Node], Resampling | None]] = {
    functional.interpolate: _interpolation,
    functional.grid_sample: _grid_sample,
    functional.pad: _padding,
    torch._C._nn.pad: _padding,
}


def _each(value: Any, dimensions: int) -> Any:
    """One for each dimension, where one may stand for all; or a node that stands for all sizes."""
    if value is None or (isinstance(value, fx.Node) and isinstance(_example(value), tuple)):
        return value
    return list(value) if isinstance(value, list | tuple) else [value] * dimensions


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")
