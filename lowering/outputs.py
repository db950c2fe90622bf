"""How tensors lie in memory where a lowering has changed it: kept inside, put back where it shows.

Convolutions of ours give images channels last, attention gives heads side by side, and what is
computed from them inherits that. It shows where the graph hands out a tensor or a view of one, and
to operators that read memory as it lies. There the tensor is laid out as the user's own code would
have laid it: the tensor that owns the memory, so that views which shared it still do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from lowering.graphs import call, hint

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default  # lacks the tag

Strides = Mapping[fx.Node, Sequence[Any]]
# Operators of torch that read memory as it lies.
_READ_MEMORY = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.resize.default,
    aten.view.dtype,
    aten.view_as_complex.default,
)
# Operators of torch that raise where memory has gaps or another order, as their callers have seen
# to that: what they read is in rows, or whole images channels last.
_READ_DENSE = (aten.native_group_norm.default, aten._pdist_forward.default)
# Operators of ours that write rows if told so: of any image, of one in rows.
_WRITE_ROWS = ("kernel_dispatch::openmp_convolution", "kernel_dispatch::mkldnn_convolution")
_FROM_ROWS_ONLY = ("kernel_dispatch::mkldnn_convolution",)
_NAMESPACES = (
    *("aten", "prims", "quantized_decomposed", "_operator"),
    *("kernel_dispatch", "triton_kernels"),
)


def order_of(tensor: torch.Tensor) -> torch.memory_format:
    """Images channels last, or rows: for a result that is to lie as its input, so that whoever
    comes next need not copy it."""
    rows = (
        tensor.dim() != 4
        or tensor.is_contiguous()
        or not tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return torch.contiguous_format if rows else torch.channels_last


def lies_channels_last(value: torch.Tensor) -> bool:
    return _lies_in_order(value, (0, *range(2, value.dim()), 1))


def lies_in_rows(value: torch.Tensor) -> bool:
    return _lies_in_order(value, range(value.dim()))


def _lies_in_order(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Dimensions of size one may have any stride; those of any size lie as they were traced."""
    expected = 1
    for dim in reversed(order):
        size, stride = hint(value.shape[dim]), hint(value.stride(dim))
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def strides(graph: fx.Graph) -> dict[fx.Node, Sequence[Any]]:
    """The strides of every tensor, as they were traced."""
    return {
        node: value.stride()
        for node in graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }


def put_back(
    module: fx.GraphModule,
    wanted: dict[fx.Node, Sequence[Any]],
    stands_for: Mapping[fx.Node, fx.Node],
    replace: Callable[[fx.Graph, dict[fx.Node, Sequence[Any]]], bool] = lambda graph, wanted: False,
) -> None:
    """Work out how tensors lie now, and lay out those whose strides show as they lay before.

    `stands_for`: the node that a region put in the place of an old one -> the old one.
    `replace`: nodes by others, now that it is known how tensors lie; says what is wanted of those,
    and whether there were any.
    """
    wanted.update({new: wanted[old] for new, old in stands_for.items() if old in wanted})
    handed_out = [wanted.get(node) for node in _results(module.graph)]
    for node, stride in _owners(module.graph, wanted):
        if node.op == "call_function" and _is_read_as_it_lies(node):
            _lay_out(module.graph, node, stride)  # or working out the strides would already fail
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # copies where it must
    _propagate(module)
    if replace(module.graph, wanted):
        _propagate(module)
    for node, stride in _owners(module.graph, wanted):
        if not _alike(node.meta["val"], stride) and not _writes(node, stride):
            _lay_out(module.graph, node, stride)
    _name_strides(module.graph, handed_out)


def _owners(graph: fx.Graph, wanted: Strides) -> list[tuple[fx.Node, Sequence[Any]]]:
    return [(node, wanted[node]) for node in graph.nodes if node in wanted and not is_view(node)]


def _propagate(module: fx.GraphModule) -> None:
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    with torch.no_grad():
        FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*inputs)


def _writes(node: fx.Node, stride: Sequence[Any]) -> bool:
    """Can the operator itself write what these strides say, and does nobody read it otherwise?"""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.name() not in _WRITE_ROWS:
        return False
    image: Any = node.args[0]
    if target.name() in _FROM_ROWS_ONLY and not image.meta["val"].is_contiguous():
        return False
    rows = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
    if not _alike(rows, stride) or not all(map(_sees_layout, node.users)):
        return False
    node.kwargs = {**node.kwargs, "rows": True}
    node.meta["val"] = rows
    return True


def _lay_out(graph: fx.Graph, node: fx.Node, stride: Sequence[Any]) -> None:
    """Give those users of `node` to whom it shows a copy with these strides."""
    seeing = [user for user in node.users if _sees_layout(user)]
    if not seeing:
        return
    order = sorted(range(len(stride)), key=lambda dim: (-hint(stride[dim]), dim))
    copy = copied(graph, node, order)
    for user in seeing:
        user.replace_input_with(node, copy)


def _results(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    return [*results] if isinstance(results, (tuple, list)) else [results]


def _name_strides(graph: fx.Graph, wanted: Sequence[Sequence[Any] | None]) -> None:
    """The same memory by the user's own strides: those of a dimension of size one make no
    difference to where a number lies, but to how torch names that order, and lays out what follows.
    """
    (output,) = graph.find_nodes(op="output")
    for node, stride in zip(_results(graph), wanted, strict=True):
        if stride is None or node not in output.all_input_nodes:
            continue
        value = node.meta["val"]
        static = all(isinstance(number, int) for number in (*value.shape, *stride))
        if static and value.stride() != tuple(stride) and _alike(value, stride):
            with graph.inserting_before(output):
                named = call(graph, aten.as_strided.default, node, [*value.shape], [*stride])
            output.replace_input_with(node, named)


def copied(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A copy with the dimensions in this order in memory, the last one innermost."""
    in_rows = list(order) == list(range(len(order)))
    with graph.inserting_before(node.next):
        # In rows there is no view: of an output that is one, Inductor compares symbolic strides,
        # which torch 2.13 raises at where height and width are two symbols.
        turned = node if in_rows else call(graph, aten.permute.default, node, list(order))
        copy = call(graph, aten.clone.default, turned, memory_format=torch.contiguous_format)
        if in_rows:
            return copy
        back = [order.index(dim) for dim in range(len(order))]
        return call(graph, aten.permute.default, copy, back)


def shows(node: fx.Node) -> bool:
    """Does anybody see how it lies in memory?"""
    return any(map(_sees_layout, node.users))


def _sees_layout(user: fx.Node) -> bool:
    if user.op == "output" or user.target in _READ_MEMORY or _draws_in_order(user):
        return True
    if user.target in _READ_DENSE:
        read: torch.Tensor = user.all_input_nodes[0].meta["val"]
        return not read.is_contiguous(memory_format=order_of(read))
    if is_view(user):
        return any(map(_sees_layout, user.users))
    namespace = getattr(user.target, "namespace", None) or getattr(user.target, "__module__", "")
    return namespace not in _NAMESPACES


def _draws_in_order(user: fx.Node) -> bool:
    """Random numbers fill memory in its order: the third may belong to another pixel. Attention is
    marked as drawing, and draws nothing in a graph that regions are taken from."""
    tags = getattr(user.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and "attention" not in str(user.target)


def _is_read_as_it_lies(node: fx.Node) -> bool:
    return any(
        user.target in _READ_MEMORY or (is_view(user) and _is_read_as_it_lies(user))
        for user in node.users
    )


def is_view(node: fx.Node) -> bool:
    """Does it share memory with its input?"""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])  # part of a split, not one of two results
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def memory_of(node: fx.Node) -> fx.Node:
    """What it is a view of, or itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_pointwise(node: fx.Node) -> bool:
    """Does generated code compute each of its numbers of those in the same place?"""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is _CONVERT


def _alike(value: torch.Tensor, stride: Sequence[Any]) -> bool:
    """Dimensions of size one may have any stride."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(
        statically_known_true(mine == wanted) or statically_known_true(size == 1)
        for mine, wanted, size in zip(value.stride(), stride, value.shape, strict=True)
    )
