"""How images lie in the code that Inductor generates: in rows (each channel a picture of its own),
or channels last, which it likes better around convolutions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import torch
from torch import fx

from lowering.graphs import hint
from lowering.regions import rows
from lowering.replacing import replaced

aten = torch.ops.aten

# Channels last in training, every step copies the weights of kernels above 1x1 there, and their
# gradients back: for so many numbers in images for each one in such a weight that is worth it.
_IMAGES_PER_WEIGHT = 4
# Of what such a weight counts where ours computes: its gradient alone is copied, and the rest takes
# half the time. A ResNet-18 with 1.8 numbers for each took 0.92 of its time in rows, with 0.6 1.16.
_TILED = 0.375


def config_for(graph: fx.Graph, training: bool) -> dict[str, Any]:
    """What Inductor is told, if it is not to decide by itself."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    if training and _ours(graph):  # Inductor would not see that they are convolutions
        return {"layout_optimization": True, "force_layout_optimization": True}
    if not convolutions:
        return {}
    if training:
        return {"layout_optimization": puts_channels_last(convolutions)}
    # Images go to channels last and back. Between rows this costs more than it gains: a 1x1
    # convolution took 2.5 times as long.
    alone = all(rows.stands_alone(node, node.args[0]) for node in convolutions)
    return {"layout_optimization": False} if alone else {}


def puts_channels_last(convolutions: Sequence[Any], tiled: Collection[Any] = ()) -> bool:
    """Is that worth the copies of their weights in training? Of lines and volumes, which Inductor
    leaves in rows anyway: no. `tiled`: those that ours would compute after Winograd."""
    images = 0
    weights = 0.0
    for node in convolutions:
        made, image, weight = (one.meta["val"] for one in (node, *node.args[:2]))
        if made.dim() != 4:
            continue
        images += _numbers(made) + _numbers(image)
        if _is_copied(weight):
            weights += _numbers(weight) * (_TILED if node in tiled else 1)
    return images > _IMAGES_PER_WEIGHT * weights


def _ours(graph: fx.Graph) -> list[fx.Node]:
    """Convolutions that are taken because images lie channels last."""
    packet = getattr(torch.ops.kernel_dispatch, "openmp_training_convolution", None)
    if packet is None:  # no kernels here
        return []
    return list(graph.find_nodes(op="call_function", target=packet.default))


def _is_copied(weight: torch.Tensor) -> bool:
    """Of 1x1 kernels and depthwise ones, channels last is the same memory."""
    _, inputs, *kernel = weight.shape
    return inputs != 1 and math.prod(kernel) > 1


def _numbers(value: torch.Tensor) -> int:
    return math.prod(hint(size) for size in value.shape)


def around_ours() -> contextlib.AbstractContextManager[None]:
    """What a convolution reads, and what becomes of its result, Inductor lays channels last where
    it knows one. Ours are convolutions too, but read weights in rows."""
    from torch._inductor.graph import GraphLowering

    def making(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def found(lowering: Any) -> Any:
            nodes = find(lowering)
            if ours := _ours(lowering.module.graph):
                _prefer_channels_last(lowering.module.graph, set(ours), nodes)
            return nodes

        return found

    return replaced(GraphLowering, "find_nodes_prefer_channels_last", making)


def _prefer_channels_last(graph: fx.Graph, ours: Set[fx.Node], nodes: Any) -> None:
    """By Inductor's own rules: what is read on the way to a convolution, and what is computed of
    those up to the last one."""
    last = None
    for node in reversed(graph.nodes):
        if node in ours:
            last = last or node
            nodes.add(node)
        elif node.target is not aten.bmm.default and any(user in nodes for user in node.users):
            nodes.add(node)
    for node in graph.nodes:
        if node is last:
            break
        if node in nodes:
            nodes.update(user for user in node.users if user.target is not aten.bmm.default)
    for node in ours:
        nodes.discard(node.args[1])


def constrain_operators() -> None:
    """How Inductor is to write what operators of training read."""
    # The sums of BatchNorm's gradient read it beside the image that it belongs to. Inductor writes
    # it in rows if nobody says otherwise, and it had to be copied.
    _constrain("openmp_norm_sums", _as_the_image)
    _constrain("openmp_training_convolution", _channels_last)
    _constrain("openmp_weight_gradient", _both_channels_last)


def _constrain(name: str, constraint: Callable[..., Any]) -> None:
    from torch._inductor import lowering

    packet = getattr(torch.ops.kernel_dispatch, name, None)  # None: no kernels here
    if packet is not None and packet.default not in lowering.lowerings:
        lowering.make_fallback(packet.default, layout_constraint=constraint, warn=False)


def _channels_last(
    node: fx.Node, image: Any, *others: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch._inductor import ir

    image.realize()  # else it would be computed twice: for this call, and in rows for all others
    return (ir.ExternKernel.require_channels_last(image), *others), {}


def _both_channels_last(
    node: fx.Node, grad: Any, image: Any, *others: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (grad,), _ = _channels_last(node, grad)
    (image,), _ = _channels_last(node, image)
    return (grad, image, *others), {}


def _as_the_image(
    node: fx.Node, grad: Any, image: Any, mean: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    strides = image.maybe_get_stride()
    if strides is not None:
        order = ir.get_stride_order(strides, V.graph.sizevars.shape_env)
        grad = ir.ExternKernel.require_stride_order(grad, order)
    return (grad, image, mean), {}
