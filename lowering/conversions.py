"""Conversions between dtypes for which Inductor has no vectors, by way of another or by torch.

From halves to integers, doubles or the other halves it converts number by number, and back; from
bytes to long numbers too. That takes two to nine times eager's time (torch 2.13, Zen 4).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lowering import by_torch, outputs
from lowering.graphs import call, hint

prims = torch.ops.prims

_CONVERT = prims.convert_element_type.default
_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("convert(Tensor x, ScalarType dtype) -> Tensor")


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.aten._to_copy.default(x, dtype=dtype)


_library.impl("convert", converted, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::convert", converted, lib=_library)
_BY_TORCH = torch.ops.kernel_dispatch.convert.default
_HALVES = (torch.bfloat16, torch.float16)
_BYTES = (torch.uint8, torch.int8)
_LONG = (torch.int64, torch.float64)
_WIDE = (torch.int32, *_LONG)


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    _widen_short_numbers(graph)
    for node in graph.find_nodes(op="call_function", target=_CONVERT):
        given, wanted = (one.meta.get("val") for one in (node.args[0], node))
        if not isinstance(given, torch.Tensor) or not isinstance(wanted, torch.Tensor):
            continue  # between our own operators
        if given.device.type == "cpu" and math.prod(map(hint, wanted.shape)) >= by_torch.MANY:
            _convert(graph, node, given.dtype, wanted.dtype)


def _widen_short_numbers(graph: fx.Graph) -> None:
    """What reads them to compute something else reads them converted, as eager does; one loop that
    has a short number in it has no vectors at all."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.int16:
            continue
        if value.device.type != "cpu" or math.prod(map(hint, value.shape)) < by_torch.MANY:
            continue
        wider: dict[torch.dtype, fx.Node] = {}
        for reader in list(node.users):
            dtype = _computed_in(reader)
            if dtype is not None:
                if dtype not in wider:
                    with graph.inserting_before(reader):
                        wider[dtype] = call(graph, _BY_TORCH, node, dtype)
                reader.replace_input_with(node, wider[dtype])


def _computed_in(reader: fx.Node) -> torch.dtype | None:
    result = reader.meta.get("val")
    if not isinstance(result, torch.Tensor) or not outputs.is_pointwise(reader):
        return None
    if reader.target is _CONVERT or not (result.is_floating_point() or result.dtype is torch.bool):
        return None
    return torch.int32 if result.dtype is torch.bool else result.dtype


def _convert(graph: fx.Graph, node: fx.Node, given: torch.dtype, wanted: torch.dtype) -> None:
    steps = _steps(given, wanted)
    if not steps:
        return
    x: Any = node.args[0]
    with graph.inserting_before(node):
        for convert, dtype in steps:
            x = call(graph, convert, x, dtype)
    x.meta = {**node.meta, "val": x.meta["val"]}
    node.replace_all_uses_with(x)
    graph.erase_node(node)


def _steps(given: torch.dtype, wanted: torch.dtype) -> list[tuple[Any, torch.dtype]]:
    """Each exact, or rounded as eager does; none where Inductor knows the conversion."""
    between = torch.float32
    if torch.int16 in (given, wanted) and torch.bool not in (given, wanted):
        return [(_BY_TORCH, wanted)]
    if given is torch.bfloat16 and wanted in (torch.int32, torch.float64):
        return [(_BY_TORCH, wanted)]
    if given in _HALVES and (wanted in _WIDE or wanted in _HALVES):
        return [(_BY_TORCH, between), (_CONVERT, wanted)]
    if given in _WIDE and wanted in _HALVES:
        return [(_CONVERT, between), (_BY_TORCH, wanted)]
    if given in _BYTES and wanted in _LONG:
        return [(_CONVERT, torch.int32), (_CONVERT, wanted)]
    return []
