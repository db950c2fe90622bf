"""Images that enter a graph in rows (each channel a picture of its own) and leave it so.

Between two convolutions an image lies channels last, since that is faster. A convolution that
stands alone between such images pays for the way there and back.
"""

from __future__ import annotations

import torch
from torch import fx

from lowering import outputs
from lowering.outputs import lies_channels_last

aten = torch.ops.aten


def stands_alone(convolution: fx.Node, image: fx.Node) -> bool:
    """Does nothing but what is computed number by number stand between it and the graph's ends, or
    what reads its channels as they lie in rows?"""
    value = image.meta["val"]
    if value.dim() < 4 or not value.is_contiguous() or lies_channels_last(value):
        return False
    return _comes_from_outside(image) and _leaves(convolution)


def _comes_from_outside(node: fx.Node) -> bool:
    while node.op != "placeholder":
        if not outputs.is_pointwise(node) or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    return True


def _leaves(node: fx.Node) -> bool:
    waiting, known = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if _takes_channels_apart(user):
                continue
            if user.op != "output" and not outputs.is_pointwise(user):
                return False
            if user.op != "output" and user not in known:
                known.add(user)
                waiting.append(user)
    return True


def _takes_channels_apart(node: fx.Node) -> bool:
    """Flattened features, predictions per anchor: a view of rows, a copy of what lies otherwise."""
    if node.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return False
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    numbers = [size for size in (*before[1:], *after[1:]) if isinstance(size, int)]
    whole = len(numbers) == len(before) + len(after) - 2
    return whole and len(before) > 3 and (len(after) < 2 or after[1] != before[1])
