"""How tensors lie in memory when a lowering has changed it: inside of a graph, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from lowering.graphs import hint

aten = torch.ops.aten


def strides(graph: fx.Graph) -> list[Any]:
    """The strides of every output, as they were traced; None for what is no tensor."""
    return [
        value.stride() if isinstance(value := _value(node), torch.Tensor) else None
        for node in _results(graph)
    ]


def allow_other_strides(module: fx.GraphModule) -> None:
    """Views become reshapes, which copy where they must; then the new strides are worked out."""
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    with torch.no_grad():
        FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*inputs)


def restore(graph: fx.Graph, wanted: Sequence[Any]) -> None:
    """Outputs lie in memory as the user's own code would have laid them."""
    node = graph.output_node()
    results = list(_results(graph))
    for index, (result, stride) in enumerate(zip(results, wanted, strict=True)):
        value = _value(result)
        if stride is None or value is None or _alike(value, stride):
            continue
        order = sorted(range(value.dim()), key=lambda dim: (-hint(stride[dim]), dim))
        back = [order.index(dim) for dim in range(value.dim())]
        with graph.inserting_before(node):
            results[index] = _laid_out(graph, result, order, back)
    node.args = (tuple(results) if isinstance(node.args[0], tuple) else results,)


def _laid_out(graph: fx.Graph, node: fx.Node, order: list[int], back: list[int]) -> fx.Node:
    kept = node.meta["val"]
    value, steps = kept, node
    laid_out: tuple[Any, ...] = (
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (back,), {}),
    )
    for target, args, kwargs in laid_out:
        steps = graph.call_function(target, (steps, *args), kwargs)
        value = target(value, *args, **kwargs)
        steps.meta["val"] = value
    return steps


def _alike(value: torch.Tensor, stride: Sequence[Any]) -> bool:
    """Dimensions of size one may have any stride."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(
        statically_known_true(mine == wanted) or statically_known_true(size == 1)
        for mine, wanted, size in zip(value.stride(), stride, value.shape, strict=True)
    )


def _results(graph: fx.Graph) -> Sequence[Any]:
    results: Any = graph.output_node().args[0]
    return results


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None
