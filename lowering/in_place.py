"""Slices that a graph writes are written where they lie, instead of into a copy of the whole.

AOTAutograd makes a graph functional: `x[:, a:b] = y` becomes a new tensor, with all of `x` copied.
Inductor undoes that in its own graphs. A graph that runs op by op pays for each copy: attention in
windows (Longformer) took 1.3 times as long as in eager. Here a write is put back where nobody reads
what it overwrites.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# What makes a new tensor out of one with a part replaced -> the view that the part is.
_PARTS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
# The same by numbers or masks -> what does it in place.
_ENTRIES: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_ALIASES = (aten._unsafe_view.default, operator.getitem)  # although no schema says so


def put_back(graph: fx.Graph) -> None:
    """Of every write into memory of the graph's own, or an input's, that is not read again."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if node.target in _PARTS or node.target in _ENTRIES]
    overwritten: set[fx.Node] = set()
    for node in writes:
        if _may_overwrite(node, order):
            _write(graph, node, overwritten)
    if overwritten:
        graph.eliminate_dead_code()


def _may_overwrite(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    base: Any = node.args[0]
    memory = _memory(base)
    if memory is None or not _lie_alike(base, node):
        return False
    written_back = _written_back(memory)
    if memory.op == "placeholder" and (written_back is None or _is_returned(node)):
        return False
    others = [given for given in node.all_input_nodes if given is not base]
    if node.target in _ENTRIES and any(_may_lie_in(memory, given) for given in others):
        return False
    readers = (user for user in _readers(memory) if user not in (node, written_back))
    return all(order.get(reader, -1) < order[node] for reader in readers)


def _memory(node: fx.Node) -> fx.Node | None:
    """What made the memory that this is a view of: an operator of torch's, or the caller."""
    while _is_view(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    target = node.target
    by_torch = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    is_known = node.op == "placeholder" or (by_torch and not _is_view(node))
    return node if is_known else None


def _written_back(memory: fx.Node) -> fx.Node | None:
    """Where an input gets its new value, at the end of the graph, if that is no part of the old."""
    for user in memory.users:
        if user.target is aten.copy_.default and user.args[0] is memory:
            value: Any = user.args[1]
            return None if _may_lie_in(memory, value) else user
    return None


def _is_returned(node: fx.Node) -> bool:
    """The caller would get the input itself, where a tensor of its own is promised."""
    return any(reader.op == "output" for reader in _readers(node))


def _is_view(node: fx.Node) -> bool:
    """Or may it be one? That is so of all that has no schema, too."""
    if node.target in _ALIASES or not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "output"
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _readers(node: fx.Node) -> set[fx.Node]:
    """Of its memory: its users, and those of what may be a view of it."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = set(waiting.pop().users) - found
        found |= new
        waiting += filter(_is_view, new)
    return found


def _may_lie_in(memory: fx.Node, node: fx.Node) -> bool:
    return node is memory or (_is_view(node) and node in _readers(memory))


def _write(graph: fx.Graph, node: fx.Node, overwritten: set[fx.Node]) -> None:
    base: Any = node.args[0]
    memory = _memory(base)
    assert memory is not None, "it was looked for before"
    with graph.inserting_before(node):
        if node.target in _ENTRIES:
            graph.call_function(_ENTRIES[node.target], node.args, node.kwargs)
        else:
            # Only what nobody has overwritten since may be read later than the graph reads it.
            late = not any(_may_lie_in(one, given) for one in overwritten for given in _given(node))
            _write_part(graph, base, node, memory, late)
    overwritten.add(memory)
    node.replace_all_uses_with(base)
    graph.erase_node(node)
    for user in list(base.users):
        if user.target is aten.copy_.default and user.args[:2] == (base, base):
            user.replace_all_uses_with(base)
            graph.erase_node(user)


def _given(node: Any) -> Iterator[fx.Node]:
    """The values that end in a part, from the part itself on to what the last one is a copy of."""
    while node.target in (*_PARTS, aten.copy.default):
        node = node.args[1]
        yield node


def _write_part(
    graph: fx.Graph, whole: fx.Node, node: fx.Node, memory: fx.Node, late: bool
) -> None:
    """`node` is `whole` with a part replaced; the part may itself be one with a part replaced."""
    base, given, *where = node.args
    value: Any = given
    part = graph.call_function(_PARTS[node.target], (whole, *where), node.kwargs)
    if late and _is_part_of(value, base, where, node):
        _write_part(graph, part, value, memory, late)
        return
    copied = value.args[1] if late and value.target is aten.copy.default else value
    if not _may_lie_in(memory, copied):
        value = copied
    if _may_lie_in(memory, value):  # what is read is to be read before it is written
        value = graph.call_function(aten.clone.default, (value,))
    graph.call_function(aten.copy_.default, (part, value))


def _is_part_of(value: fx.Node, base: Any, where: list[Any], node: fx.Node) -> bool:
    """Is it that same part of `base`, with a part of its own replaced, for this one reader?"""
    if value.target not in _PARTS or list(value.users) != [node]:
        return False
    of: Any = value.args[0]
    same = of.target is _PARTS[node.target] and (*of.args,) == (base, *where)
    return bool(same and of.kwargs == node.kwargs)
