"""Images that enter a graph in rows (each channel a picture of its own) and leave it so.

Between two convolutions an image lies channels last, since that is faster. A convolution that
stands alone between such images pays for the way there and back.
"""

from __future__ import annotations

import torch
from torch import fx

from lowering.outputs import lies_channels_last


def stands_alone(convolution: fx.Node, image: fx.Node) -> bool:
    """Does nothing but what is computed number by number stand between it and the graph's ends?"""
    value = image.meta["val"]
    if value.dim() < 4 or not value.is_contiguous() or lies_channels_last(value):
        return False
    return _comes_from_outside(image) and _leaves(convolution)


def _comes_from_outside(node: fx.Node) -> bool:
    while node.op != "placeholder":
        if not _is_pointwise(node) or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    return True


def _leaves(node: fx.Node) -> bool:
    waiting, known = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and not _is_pointwise(user):
                return False
            if user.op != "output" and user not in known:
                known.add(user)
                waiting.append(user)
    return True


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
