"""The region of values that depend on parameters, buffers and constants alone.

Found where Dynamo sees them, so that nothing below knows of it: weight norm, merged adapters,
projections of position embeddings, tables of relative positions.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowering import purity, writing
from lowering.regions.calls import has_transforms, name_of, value_of

# Less is computed faster than its weights are asked whether they have changed.
_LEAST_WORK = 4096  # numbers read and written
_ROWS = ("flatten", "view", "reshape")
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
# A larger value must not be much larger than what it is made from: compressed weights stay so.
_SMALL_BYTES = 1 << 20
_GROWTH = 1.5


@dataclass(frozen=True)
class Found:
    """`values`: what the rest of the graph wants of what depends on weights alone."""

    values: tuple[fx.Node, ...]
    cones: tuple[fx.Node, ...]  # all that they are computed from, and they, without the weights
    weights: tuple[fx.Node, ...]  # the placeholders that they are computed from
    instead_of: tuple[str, ...]  # for the report: what computes each value

    def is_of_a_weight(self, value: fx.Node) -> bool:
        """Is it a weight's own memory, read in another form?"""
        memory = {writing.storage(value_of(weight)) for weight in self.weights}
        return writing.storage(value_of(value)) in memory


@dataclass(frozen=True)
class _Constant:
    """A node that depends on weights alone."""

    weights: frozenset[fx.Node]
    moves_only: bool
    work: int  # of all before it too; counts what two paths share twice, which does no harm


def find(module: fx.GraphModule, weights: Collection[str]) -> Found | None:
    graph = module.graph
    candidates = {} if has_transforms(graph) else _candidates(graph, weights)
    if not candidates:
        return None
    written = writing.written_storages(module)
    constants = _constants(graph, candidates, written)
    values = _values(
        graph, constants, written | writing.returned_storages(graph), _bytes(graph, weights)
    )
    if not values:
        return None
    return _found(graph, constants, values)


def _found(graph: fx.Graph, constants: dict[fx.Node, _Constant], values: list[fx.Node]) -> Found:
    cone: set[fx.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop()
        if node not in cone:
            cone.add(node)
            waiting += node.all_input_nodes
    used = [node for node in graph.nodes if node in cone]
    return Found(
        values=tuple(values),
        cones=tuple(node for node in used if node.op != "placeholder"),
        weights=tuple(node for node in used if node.op == "placeholder"),
        instead_of=tuple(_name(_computing(node, constants) or node) for node in values),
    )


def _name(node: fx.Node | None) -> str:
    return name_of(node.args[0] if node is not None and _is_part(node) else node)


# --- which nodes depend on weights alone ---------------------------------------------------------


def _candidates(graph: fx.Graph, weights: Collection[str]) -> dict[fx.Node, Any]:
    """Nodes that may, by what they are made from: more than do. Cheap, as most graphs end here."""
    found: dict[fx.Node, Any] = {}
    autocasts, real = 0, False
    for node in graph.nodes:
        autocasts += {"_enter_autocast": 1, "_exit_autocast": -1}.get(name_of(node), 0)
        if node.op == "placeholder":
            takes = node.name in weights
        else:
            takes = autocasts == 0 and not writing.is_opaque(node) and _all_in(found, node)
        if takes and _is_plain(node.meta.get("example_value")):
            found[node] = None
            real = real or (node.op != "placeholder" and bool(node.all_input_nodes))
    return found if real else {}


def _all_in(found: Collection[fx.Node], node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and all(
        given in found for given in node.all_input_nodes
    )


def _is_plain(value: Any) -> bool:
    """Fake tensors of the CPU with fixed sizes, and nothing else."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_plain, value))
    return (
        type(value) is FakeTensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and all(isinstance(size, int) for size in value.shape)
    )


def _constants(
    graph: fx.Graph, candidates: Collection[fx.Node], written: Collection[int | None]
) -> dict[fx.Node, _Constant]:
    """Those of the candidates that are never written into, and may be computed at any time."""
    constants: dict[fx.Node, _Constant] = {}
    for node in (node for node in graph.nodes if node in candidates):
        value = node.meta["example_value"]
        if any(_changes(one, written) for one in writing.tensors(value)):
            continue
        if node.op == "placeholder":
            constants[node] = _Constant(frozenset({node}), True, 0)
        elif all(given in constants for given in node.all_input_nodes):
            known = _constant(node, constants, _mode(value))
            if known is not None:
                constants[node] = known
    return constants


def _changes(value: torch.Tensor, written: Collection[int | None]) -> bool:
    """Names tell of writes, and so do the version counters of the tensors that Dynamo traced."""
    touched = not value.is_inference() and value._version > 0
    return touched or writing.storage(value) in written


def _constant(
    node: fx.Node, constants: dict[fx.Node, _Constant], mode: FakeTensorMode
) -> _Constant | None:
    before = [constants[given] for given in node.all_input_nodes]
    weights = frozenset[fx.Node]().union(*(one.weights for one in before))
    work = sum(one.work for one in before)
    if _is_part(node):  # of several results: as much a computation as what gave them
        return _Constant(weights, before[0].moves_only, work)
    steps = purity.steps(node, mode)
    return None if steps is None else _Constant(weights, steps.moves_only, work + steps.elements)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and value_of(node.args[0]) is None


def _mode(value: Any) -> FakeTensorMode:
    mode: FakeTensorMode = writing.tensors(value)[0].fake_mode  # type: ignore[attr-defined]
    return mode


# --- which of them are worth to be kept ----------------------------------------------------------


def _values(
    graph: fx.Graph,
    constants: dict[fx.Node, _Constant],
    shared: Collection[int | None],
    most_bytes: int,
) -> list[fx.Node]:
    """From the end of the graph on: what is not worth it stays, and needs what is before it."""
    values: list[fx.Node] = []
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in constants and node not in needed:
            continue
        if (
            node in constants
            and _is_worth_it(node, constants, shared)
            and ((size := _size(node)) <= most_bytes or _is_merged(node))
        ):
            values.append(node)
            most_bytes -= size
        else:
            needed.update(node.all_input_nodes)
    return values[::-1]


def _is_worth_it(
    node: fx.Node, constants: dict[fx.Node, _Constant], shared: Collection[int | None]
) -> bool:
    value, known = value_of(node), constants[node]
    if value is None or not known.weights:
        return False
    if _is_matrix_of_kernel(node, value):
        return writing.storage(value) not in shared
    if known.work < _LEAST_WORK and not _is_weight(node):
        return False
    made_from = sum(map(_size, known.weights))
    if _size(node) > max(_SMALL_BYTES, _GROWTH * made_from):
        return False
    return writing.storage(value) not in shared and _computing(node, constants) is not None


def _is_weight(node: fx.Node) -> bool:
    """Of a layer, which can pack what stays."""
    return any(name_of(user) in _LAYERS and node in user.args[1:3] for user in node.users)


def _is_matrix_of_kernel(node: fx.Node, value: torch.Tensor) -> bool:
    """The rows of a weight of more dimensions, read as a layer's weight: kept, for it costs nothing
    and can be packed then."""
    source: Any = node.args[0] if node.args else None
    kernel = value_of(source) if name_of(node) in _ROWS else None
    return (
        kernel is not None
        and source.op == "placeholder"
        and value.dim() == 2 < kernel.dim()
        and value.is_contiguous()
        and writing.storage(value) == writing.storage(kernel)
        and _is_weight(node)
    )


def _is_merged(node: fx.Node) -> bool:
    """A part of what another pass wrote, which counts on it that it is computed ahead."""
    maker: Any = node.args[0] if _is_part(node) else node
    return isinstance(maker.target, torch._ops.OpOverload) and maker.target.name() in purity.OURS


def _computing(node: fx.Node, constants: dict[fx.Node, _Constant]) -> fx.Node | None:
    """Views and copies behind a computation go with it where nobody else reads what lies between
    and they make it no larger. None: they are of a weight itself, or stay behind what is kept."""
    while constants[node].moves_only:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or len(before.users) > 1:
            return None
        if before.op == "placeholder" or _size(node) > _size(before):
            return None
        node = before
    return node


def _bytes(graph: fx.Graph, weights: Collection[str]) -> int:
    return sum(_size(node) for node in graph.find_nodes(op="placeholder") if node.name in weights)


def _size(node: fx.Node) -> int:
    values = writing.tensors(node.meta.get("example_value"))
    return sum(value.numel() * value.dtype.itemsize for value in values)
