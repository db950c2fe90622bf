"""Images between convolutions that are enlarged by repeating each pixel.

Interpolation by nearest neighbours reaches the lowered graph as an index, whose places are computed
from nothing but their number: they are computed here, to see which they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.convolution_steps import Kind, Member, Members, Step, is_image_of_ours
from lowering.regions.weights import Stays

aten, prims = torch.ops.aten, torch.ops.prims
_MOST_PLACES = 1 << 14
_COMPUTES_PLACES = {
    prims.iota.default,
    prims.convert_element_type.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten._to_copy.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.floor.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.reshape.default,
}


def enlarged(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    args: Any = node.args
    image, places = args
    if node.kwargs or not is_image_of_ours(image, found, ranks=(4,)):
        return None
    if len(places) != 4 or [place is None for place in places] != [True, True, False, False]:
        return None
    cone: dict[fx.Node, Any] = {}
    sizes = image.meta["val"].shape[2:]
    with unset_fake_temporarily():
        factors = [
            _factor(_known(place, cone), size, dims)
            for place, size, dims in zip(places[2:], sizes, (2, 1), strict=True)
        ]
    stride = [factor for factor in factors if factor is not None]
    if len(stride) < len(factors):
        return None
    step = Step(Kind.ENLARGED, image, window=(*stride, 0, 0, 0, 0, 1, 1))
    return Member(node, [step], tuple(cone))


def _factor(places: torch.Tensor | None, size: Any, dims: int) -> int | None:
    """How often each of so many pixels is read, if all are, one after the other."""
    if places is None or places.dim() != dims or places.numel() != places.shape[0]:
        return None
    if type(size) is not int or size == 0 or places.numel() % size:
        return None
    factor = places.numel() // size
    expected = torch.arange(size).repeat_interleave(factor)
    return factor if torch.equal(places.flatten(), expected) else None


def _known(node: Any, cone: dict[fx.Node, Any]) -> torch.Tensor | None:
    """What a node is, whatever the inputs of the graph are. `cone`: what it is computed from."""
    if not isinstance(node, fx.Node) or node.target not in _COMPUTES_PLACES:
        return None
    value = node.meta["val"]
    if not all(type(size) is int for size in value.shape) or value.numel() > _MOST_PLACES:
        return None
    if node not in cone:
        given = {one: _known(one, cone) for one in node.all_input_nodes}
        if any(one is None for one in given.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        cone[node] = node.target(*args, **kwargs)
    known: torch.Tensor = cone[node]
    return known
