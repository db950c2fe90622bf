"""Calls in a graph as Dynamo captured it: their names, and their arguments by name."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

SAME_VALUE = ("to", "float", "type_as", "contiguous")  # unless it is another dtype
_OPERATORS = "torch._ops."
_OF_TORCH = ("torch", "_operator", "operator", "builtins", "math")


def name_of(node: Any) -> str:
    """The name of torch's or Python's function or method that a node calls; empty for other nodes:
    a user's own `softmax` that Dynamo may not look into is not torch's."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    if node.op == "call_function" and is_foreign(node.target):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def is_foreign(target: Any) -> bool:
    """Is it a function, or a registered operator, of somebody else than torch?"""
    module = _module_of(target)
    if module.startswith(_OPERATORS):
        return module.removeprefix(_OPERATORS) not in ("aten", "prims")
    return module.split(".")[0] not in _OF_TORCH


def _module_of(target: Any) -> str:
    """Where it was written: `functools.wraps` gives a function the module of what it wraps."""
    if isinstance(target, types.FunctionType):
        return str(target.__globals__.get("__name__", ""))
    owner = getattr(target, "__objclass__", target)  # of a method
    return getattr(owner, "__module__", None) or ""


def has_transforms(graph: fx.Graph) -> bool:
    """Does it hold parts of `torch.func` (vmap, jvp)?"""
    modules = (getattr(node.target, "__module__", None) or "" for node in graph.nodes)
    return any("functorch" in module for module in modules)


def arguments(node: fx.Node, names: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by its name, given or not."""
    given = dict(zip(names, node.args, strict=False))
    return {**dict.fromkeys(names), **defaults, **given, **node.kwargs}


def value_of(node: Any) -> Any:
    """The fake tensor that a node of a Dynamo graph stands for, or None."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def keeps_value(node: fx.Node) -> bool:
    """Its result is its first argument, or a copy of that."""
    if name_of(node) not in SAME_VALUE or not node.args:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    return before is not None and after is not None and before.dtype == after.dtype


def is_no_dropout(node: fx.Node) -> bool:
    if name_of(node) != "dropout":
        return False
    given = arguments(node, ("input", "p", "training"), {"p": 0.5, "training": True})
    return given["training"] is False or given["p"] == 0
