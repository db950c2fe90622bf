"""Operators that torch's own kernels compute as a whole, since what Inductor generates is slower.

Functions are generated number by number where no vector has them: `erfinv` takes thirteen times as
long as torch's kernel, `i1e` six times, Bessel functions one and a half (torch 2.13, Zen 4). What
fusing one gains, a pass over memory, is less than that. Bytes are padded number by number as well.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from lowering.graphs import call, hint

aten = torch.ops.aten
prims = torch.ops.prims

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")


@functools.cache
def whole(operator: Any) -> Any:
    """The same as an operator of ours, which Inductor does not take apart."""
    name = str(operator).replace(".", "_") + "_by_torch"
    _, _, signature = str(operator._schema).partition("(")
    _library.define(f"{name}({signature}")
    _library.impl(name, operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_dispatch::{name}", operator, lib=_library)
    return getattr(torch.ops.kernel_dispatch, name).default


_REAL = (torch.float32, torch.float64)
_BYTES = (torch.uint8, torch.int8)
FUNCTIONS: dict[Any, tuple[torch.dtype, ...]] = {
    aten.constant_pad_nd.default: _BYTES,
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
    prims.rev.default: _BYTES,
}
WHOLE = {function: whole(function) for function in FUNCTIONS}
_MANY = 1 << 11  # fewer cost less than a call does


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for function, dtypes in FUNCTIONS.items():
        for node in graph.find_nodes(op="call_function", target=function):
            if _takes_long(node, dtypes):
                with graph.inserting_before(node):
                    new = call(graph, WHOLE[function], *node.args, **node.kwargs)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


def _takes_long(node: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    values: list[Any] = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return (
        all(isinstance(value, torch.Tensor) for value in values)
        and all(value.dtype in dtypes and value.device.type == "cpu" for value in values)
        and len({value.dtype for value in values}) == 1
        and math.prod(hint(size) for size in values[0].shape) >= _MANY
    )
