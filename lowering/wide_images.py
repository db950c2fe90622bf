"""Images of half precision stay float32 between convolutions of ours.

Each of these takes float32 and gives it, with a conversion on either side (`regions/widening.py`).
A result that is narrowed and then widened again is read as it was: nearer to the model's own
numbers, and neighbours can become one call. What stands between convolutions is computed of float32
too, where that gives the same or better.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowering.convolution_members import may_stand_between
from lowering.convolution_steps import is_convolution
from lowering.graphs import call
from lowering.regions.widening import narrowed

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
# Beside what can be a member of a group: what groups take from around their members.
_TAKEN = (aten.add.Tensor, aten.constant_pad_nd.default, aten.mul.Tensor)


def keep(graph: fx.Graph) -> None:
    """Take out the conversions between convolutions of ours."""
    wide: dict[fx.Node, fx.Node] = {}  # an image that was narrowed -> what it was
    for node in list(graph.nodes):
        if node.target is torch.ops.prims.convert_element_type.default:
            source: Any = node.args[0]
            if _is_half(node) and (is_convolution(source) or source in wide.values()):
                wide[node] = source
            elif source in wide and node.args[1] is torch.float32:
                node.replace_all_uses_with(wide[source])
                graph.erase_node(node)
        elif _is_half(node) and (made := _of_floats(graph, node, wide)) is not None:
            narrow, wide[narrow] = _narrowed(graph, node, made), made
    for narrow in reversed(wide):
        if not narrow.users:
            graph.erase_node(narrow)


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _of_floats(graph: fx.Graph, node: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The same of what its images were before they were narrowed, if all of them were."""
    several = node.target is operator.getitem
    maker: Any = node.args[0] if several else node
    if not (may_stand_between(node) or node.target in _TAKEN) or maker.kwargs:
        return None
    images: Any = maker.args[:1] if several else maker.args
    read = [part for part in _flat(images) if isinstance(part, fx.Node)]
    if not read or not all(part in wide for part in read):
        return None
    args = (*fx.node.map_arg(images, wide.__getitem__), *maker.args[len(images) :])
    with graph.inserting_before(node):
        made = call(graph, maker.target, *args)
        return call(graph, operator.getitem, made, node.args[1]) if several else made


def _flat(images: Any) -> list[Any]:
    return [part for one in images for part in (one if isinstance(one, (list, tuple)) else [one])]


def _narrowed(graph: fx.Graph, node: fx.Node, made: fx.Node) -> fx.Node:
    """In the place of a node what was made of floats."""
    with graph.inserting_before(node):
        narrow = narrowed(graph, made, node.meta["val"].dtype)
    narrow.meta = dict(node.meta)
    node.replace_all_uses_with(narrow)
    maker: Any = node.args[0]
    graph.erase_node(node)
    if node.target is operator.getitem and not maker.users:
        graph.erase_node(maker)
    return narrow
