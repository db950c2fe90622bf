"""What is written where it lies, and read at other places: not in one loop, nor in another order.

All of these give wrong numbers without a word (Inductor 2.13). An input that is written by index
and then computed anew is written in place both times, so that one loop reads what it has replaced
(`x.add_(x.flip(0))` behind `x[i] = y`; pytorch#198270). So is one that becomes a view of something
computed from itself (`x.copy_(x.t().reshape(6, 8))`). Two inputs that change places become the same
(`t = x.clone(); x.copy_(y); y.copy_(t)`), and a clone that is returned is what its input becomes. A
number written by a mask (`x[x > 1] = 0`) comes before what was written by index, although it stands
behind it. What is put into an expanded tensor, as the gradients of `vmap(grad(...))` are, is put
into memory that its parts share. And what is gathered in an image of zeros, as the gradient of max
pooling, may be added to others while it is still zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lowering.graphs import call
from lowering.outputs import is_pointwise, is_view, memory_of

aten = torch.ops.aten
# Done in place where Inductor may.
_BY_INDEX = (
    aten.index_put,
    aten._unsafe_index_put,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.slice_scatter,
    aten.select_scatter,
    aten.diagonal_scatter,
    aten.as_strided_scatter,
    aten.masked_scatter,
)

_GATHERING = (
    aten.index_put,
    aten._unsafe_index_put,
    aten.index_add,
    aten.scatter_add,
    aten.scatter_reduce,
)
# Taken for a choice of Inductor's where a mask says where to write.
_PUT = (aten.index_put, aten._unsafe_index_put)
_MASKS = (torch.bool, torch.uint8)
_INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)
# Every number stays where it is, if all of them are there.
_IN_ORDER = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
)

_CALLS = (
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten._scaled_dot_product_flash_attention_for_cpu,
)

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("copied(Tensor x) -> Tensor")  # Inductor takes a clone for nothing at all


def _copied(x: Tensor) -> Tensor:
    return x.clone()


_library.impl("copied", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::copied", _copied, lib=_library)
COPIED = torch.ops.kernel_dispatch.copied.default


def put_right(graph: fx.Graph) -> None:
    """A copy where one is needed, and a choice between two numbers where a mask says which."""
    _read_before_written(graph)
    for node in [*graph.nodes]:
        if _is_by_index(node) and _shares_memory(node.args[0]):
            with graph.inserting_before(node):
                node.args = (call(graph, COPIED, node.args[0]), *node.args[1:])
    for node in [*graph.nodes]:
        if _is_by_mask(node):
            _choose(graph, node)
    for node in [*graph.nodes]:
        if _gathers(node) and any(map(_is_added_to_images, node.users)):
            read_copied(graph, node)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for write, source in _written(graph):
        if _reads_elsewhere(write, source, places):
            with graph.inserting_before(write):
                _read_instead(write, source, call(graph, COPIED, source))
    _write_copies(graph)


def _shares_memory(into: Any) -> bool:
    """Are numbers of it one in memory, as those of an expanded tensor are?"""
    value = into.meta.get("val") if isinstance(into, fx.Node) else None
    if not isinstance(value, Tensor):
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for stride, size in zip(value.stride(), value.shape, strict=True)
    )


def _read_instead(write: fx.Node, source: fx.Node, copy: fx.Node) -> None:
    """What is written into stays, where it is its own source."""

    def swapped(one: fx.Node) -> fx.Node:
        return copy if one is source else one

    write.args = (write.args[0], *fx.map_arg(write.args[1:], swapped))
    write.kwargs = fx.map_arg(dict(write.kwargs), swapped)


def _read_before_written(graph: fx.Graph) -> None:
    """What an input becomes, and what is returned, is read before another call has written that:
    inputs are written one after the other, and a clone of one was taken for nothing."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    first: dict[fx.Node, fx.Node] = {}

    def kept(node: fx.Node) -> fx.Node:
        write = first.get(memory_of(node))
        if write is None or places[node] > places[write]:
            return node
        with graph.inserting_before(write):
            return call(graph, COPIED, node)

    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        write.args = (write.args[0], kept(write.args[1]), *write.args[2:])
        first.setdefault(write.args[0], write)
    for end in graph.find_nodes(op="output"):
        end.args = fx.map_arg(end.args, kept)


def _gathers(node: fx.Node) -> bool:
    """Into a new tensor, in generated code."""
    given: Any = node.args[0] if node.args else None
    made = isinstance(given, fx.Node) and given.target is aten.full.default
    return made and getattr(node.target, "overloadpacket", None) in _GATHERING


def _is_added_to_images(user: fx.Node) -> bool:
    if is_view(user):
        return any(map(_is_added_to_images, user.users))
    return is_pointwise(user) and user.meta["val"].dim() > 2


def read_copied(graph: fx.Graph, node: fx.Node) -> None:
    """Have all readers read a copy, which is made when the whole of it is there."""
    readers = [*node.users]
    with graph.inserting_before(node.next):
        copy = call(graph, COPIED, node)
    for reader in readers:
        reader.replace_input_with(node, copy)


def _written(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Who writes into something, and what that becomes, as a whole or in parts (`x[1:] = x[:-1]`).
    What is no view is computed before, where all of it is written."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    wholes = [(copy, copy.args[1]) for copy in copies if copy.args[0].op == "placeholder"]
    by_index = [node for node in graph.nodes if _is_by_index(node)]
    parts = [(node, part) for node in by_index for part in _put_by(node)]
    return [*((copy, new) for copy, new in wholes if is_view(new)), *parts]


def _put_by(node: fx.Node) -> list[fx.Node]:
    """What it reads besides what it writes into, which may be the same."""
    read: dict[fx.Node, None] = {}
    fx.map_arg((node.args[1:], dict(node.kwargs)), lambda one: read.setdefault(one))
    return list(read)


def _write_copies(graph: fx.Graph) -> None:
    """What is written by index is a copy of the input, where what the input becomes reads that."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        given, new = copy.args[:2]
        written = [user for user in given.users if _is_by_index(user) and user.args[0] is given]
        if given.op != "placeholder":
            continue
        if not (
            _returns_what_it_replaces(new, given) or _reads_what_it_replaces(new, given, written)
        ):
            continue
        for node in written:
            with graph.inserting_before(node):
                own = call(graph, COPIED, given)
            node.args = (own, *node.args[1:])


def _is_by_mask(node: fx.Node) -> bool:
    """As Inductor sees it: one mask, and one number for all places."""
    if getattr(node.target, "overloadpacket", None) not in _PUT:
        return False
    given: Any = node.args
    indices, value = given[1:3]
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, fx.Node) or not isinstance(value, fx.Node):
        return False
    return mask.meta["val"].dtype in _MASKS and value.meta["val"].numel() == 1


def _choose(graph: fx.Graph, node: fx.Node) -> None:
    values: Any = node.args
    given, (mask,), value, *rest = values
    mine = node.meta["val"]
    with graph.inserting_before(node):
        for _ in range(mine.dim() - mask.meta["val"].dim()):
            mask = call(graph, aten.unsqueeze.default, mask, -1)
        if mask.meta["val"].dtype is torch.uint8:
            mask = call(graph, aten.ne.Scalar, mask, 0)
        if any(rest) or node.kwargs.get("accumulate"):
            value = call(graph, aten.add.Tensor, given, value)
        new = call(graph, aten.where.self, mask, value, given)
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _reads_elsewhere(write: fx.Node, source: fx.Node, places: dict[fx.Node, int]) -> bool:
    """Does generated code, for what `write` puts somewhere, read what lies at other places there?
    An index says where, and is read for all of a row."""
    given: Any = write.args[0]
    if source is given:
        return _is_by_index(write)
    first = places[given]
    moved = source.meta["val"].dtype in _INDICES and write.meta["val"].dtype not in _INDICES
    left, seen = [source], {source}
    while left:
        node = left.pop()
        if getattr(node.target, "overloadpacket", None) in _CALLS or _is_ours(node):
            continue
        stays = node.op != "call_function" or is_pointwise(node) or node.target in _IN_ORDER
        moved = moved or not stays
        inputs = node.all_input_nodes[node.target is aten.copy.default :]  # its first is replaced
        later = [one for one in inputs if places.get(one, first) >= first]
        left += [one for one in later if one not in seen]
        seen.update(later)
    return moved and given in seen


def _is_by_index(node: Any) -> bool:
    return getattr(getattr(node, "target", None), "overloadpacket", None) in _BY_INDEX


def _returns_what_it_replaces(new: fx.Node, given: fx.Node) -> bool:
    """Is it returned as it was between two writes?"""
    left = [given]
    while left:
        base = left.pop()
        writes = [user for user in base.users if _is_by_index(user) and user.args[0] is base]
        if any(write is not new and _is_returned(write) for write in writes):
            return True
        left += writes
    return False


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _reads_what_it_replaces(new: Any, given: fx.Node, written: list[fx.Node]) -> bool:
    """A cache that is written by index and no more is not meant, whoever reads it."""
    writes, node = [], new
    while _is_by_index(node):
        writes.append(node)
        node = node.args[0]
    if node is not given:
        return bool(written) and _reads([new], set(written))
    sources = [part for write in writes for part in write.all_input_nodes[1:]]
    return len(writes) > 1 and _reads(sources, set(writes))


def _reads(nodes: list[fx.Node], wanted: set[fx.Node]) -> bool:
    """In generated code: a product or an attention is over before anything is overwritten."""
    seen, left = set(nodes), list(nodes)
    while left:
        node = left.pop()
        if node in wanted:
            return True
        if getattr(node.target, "overloadpacket", None) in _CALLS or _is_ours(node):
            continue
        left += [one for one in node.all_input_nodes if one not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "kernel_dispatch"
