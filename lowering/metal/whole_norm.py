"""A norm region from what is added before it to its last conversion: what one kernel computes.

The region's own match is the reciprocal root in the middle. Around it stand conversions to float32
and back, in the order that the model's author chose, and perhaps a weight and an addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.graphs import only_user, same_sizes
from lowering.regions.norm import Norm, square_of

aten = torch.ops.aten
_CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True)
class WholeNorm:
    """rms_norm(input + residual) * weight; `last` is the result, `sum` the addition or None."""

    last: fx.Node
    input: fx.Node
    residual: fx.Node | None
    sum: fx.Node | None
    weight: fx.Node | None
    eps: float


def whole(match: Norm) -> WholeNorm | None:
    """None: it is no RMS norm, or its result is not of its input's dtype."""
    if match.kind != "rms":
        return None
    shifted: Any = match.node.args[0]
    mean, eps = shifted.args[0], shifted.args[1]
    wide = square_of(mean.args[0])
    x = _unconverted(wide)
    normed = only_user(match.node)
    if not isinstance(eps, (int, float)) or normed is None or not _is_product(normed):
        return None
    if _other(normed, match.node) is not wide:
        return None
    found = None
    for last, weight in _steps_behind(normed):
        if _value(last).dtype == _value(x).dtype and same_sizes(
            _value(last).shape, _value(x).shape
        ):
            found = (last, weight)
    if found is None:
        return None
    last, weight = found
    addition = _addition_before(x, last, weight)
    if addition is None:
        return WholeNorm(last, x, None, None, weight, float(eps))
    return WholeNorm(last, *addition, x, weight, float(eps))


def _steps_behind(normed: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Each node that the norm may end with, and the weight that is in it by then."""
    node, weight = normed, None
    while True:
        yield node, weight
        user = only_user(node)
        if user is None:
            return
        if user.target not in _CONVERSIONS:
            factor = _other(user, node) if _is_product(user) else None
            if weight is not None or not _scales_columns(factor, normed):
                return
            weight = _unconverted(factor)
        node = user


def _scales_columns(factor: Any, normed: fx.Node) -> bool:
    value = _value(factor)
    if value is None or value.dim() != 1:
        return False
    narrow = _value(_unconverted(factor)).dtype
    takes = narrow in (torch.float32, torch.float16, torch.bfloat16)
    return takes and same_sizes(value.shape, _value(normed).shape[-1:])


def _addition_before(
    x: fx.Node, last: fx.Node, weight: fx.Node | None
) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors whose sum is normed, where nobody wants the sum before the norm is there."""
    if x.target is not aten.add.Tensor or len(x.args) != 2 or x.kwargs:
        return None
    one, other = x.args
    value = _value(x)
    for part in (one, other):
        given = _value(part)
        if given is None or given.dtype != value.dtype or given.device != value.device:
            return None
        if not same_sizes(given.shape, value.shape):
            return None
    order = {node: place for place, node in enumerate(x.graph.nodes)}
    chain = _between(x, last, weight)
    early = [user for user in x.users if user not in chain and order[user] < order[last]]
    shared = [node for node in chain - {last} if not chain >= set(node.users)]
    return None if early or shared else (one, other)  # type: ignore[return-value]


def _between(x: fx.Node, last: fx.Node, weight: fx.Node | None) -> set[fx.Node]:
    """The nodes of the norm itself."""
    found: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        ends = node is x or node is weight or node in found
        if not ends and node.op == "call_function":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _unconverted(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in _CONVERSIONS:
        inner: Any = node.args[0]
        if not _value(inner).dtype.is_floating_point or not _widens(inner, node):
            return node
        node = inner
    return node


def _widens(inner: fx.Node, node: fx.Node) -> bool:
    """Only what keeps every number may be skipped."""
    return bool(_value(inner).dtype.itemsize <= _value(node).dtype.itemsize)


def _value(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and len(node.args) == 2


def _other(product: fx.Node, node: fx.Node) -> Any:
    one, other = product.args
    return other if one is node else one
