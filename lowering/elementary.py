"""Functions whose version in generated code is slow or inexact, made of others, which fuse as well.

Inductor's hyperbolic tangent on x86 is Sleef's, to one unit in the last place: it takes four times
as long as eager's (torch 2.13). The one here is within three.

Others of its functions (on a CPU) lose what eager keeps: `expm1` is `exp(x) - 1`, of which nothing
is left near zero, and so are ELU, SELU and CELU; `atanh` and `erf` are exact beside one only;
`acosh` and `asinh` square, which is infinite from 1e19 on; and `x % y` and `x // y` round a
quotient, which is off by whole steps where it is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from lowering import machine
from lowering.graphs import call

aten = torch.ops.aten

# tanh(x) = x + x^3 p(x^2) below the limit: a minimax fit, and the one of native/vec_math.h.
_SMALL = 0.55
_TERMS = [
    float.fromhex(term)
    for term in ("-0x1.9454f2p-8 0x1.5811f6p-6 -0x1.b905c4p-5 0x1.110c5ep-3 -0x1.555548p-2".split())
]
# erf(x) = x p(x^2) near zero: the first terms of its series, by 2 / sqrt(pi).
_NEAR = 0.5
_SERIES = [1.1283791670955126 * term for term in (-1 / 1320, 1 / 216, -1 / 42, 1 / 10, -1 / 3, 1)]

# From here on sqrt(x^2 - 1), sqrt(x^2 + 1) and x are one number.
_ALL_BUT_SQUARE = 1e9

_FLOAT = (torch.float32,)
_REAL = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)
_CONVERT = torch.ops.prims.convert_element_type.default


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for target, (dtypes, make) in _FORMULAS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if _computes(node, dtypes) and _pays(node):
                with graph.inserting_before(node):
                    new = make(graph, *node.args[:2])
                new.meta = {**node.meta, "val": new.meta["val"]}
                node.replace_all_uses_with(new)
                graph.erase_node(node)


def _computes(node: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """All in one of these dtypes, on a CPU, what is given and what comes of it."""
    values = [one.meta["val"] for one in (node, *node.all_input_nodes)]
    return (
        all(isinstance(value, torch.Tensor) for value in values)
        and {value.device.type for value in values} == {"cpu"}
        and len({value.dtype for value in values}) == 1
        and values[0].dtype in dtypes
    )


def _pays(node: fx.Node) -> bool:
    if node.target is aten.tanh.default:
        return "avx2" in machine.cpu().isa
    if node.target is aten.erf.default:  # a GELU adds one: what is lost near zero does not show
        return not all(u.target is aten.add.Tensor and u.args[1] == 1 for u in node.users)
    if node.target is aten.div.Tensor_mode:
        return node.kwargs.get("rounding_mode") == "floor"
    return True


def _tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    def do(target: Any, *args: Any) -> fx.Node:
        return call(graph, target, *args)

    size, square = do(aten.abs.default, x), do(aten.mul.Tensor, x, x)
    small = do(aten.mul.Tensor, _polynomial(graph, square, _TERMS), square)
    small = do(aten.add.Tensor, do(aten.mul.Tensor, small, x), x)
    # (1 - e) / (1 + e) has no difference of numbers that are almost the same from there on.
    e = do(aten.exp.default, do(aten.mul.Tensor, size, -2.0))
    below = do(aten.sub.Tensor, e, 1.0)
    large = do(aten.div.Tensor, below, do(aten.add.Tensor, e, 1.0))
    signed = do(aten.where.self, do(aten.lt.Scalar, x, 0.0), large, do(aten.neg.default, large))
    return do(aten.where.self, do(aten.lt.Scalar, size, _SMALL), small, signed)


def _polynomial(graph: fx.Graph, x: fx.Node, terms: list[float]) -> fx.Node:
    """By Horner's rule; the term of the highest power comes first."""
    value = call(graph, aten.add.Tensor, call(graph, aten.mul.Tensor, x, terms[0]), terms[1])
    for term in terms[2:]:
        value = call(graph, aten.add.Tensor, call(graph, aten.mul.Tensor, value, x), term)
    return value


def _expm1(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """tanh(x / 2) (exp(x) + 1)"""
    half = call(graph, aten.mul.Tensor, x, 0.5)
    single = x.meta["val"].dtype is torch.float32
    tanh = _tanh(graph, half) if single else call(graph, aten.tanh.default, half)
    above = call(graph, aten.add.Tensor, call(graph, aten.exp.default, x), 1.0)
    return call(graph, aten.mul.Tensor, tanh, above)


def _atanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """log1p(2 s / (1 - s)) / 2 of the size s, with the sign of x"""
    size = call(graph, aten.abs.default, x)
    below = call(graph, aten.add.Tensor, call(graph, aten.neg.default, size), 1.0)
    ratio = call(graph, aten.div.Tensor, call(graph, aten.mul.Tensor, size, 2.0), below)
    value = call(graph, aten.mul.Tensor, call(graph, aten.log1p.default, ratio), 0.5)
    negative = call(graph, aten.lt.Scalar, x, 0.0)
    return call(graph, aten.where.self, negative, call(graph, aten.neg.default, value), value)


def _acosh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    large = call(graph, aten.add.Tensor, call(graph, aten.log.default, x), math.log(2.0))
    is_large = call(graph, aten.gt.Scalar, x, _ALL_BUT_SQUARE)
    return call(graph, aten.where.self, is_large, large, call(graph, aten.acosh.default, x))


def _asinh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    size = call(graph, aten.abs.default, x)
    large = call(graph, aten.add.Tensor, call(graph, aten.log.default, size), math.log(2.0))
    signed = call(graph, aten.copysign.Tensor, large, x)
    is_large = call(graph, aten.gt.Scalar, size, _ALL_BUT_SQUARE)
    return call(graph, aten.where.self, is_large, signed, call(graph, aten.asinh.default, x))


def _erf(graph: fx.Graph, x: fx.Node) -> fx.Node:
    square = call(graph, aten.mul.Tensor, x, x)
    near = call(graph, aten.mul.Tensor, _polynomial(graph, square, _SERIES), x)
    is_near = call(graph, aten.lt.Scalar, call(graph, aten.abs.default, x), _NEAR)
    return call(graph, aten.where.self, is_near, near, call(graph, aten.erf.default, x))


def _remainder(graph: fx.Graph, x: fx.Node, y: Any) -> fx.Node:
    """The exact one of C, moved by one step where its sign is not that of `y`."""
    y = _as_tensor(graph, y, x)
    rest, moved = _rest(graph, x, y)
    return call(graph, aten.where.self, moved, call(graph, aten.add.Tensor, rest, y), rest)


def _floor_division(graph: fx.Graph, x: fx.Node, y: Any) -> fx.Node:
    """What is left without the remainder, in whole steps; x / y where y is zero."""
    dtype = x.meta["val"].dtype
    if dtype in _HALVES:
        wide = [call(graph, _CONVERT, one, torch.float32) for one in (x, _as_tensor(graph, y, x))]
        return call(graph, _CONVERT, _floor_division(graph, *wide), dtype)
    y = _as_tensor(graph, y, x)
    rest, moved = _rest(graph, x, y)
    quotient = call(graph, aten.div.Tensor, x, y)
    steps = call(graph, aten.div.Tensor, call(graph, aten.sub.Tensor, x, rest), y)
    less = call(graph, aten.sub.Tensor, steps, 1.0)
    whole = _nearest(graph, call(graph, aten.where.self, moved, less, steps))
    signed = call(graph, aten.copysign.Tensor, whole, quotient)
    none = call(graph, aten.eq.Scalar, whole, 0.0)
    whole = call(graph, aten.where.self, none, signed, whole)
    return call(graph, aten.where.self, call(graph, aten.eq.Scalar, y, 0.0), quotient, whole)


def _nearest(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Downwards from the middle."""
    below = call(graph, aten.floor.default, x)
    past = call(graph, aten.gt.Scalar, call(graph, aten.sub.Tensor, x, below), 0.5)
    return call(graph, aten.where.self, past, call(graph, aten.add.Tensor, below, 1.0), below)


def _rest(graph: fx.Graph, x: fx.Node, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The remainder with the sign of `x`; is that another sign than the one of `y`?"""
    rest = call(graph, aten.fmod.Tensor, x, y)
    signs = (call(graph, aten.lt.Scalar, one, 0.0) for one in (rest, y))
    there = call(graph, aten.ne.Scalar, rest, 0.0)
    other = call(graph, aten.bitwise_xor.Tensor, *signs)
    return rest, call(graph, aten.bitwise_and.Tensor, there, other)


def _as_tensor(graph: fx.Graph, y: Any, like: fx.Node) -> fx.Node:
    if isinstance(y, fx.Node):
        return y
    value = like.meta["val"]
    return call(graph, aten.full.default, [], y, dtype=value.dtype, device=value.device)


_FORMULAS: Mapping[Any, tuple[tuple[torch.dtype, ...], Callable[..., fx.Node]]] = {
    aten.expm1.default: (_REAL, _expm1),
    aten.tanh.default: (_FLOAT, _tanh),
    aten.atanh.default: (_REAL, _atanh),
    aten.acosh.default: (_REAL, _acosh),
    aten.asinh.default: (_REAL, _asinh),
    aten.erf.default: (_FLOAT, _erf),
    aten.remainder.Tensor: (_REAL, _remainder),
    aten.remainder.Scalar: (_REAL, _remainder),
    aten.div.Tensor_mode: ((*_REAL, *_HALVES), _floor_division),
}
