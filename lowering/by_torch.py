"""Operators that torch's own kernels compute as a whole, since what Inductor generates is slower.

Functions are generated number by number where no vector has them: `erfinv` takes thirteen times as
long as torch's kernel, `i1e` six times, Bessel functions one and a half (torch 2.13, Zen 4). What
fusing one gains, a pass over memory, is less than that. So are short integers whatever is done with
them, what moves neighbours (padding and flips of rows), and what whole numbers of a short row give.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lowering import unrolled
from lowering.graphs import call, hint

aten = torch.ops.aten
prims = torch.ops.prims

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")


# What takes the same arguments, and does not go through Python when it is called.
_IN_CPP = {prims.rev.default: aten.flip.default}


@functools.cache
def whole(operator: Any) -> Any:
    """The same as an operator of ours, which Inductor does not take apart."""
    kernel = _IN_CPP.get(operator, operator)
    name = str(operator).replace(".", "_") + "_by_torch"
    _, _, signature = str(kernel._schema).partition("(")
    _library.define(f"{name}({signature}")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_dispatch::{name}", kernel, lib=_library)
    return getattr(torch.ops.kernel_dispatch, name).default


_REAL = (torch.float32, torch.float64)
_BYTES = (torch.uint8, torch.int8)
_SHORT = (torch.int16,)
_WHOLE_NUMBERS = (*_BYTES, *_SHORT, torch.int32, torch.int64)
FUNCTIONS: dict[Any, tuple[torch.dtype, ...]] = {
    aten.digamma.default: _REAL,
    aten.erf.default: (torch.float64,),
    aten.erfc.default: (torch.float32,),
    aten.erfinv.default: _REAL,
    aten.i0.default: _REAL,
    aten.polygamma.default: _REAL,
    aten.special_bessel_j0.default: _REAL,
    aten.special_bessel_j1.default: _REAL,
    aten.special_bessel_y0.default: _REAL,
    aten.special_bessel_y1.default: _REAL,
    aten.special_i0e.default: _REAL,
    aten.special_i1.default: _REAL,
    aten.special_i1e.default: _REAL,
    aten.special_modified_bessel_i0.default: _REAL,
    aten.special_modified_bessel_i1.default: _REAL,
    aten.special_modified_bessel_k0.default: _REAL,
    aten.special_modified_bessel_k1.default: _REAL,
    aten.special_ndtri.default: _REAL,
    aten.special_scaled_modified_bessel_k0.default: _REAL,
    aten.special_scaled_modified_bessel_k1.default: _REAL,
    aten.special_spherical_bessel_j0.default: _REAL,
    # Inductor has no vectors of short numbers at all.
    aten.abs.default: _SHORT,
    aten.add.Tensor: _SHORT,
    aten.bitwise_and.Tensor: _SHORT,
    aten.bitwise_not.default: _SHORT,
    aten.bitwise_or.Tensor: _SHORT,
    aten.bitwise_xor.Tensor: _SHORT,
    aten.cat.default: _SHORT,
    aten.clamp.default: _SHORT,
    aten.clamp_max.default: _SHORT,
    aten.clamp_min.default: _SHORT,
    aten.maximum.default: _SHORT,
    aten.minimum.default: _SHORT,
    aten.mul.Tensor: _SHORT,
    aten.neg.default: _SHORT,
    aten.sub.Tensor: _SHORT,
}
# Moved along the innermost dimension, numbers are read one by one; so are bytes in any case.
MOVES = (aten.constant_pad_nd.default, prims.rev.default)


class Reduction(NamedTuple):
    """Of which dtypes; and of which others over so few neighbours, where what Inductor does with a
    vector in the end takes longer than all the rest. Over fewer it is written out."""

    any_length: tuple[torch.dtype, ...]
    few: tuple[torch.dtype, ...]
    most: int = 128


REDUCTIONS = {
    aten.sum.dim_IntList: Reduction((*_BYTES, *_SHORT), _WHOLE_NUMBERS),
    aten.amax.default: Reduction(_SHORT, _WHOLE_NUMBERS),
    aten.amin.default: Reduction(_SHORT, _WHOLE_NUMBERS),
}
WHOLE = {function: whole(function) for function in (*FUNCTIONS, *MOVES, *REDUCTIONS)}
# All are made here: a graph out of a cache calls them without having been put right.
_WITH_A_NUMBER = {
    function: whole(function.overloadpacket.Scalar)
    for function in FUNCTIONS
    if str(function).endswith(".Tensor")
}
MANY = 1 << 11  # fewer cost less than a call does


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for function in WHOLE:
        for node in graph.find_nodes(op="call_function", target=function):
            if _takes_long(node):
                with graph.inserting_before(node):
                    new = call(graph, _for(node), *node.args, **node.kwargs)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


def _for(node: fx.Node) -> Any:
    """Torch's kernel for a tensor takes no number, which a traced graph has in its place."""
    target: Any = node.target
    numbers = isinstance(node.args[-1], (int, float)) and target in _WITH_A_NUMBER
    return _WITH_A_NUMBER[target] if numbers else WHOLE[target]


def _takes_long(node: fx.Node) -> bool:
    target: Any = node.target
    inputs: list[Any] = [one.meta.get("val") for one in node.all_input_nodes]
    values = [node.meta.get("val"), *inputs]
    if not all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values):
        return False
    if max(_count(value.shape) for value in values) < MANY:
        return False
    if target in _WITH_A_NUMBER and isinstance(node.args[0], (int, float)):
        return False
    if target in REDUCTIONS:
        kinds, dtype = REDUCTIONS[target], inputs[0].dtype
        dims = _reduced(node, inputs[0])
        count = _count(inputs[0].shape[dim] for dim in dims)
        if count <= unrolled.FEW:
            return False
        few = dtype in kinds.few and count <= kinds.most
        return dtype in kinds.any_length or (few and _are_neighbours(inputs[0], dims))
    if target in MOVES:
        return values[0].dtype in (*_BYTES, *_SHORT) or _moves_neighbours(node, inputs[0])
    return values[0].dtype in FUNCTIONS[target] and len({value.dtype for value in values}) == 1


def _count(sizes: Iterable[Any]) -> int:
    return math.prod(map(hint, sizes))


def _reduced(node: fx.Node, x: torch.Tensor) -> list[int]:
    dims: Any = node.args[1] if len(node.args) > 1 else None
    return list(dims) if dims else list(range(x.dim()))


def _are_neighbours(x: torch.Tensor, dims: Sequence[int]) -> bool:
    return any(_is_one(x.stride(dim)) and not _is_one(x.shape[dim]) for dim in dims)


def _moves_neighbours(node: fx.Node, x: torch.Tensor) -> bool:
    how: Any = node.args[1]
    if node.target is aten.constant_pad_nd.default:
        moved = [place for place, count in enumerate(how) if not isinstance(count, int) or count]
        how = {x.dim() - 1 - place // 2 for place in moved}
    return any(_is_one(x.stride(dim)) for dim in how)


def _is_one(number: Any) -> bool:
    """Symbols are not to be compared."""
    return isinstance(number, int) and number == 1
