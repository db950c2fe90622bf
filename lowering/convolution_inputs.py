"""Images that are computed in a graph are written as the convolutions that read them want them.

Convolutions of ours read channels last and copy what lies otherwise. Generated code that computes
the image can just as well write it so: no copy, or one in vectors where torch's takes numbers.
That it does write as the graph says is due to the operators' tag `needs_fixed_stride_order`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lowering.outputs import copied, lies_channels_last

# Which arguments of an operator it reads channels last: the image, and what lies beside the output;
# tensors, or lists of them.
_READ_CHANNELS_LAST = {
    "kernel_dispatch::openmp_convolution": (0, 12, 13, 14),
    "kernel_dispatch::openmp_convolutions": (0, 3),
    "kernel_dispatch::openmp_transposed_convolution": (0,),
    "kernel_dispatch::openmp_quantized_convolution": (0, 5),
    "kernel_dispatch::mkldnn_convolution": (0,),
    "kernel_dispatch::mkldnn_transposed_convolution": (0,),
    "kernel_dispatch::mkldnn_quantized_convolution": (0, 5),
}


def lay_out(graph: fx.Graph) -> None:
    """Before the code of everything else is generated, and after it is known how tensors lie."""
    laid_out: dict[fx.Node, fx.Node] = {}

    def channels_last(image: fx.Node) -> fx.Node:
        if image.op == "placeholder" or lies_channels_last(image.meta["val"]):
            return image
        if image not in laid_out:
            dims = image.meta["val"].dim()
            laid_out[image] = copied(graph, image, (0, *range(2, dims), 1))
        return laid_out[image]

    for node in list(graph.nodes):
        for index in _reading_channels_last(node):
            node.update_arg(index, fx.map_arg(node.args[index], channels_last))


def _reading_channels_last(node: fx.Node) -> Sequence[int]:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    if node.kwargs.get("rows") and target.name() == "kernel_dispatch::mkldnn_convolution":
        return ()
    return _READ_CHANNELS_LAST.get(target.name(), ())
