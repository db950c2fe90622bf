"""Which tensors the nodes of a graph as Dynamo captured it write into, and who shares memory."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from lowering.regions.calls import is_foreign

_INPLACE = (
    "iadd isub imul itruediv ifloordiv imod imatmul ipow iand ior ixor ilshift irshift".split()
)
_INPLACE_OPERATORS = frozenset(getattr(operator, name) for name in _INPLACE)
_INPLACE_METHODS = frozenset(f"__{name}__" for name in _INPLACE)
# Norms write their running statistics, although their name does not end in an underscore: at these
# positions, when the argument at the third position says so. torch.batch_norm orders them anew.
_STATISTICS: dict[Any, tuple[int, int, int]] = {
    torch.nn.functional.batch_norm: (1, 2, 5),
    torch.nn.functional.instance_norm: (1, 2, 5),
    torch.batch_norm: (3, 4, 5),
    torch.instance_norm: (3, 4, 5),
}
_STATISTICS_NAMES = ("running_mean", "running_var", "training", "use_input_stats")
# With a largest norm they scale rows of the table where it lies.
_EMBEDDINGS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)


def graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph and, for higher-order ops, the graphs of their bodies."""
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            yield child.graph


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def storage(tensor: torch.Tensor) -> int | None:
    """The same number for fake tensors that share memory."""
    try:
        return int(StorageWeakRef(tensor.untyped_storage()).cdata)
    except (NotImplementedError, RuntimeError):  # subclasses and sparse tensors have none
        return None


def is_opaque(node: fx.Node) -> bool:
    """Does it call what is not torch's, or what has graphs of its own?"""
    if node.op != "call_function":
        return node.op == "call_module"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return False  # its schema tells
    return isinstance(target, torch._ops.HigherOrderOperator) or is_foreign(target)


def written_storages(module: fx.GraphModule) -> set[int | None]:
    """What the graph writes into, or may."""
    return storages(
        target
        for graph in graphs(module)
        for node in graph.nodes
        for target in maybe_written_by(node)
    )


def returned_storages(graph: fx.Graph) -> set[int | None]:
    """What the caller gets, it may write into."""
    return storages(given for end in graph.find_nodes(op="output") for given in end.all_input_nodes)


def storages(nodes: Iterable[fx.Node]) -> set[int | None]:
    values = (node.meta.get("example_value") for node in nodes)
    return {None, *(storage(one) for value in values for one in tensors(value))}


def maybe_written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into; of opaque ones that is not known."""
    return [*written_by(node), *(node.all_input_nodes if is_opaque(node) else ())]


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    if node.op not in ("call_function", "call_method"):
        return []
    candidates: list[Any] = [node.kwargs.get("out")]
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        positional = dict(zip((spec.name for spec in schema.arguments), node.args, strict=False))
        given = {**positional, **node.kwargs}
        written = (one for one in schema.arguments if one.alias_info and one.alias_info.is_write)
        candidates += [given.get(spec.name) for spec in written]
    elif _writes_by_schema(node.target):
        candidates += node.all_input_nodes  # which of them is not known before it is called
    elif node.target in _STATISTICS:
        candidates += _written_statistics(node)
    elif node.target in _EMBEDDINGS and _given(node, "max_norm") is not None:
        candidates.append(_given(node, "weight"))
    elif _is_in_place(node):
        candidates += list(node.args[:1])
    each = [
        one
        for candidate in candidates
        for one in (candidate if isinstance(candidate, (list, tuple)) else [candidate])
    ]
    return [one for one in each if isinstance(one, fx.Node)]


def _writes_by_schema(target: Any) -> bool:
    """Does one of an operator's overloads write into what is not its `out`?"""
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return False
    schemas = [getattr(target, name)._schema for name in target.overloads()]
    return any(
        spec.alias_info is not None and spec.alias_info.is_write and not spec.is_out
        for schema in schemas
        for spec in schema.arguments
    )


def _is_in_place(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))  # a user's function's counts as well
    return bool(
        (name.endswith("_") and not name.endswith("__"))
        or name in _INPLACE_METHODS
        or node.target is operator.setitem
        or node.target in _INPLACE_OPERATORS
        or _given(node, "inplace")
    )


def _written_statistics(node: fx.Node) -> list[Any]:
    mean, variance, flag = _STATISTICS[node.target]
    given = dict(enumerate(node.args))
    mean_name, variance_name, *flag_names = _STATISTICS_NAMES
    named = next((node.kwargs[name] for name in flag_names if name in node.kwargs), None)
    default = node.target is torch.nn.functional.instance_norm  # its use_input_stats is True
    if not given.get(flag, default if named is None else named):
        return []
    return [
        given.get(mean, node.kwargs.get(mean_name)),
        given.get(variance, node.kwargs.get(variance_name)),
    ]


def _given(node: fx.Node, name: str) -> Any:
    """An argument of a Python function, by position or by name; None where it has no such one."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = _names(node.target) if inspect.isfunction(node.target) else ()
    position = names.index(name) if name in names else len(node.args)
    return node.args[position] if position < len(node.args) else None


@functools.lru_cache(256)
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
