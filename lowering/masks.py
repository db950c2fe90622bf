"""Truth values are bytes wherever memory holds them, which vectors can be made of.

On x86 Inductor reads and writes a tensor of them number by number (torch 2.13): a comparison whose
result is stored takes twenty times as long as eager's, masks that are concatenated or padded a
hundred times, and so does every mask that a training graph keeps for its backward. Bytes are read
and written whole; to take one for the other is to copy them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowering import by_torch, machine, outputs
from lowering.graphs import call, hint

aten = torch.ops.aten
prims = torch.ops.prims

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("bitcast(Tensor x, ScalarType dtype) -> Tensor")


def _bitcast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy: what a graph's operator returns may not be the memory that it was given."""
    return x.view(dtype).clone()


_library.impl("bitcast", _bitcast, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernel_dispatch::bitcast", lambda x, dtype: torch.empty_like(x, dtype=dtype), lib=_library
)

# A copy of bytes costs a call, some 5 us: so many truth values cost more (13 ns written, 4 read).
_MANY_WRITTEN = 1 << 11
_MANY_READ = 1 << 12
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.unfold.default,
        aten.diagonal.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
# Torch's own kernels move bytes, whatever they stand for.
_COPIES = (
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.flip.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_select.default,
    aten.repeat.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    prims.rev.default,
)
# So they do with bytes that are nothing but truth values, as long as nobody makes numbers of them.
_LOGIC = (
    aten.bitwise_and.Tensor,
    aten.bitwise_not.default,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
    aten.eq.Tensor,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.mul.Tensor,
    aten.ne.Tensor,
)
# What reads each truth value once to make a number of it.
_COUNTS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.cumsum.default,
    }
)


_BY_TORCH: dict[Any, Any] = {operator: by_torch.whole(operator) for operator in (*_COPIES, *_LOGIC)}


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    if "avx2" not in machine.cpu().isa:
        return
    forms = _Forms(graph)
    for node in filter(_is_copy, list(graph.nodes)):
        forms.leave_to_torch(node)
    for node in _logic_of_memory(graph):
        forms.leave_to_torch(node)
    for node in filter(_holds_truth, list(graph.nodes)):
        for reader in list(node.users):
            instead = forms.read_by(reader, node)
            if instead is not node:
                reader.replace_input_with(node, instead)


def _logic_of_memory(graph: fx.Graph) -> list[fx.Node]:
    """Logic of what is in memory, of which nothing but memory is made."""
    of_memory: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_logic(node) and all(
            _is_stored(one) or one in of_memory for one in node.all_input_nodes
        ):
            of_memory.add(node)
    ends: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        keeps = node in of_memory or (node.target in _VIEWS and _holds_truth(node))
        if keeps and all(_is_outside(user) or user in ends for user in node.users):
            ends.add(node)
    return [node for node in graph.nodes if node in of_memory & ends]


def _is_logic(node: fx.Node) -> bool:
    return (
        node.target in _LOGIC
        and _holds_truth(node)
        and _size(node) >= _MANY_WRITTEN
        and all(isinstance(arg, fx.Node) for arg in node.args)  # torch's kernels take no numbers
    )


class _Forms:
    """The forms of the truth values of a graph, each made when somebody wants it: the bytes, what
    generated code makes of them, and what anybody else reads."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._inputs = graph.find_nodes(op="placeholder")
        self._behind: dict[fx.Node, fx.Node] = {}
        self.for_generated = functools.cache(self._for_generated)
        self.for_others = functools.cache(self._for_others)

    def leave_to_torch(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._in_memory)
        with self._graph.inserting_before(node):
            new = call(self._graph, _BY_TORCH[node.target], *args, **kwargs)
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _in_memory(self, node: fx.Node) -> fx.Node:
        return self.for_others(node) if _holds_truth(node) else node

    def read_by(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """Where a few are read or written, a copy would cost more."""
        many = _size(node)
        if _is_generated(reader):
            read = many if reader.target in _COUNTS else _size(reader)
            return self.for_generated(node) if read >= _MANY_READ else node
        return self.for_others(node) if _is_outside(reader) and many >= _MANY_WRITTEN else node

    def _for_generated(self, node: fx.Node) -> fx.Node:
        if not _is_memory(node):
            return self._viewed(node, self.for_generated) if node.target in _VIEWS else node
        bits = self._made(node, torch.ops.kernel_dispatch.bitcast.default, node, torch.uint8)
        number = self._made(node, prims.convert_element_type.default, bits, torch.float32)
        return self._made(node, aten.ne.Scalar, number, 0)

    def _for_others(self, node: fx.Node) -> fx.Node:
        if node.target in _VIEWS:
            return self._viewed(node, self.for_others)
        if _is_memory(node) or not outputs.is_pointwise(node):
            return node
        number = self._made(node, prims.convert_element_type.default, node, torch.float32)
        bits = self._made(node, prims.convert_element_type.default, number, torch.uint8)
        return self._made(node, torch.ops.kernel_dispatch.bitcast.default, bits, torch.bool)

    def _viewed(self, node: fx.Node, form: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The same view of another form."""
        base, *how = node.args
        assert isinstance(base, fx.Node)
        if not _holds_truth(base) or form(base) is base:
            return node
        return self._made(node, node.target, form(base), *how, **node.kwargs)

    def _made(self, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Behind its source and what was made of that before; behind all inputs if it is one."""
        key = self._inputs[-1] if source.op == "placeholder" else source
        with self._graph.inserting_after(self._behind.get(key, key)):
            self._behind[key] = call(self._graph, target, *args, **kwargs)
        return self._behind[key]


def _holds_truth(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype is torch.bool and value.device.type == "cpu"


def _is_memory(node: fx.Node) -> bool:
    """Was it there before generated code runs? Of a part, that part alone is copied."""
    if node.target in _VIEWS:
        (base,) = node.all_input_nodes[:1]
        return _is_memory(base) and _size(node) < _size(base)
    return node.op in ("placeholder", "get_attr") or _is_ours(node)


def _is_stored(node: fx.Node) -> bool:
    while _holds_truth(node) and node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return _holds_truth(node) and _is_memory(node)


def _is_copy(node: fx.Node) -> bool:
    """Of many truth values in memory or into it, from where nothing has to be looked for."""
    if node.target not in _COPIES or not _holds_truth(node) or _size(node) < _MANY_WRITTEN:
        return False
    by_numbers = node.target in (aten.index.Tensor, aten.index_put.default)
    if by_numbers and any(map(_holds_truth, _listed(node.args[1]))):
        return False
    # Inductor reads what it computes itself from another place, but joins nothing without memory.
    joins = node.target is aten.cat.default
    return joins or _is_read_outside(node) or any(map(_is_stored, node.all_input_nodes))


def _is_read_outside(node: fx.Node) -> bool:
    return any(
        _is_outside(user)
        or user.target is aten.cat.default
        or (user.target in _VIEWS and _is_read_outside(user))
        for user in node.users
    )


def _listed(indices: Any) -> list[fx.Node]:
    return [index for index in indices if isinstance(index, fx.Node)]


def _is_generated(reader: fx.Node) -> bool:
    return outputs.is_pointwise(reader) or reader.target in _COUNTS


def _is_outside(reader: fx.Node) -> bool:
    return reader.op == "output" or _is_ours(reader)


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "kernel_dispatch"


def _size(node: fx.Node) -> int:
    return math.prod(hint(size) for size in node.meta["val"].shape)
