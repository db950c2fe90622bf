"""Average pooling whose windows leave the image, where Inductor is lost or wrong (torch 2.13).

- It goes over a whole window, image or not. EfficientNet ends in one of 1280x1280 on 7x7 pixels
  (`ceil_mode` makes that one output), which took 0.8 s instead of 40 us.
- Its gradients divide by the whole window, where `ceil_mode` lets the last one end at the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, "
    "int[2] padding, bool ceil_mode, bool count_include_pad, int? divisor_override) -> Tensor"
)
# By another name, Inductor leaves it to torch.
_library.impl("avg_pool2d_backward", aten.avg_pool2d_backward.default, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernel_dispatch::avg_pool2d_backward", aten.avg_pool2d_backward.default, lib=_library
)


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for node in graph.find_nodes(op="call_function", target=aten.avg_pool2d.default):
        _narrow(node, *node.args)
    for node in graph.find_nodes(op="call_function", target=aten.avg_pool2d_backward.default):
        *_, ceil_mode, counts_padding, divisor = node.args
        if ceil_mode and counts_padding and divisor is None:
            node.target = torch.ops.kernel_dispatch.avg_pool2d_backward.default


def _narrow(
    node: fx.Node,
    image: Any,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    *others: Any,
) -> None:
    """A window longer than the padded image has one place there: it may as well end with it."""
    height, width = image.meta["val"].shape[-2:]
    (long, wide), (above, left) = _pair(window), _pair(padding)
    short = [_at_most(long, height + 2 * above), _at_most(wide, width + 2 * left)]
    if short != [long, wide]:
        node.args = (image, short, list(stride) or [long, wide], [above, left], *others)


def _pair(value: Sequence[int]) -> Sequence[int]:
    """One number may stand for both dimensions."""
    return value if len(value) == 2 else (value[0], value[0])


def _at_most(length: int, limit: Any) -> int:
    return min(length, limit) if isinstance(limit, int) else length
