"""Linear layers of the same input in one call: `openmp_linears`, for several of `openmp_linear`.

Query, key and value, or the two halves of a gated MLP: threads then wait for each other once
instead of after each of them, small layers cost one call, and a factor that only the layer beside
it reads is never written to memory. Each keeps its own packed weight.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

# Arguments of `openmp_linear`.
_TENSORS = slice(1, 6)
_TIMES = 4
_ACT, _A, _B, _IN_OUT = range(6, 10)
_IN_OUT_BIT = 16  # of `openmp_linears`, above the bits of the tensors behind the weight

# Who computes several, and who a layer and its gate.
_TOGETHER = {
    "kernel_dispatch::openmp_linear": ("openmp_linears", "openmp_gated_linear"),
    "kernel_dispatch::openmp_linear_half": ("openmp_linears_half", "openmp_gated_linear_half"),
}
# What stands between query, key and value where attention is spelled out.
_BETWEEN = ("_product", "_attention", "_softmax")


def join(graph: fx.Graph) -> int:
    """Replace every group; returns how many layers are in one."""
    joined = 0
    for group in list(_groups(graph)):
        gates = _gates(group)
        results = [node for node in group if node not in gates.values()]
        with graph.inserting_before(group[0]):
            single = len(results) == 1
            call = graph.call_function(_operator(group[0], single), _arguments(group, gates))
            call.meta = {key: value for key, value in group[0].meta.items() if key != "val"}
            for index, node in enumerate(results):
                new = call if single else graph.call_function(operator.getitem, (call, index))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
        for node in reversed(group):
            graph.erase_node(node)
        joined += len(group)
    return joined


def _operator(node: fx.Node, single: bool) -> Any:
    return getattr(torch.ops.kernel_dispatch, _TOGETHER[_name(node)][single]).default


def _name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Layers of one input that can be computed where the first of them is."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for first, *others in _runs(graph):
        group = [first]
        for node in others:
            gate = _times(node) if _is_gate(_times(node), node, group) else None
            if all(order[part] < order[first] for part in _reads(node) if part is not gate):
                group.append(node)
        if len(group) > 1:
            yield group


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Layers of one input with no layer of another input between them: what was computed long
    before it is read would have to be kept, and would be out of the caches by then."""
    run: list[fx.Node] = []
    of_run: Hashable = None
    for node in graph.nodes:
        if not _name(node).startswith("kernel_dispatch::") or _name(node).endswith(_BETWEEN):
            continue
        own = (node.target, _value(node.args[0])) if _name(node) in _TOGETHER else None
        if own != of_run and run:
            yield run
            run = []
        of_run = own
        if own is not None:
            run.append(node)
    if run:
        yield run


def _value(node: Any) -> Hashable:
    """What a conversion gives is the same value as what another of its kind gives."""
    converts = node.target is torch.ops.prims.convert_element_type.default
    return (node.target, *node.args) if converts else node


def _reads(node: fx.Node) -> list[Any]:
    """All but the input, which the first of a group reads as well."""
    return [part for part in node.args[_TENSORS] if part is not None]


def _times(node: fx.Node) -> Any:
    return node.args[_TIMES]


def _is_gate(gate: Any, node: fx.Node, group: Sequence[fx.Node]) -> bool:
    """Is it of this group, is nothing but a factor, and has no gate itself?"""
    if gate not in group or _times(gate) in group:
        return False
    return list(gate.users) == [node] and node.args.count(gate) == 1


def _gates(group: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """A gated layer -> the layer that it is multiplied by."""
    return {node: _times(node) for node in group if _times(node) in group}


def _arguments(group: Sequence[fx.Node], gates: dict[fx.Node, fx.Node]) -> tuple[Any, ...]:
    tensors: list[Any] = []
    integers: list[int] = []
    numbers: list[Any] = []
    for node in group:
        args: Any = node.args
        gate = gates.get(node)
        weight, *beside = (None if part is gate else part for part in args[_TENSORS])
        tensors += [weight, *(part for part in beside if part is not None)]
        bits = sum(1 << place for place, part in enumerate(beside) if part is not None)
        bits += _IN_OUT_BIT * int(args[_IN_OUT])
        integers += [args[_ACT], bits, -1 if gate is None else group.index(gate)]
        numbers += [args[_A], args[_B]]
    return (group[0].args[0], tensors, integers, numbers if any(numbers) else [])


def weights(tensors: Sequence[Any], integers: Sequence[int]) -> list[tuple[Any, bool, int]]:
    """Of each layer: its weight, whether that is (in, out), and its gate or -1."""
    found = []
    left = iter(tensors)
    for _, bits, gate in zip(*[iter(integers)] * 3, strict=True):
        found.append((next(left), bool(bits & _IN_OUT_BIT), gate))
        for _ in range((bits % _IN_OUT_BIT).bit_count()):
            next(left)
    return found
