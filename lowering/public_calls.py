"""ATen calls of a graph that torch runs, as calls of torch's public functions.

`torch.ops.aten.add.Tensor(a, b)` goes through a parser for any schema; `torch.add(a, b)` through
one that was generated for it, and is at the same operator about a microsecond earlier. No table
says which function may stand for which operator: both are called as the graph calls them, up to
the dispatcher, and have to reach it with the same operator and the same arguments.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowering.graphs import hint

aten = torch.ops.aten
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def use(graph: fx.Graph) -> None:
    """Last of all: what reads the graph after this finds no ATen operators to know."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        stand_ins = _StandIns()
        for node in graph.nodes:
            if isinstance(node.target, OpOverload) and (found := _faster(node, stand_ins)):
                node.target, node.args, node.kwargs = found


def _faster(node: fx.Node, stand_ins: _StandIns) -> Call | None:
    """The first spelling that makes the same call."""
    assert isinstance(node.target, OpOverload)
    given = stand_ins.of((node.args, node.kwargs))
    wanted = None if given is None else _reached(node.target, *given)
    for target, args, kwargs in _spellings(node) if wanted is not None else ():
        values = stand_ins.of((args, kwargs))
        if values is not None and _alike(_reached(target, *values), wanted):
            return target, args, kwargs
    return None


def _spellings(node: fx.Node) -> Iterator[Call]:
    assert isinstance(node.target, OpOverload)
    if not node.all_input_nodes and node.kwargs.get("device") is None:
        return  # set_default_device() decides where public factories make tensors
    if (index := _as_index(node)) is not None:
        yield operator.getitem, (node.args[0], index), {}
    namespace, _, name = node.target._schema.name.partition("::")
    for function in _functions(name) if namespace == "aten" else ():
        yield function, node.args, dict(node.kwargs)


def _as_index(node: fx.Node) -> Any:
    """What stands in the brackets of `x[...]`, which is the fastest parser of all."""
    args: Sequence[Any] = node.args
    if node.target is aten.index.Tensor:
        return tuple(slice(None) if part is None else part for part in args[1])
    if node.target not in (aten.select.int, aten.slice.Tensor) or len(args) < 3:
        return None
    part = args[2] if node.target is aten.select.int else slice(*args[2:])
    dim = args[1]
    return part if dim == 0 else (*[slice(None)] * dim, part) if dim > 0 else (..., part)


@functools.cache
def _functions(name: str) -> tuple[Callable[..., Any], ...]:
    """Torch's own bindings of this name; those written in Python do more than one call."""
    homes = (torch, torch.Tensor, torch._C._nn)
    found = (getattr(home, name, None) for home in homes)
    return tuple(each for each in found if isinstance(each, _BINDINGS))


_BINDINGS = (types.BuiltinFunctionType, types.MethodDescriptorType)


class _StandIns:
    """Tensors without memory, of the sizes and dtypes that were traced; sizes as plain numbers."""

    def __init__(self) -> None:
        self._made: dict[fx.Node, Any] = {}

    def of(self, arguments: Any) -> Any:
        """The arguments with values for nodes; None where one is not known."""
        try:
            return fx.node.map_arg(arguments, self._value)
        except KeyError:
            return None

    def _value(self, node: fx.Node) -> Any:
        if node not in self._made:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                raise KeyError(value.layout)
            self._made[node] = _stand_in(value)
        return self._made[node]


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = (list(map(hint, each)) for each in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


class _Reached(Exception):
    """The first call that came to the dispatcher; it goes no further."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _Stop(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached((func, args, kwargs or {}))


def _reached(target: Callable[..., Any], args: Any, kwargs: Any) -> Call | None:
    # Below autograd, where composite operators arrive whole.
    try:
        with torch._C._AutoDispatchBelowAutograd(), _Stop():
            target(*args, **kwargs)
    except _Reached as reached:
        return reached.call
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError):
        return None  # it does not take these arguments
    return None


def _alike(one: Any, other: Any) -> bool:
    """The same tensors, and equal values of the same types."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, OpOverload):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
