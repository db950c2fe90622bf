"""The int8_linear region: a linear layer whose weight is bytes, as quantised models have them.

    int(x @ weight.T) * row_scale * scale + bias      x quantised in every call: bytes as well
    (x @ float(weight).T) * scale + bias              floats or halves: weights alone are bytes
    x @ (float(weight) * scale).T + bias              the same, spelled by hand

The scale is one number for each output, the row scale one for each row of x. The sums of bytes are
exact; behind them everything is computed in floats and rounded once, however often the model does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, only_user, same_sizes
from lowering.profile import gemm_shape
from lowering.regions.flattened import in_full_rank
from lowering.regions.weights import Stays, transposed_from

aten = torch.ops.aten
prims = torch.ops.prims

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Int8Linear:
    """One match; `node` is its result, of as many dimensions as `input` has."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node  # a graph input of bytes that does not change from call to call
    in_out: bool = False  # is it stored as (in, out)? else as (out, in)
    row_scale: fx.Node | None = None
    scale: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def of_bytes(self) -> bool:
        """Are both operands bytes?"""
        return bool(self.input.meta["val"].dtype is torch.int8)

    @property
    def rows(self) -> int:
        return math.prod(hint(size) for size in self.input.meta["val"].shape[:-1])

    @property
    def outputs(self) -> Any:
        return self.weight.meta["val"].shape[1 if self.in_out else 0]

    def work(self) -> Work:
        return Work(
            region="int8_linear",
            dtypes=frozenset({str(self.input.meta["val"].dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * self.rows * self.weight.meta["val"].numel(),
            dynamic=any(not isinstance(size, int) for size in self.node.meta["val"].shape),
            shape_class=gemm_shape(self.rows),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Int8Linear]:
    for node in list(graph.nodes):
        match = _core(node, stays)
        whole = None if match is None else _with_what_follows(match)
        if whole is not None and whole.weight.meta["val"].numel():
            yield whole


def _core(node: fx.Node, stays: Stays) -> Int8Linear | None:
    """The product itself, with what its weight was multiplied by before."""
    given: Any = node.args
    if node.target is aten._int_mm.default:
        path = _to_bytes(given[1])
        if path is None or not _is_bytes(path.weight, stays):
            return None
        return Int8Linear(node, given[0], path.weight, in_out=not path.turned)
    if node.target is aten._weight_int8pack_mm.default:
        taken = _is_bytes(given[1], stays) and _is_float(given[0])
        return Int8Linear(node, given[0], given[1], scale=given[2]) if taken else None
    bias = None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, *given = given
    elif node.target is not aten.mm.default:
        return None
    match = _of_widened(node, given[0], given[1], stays)
    if match is None or bias is None:
        return match
    return replace(match, bias=bias) if _is_for_columns(bias, match) else None


def _of_widened(node: fx.Node, x: fx.Node, right: fx.Node, stays: Stays) -> Int8Linear | None:
    """`right` is bytes that became floats, transposed or not, times a factor for each output."""
    path = _to_bytes(right)
    if path is None or not _is_bytes(path.weight, stays) or not _is_float(x):
        return None
    match = Int8Linear(node, x, path.weight, in_out=not path.turned)
    if path.scale is None:
        return match
    fits = [(match.outputs, 1)] if path.scaled_rows else [(1, match.outputs), (match.outputs,)]
    sizes = path.scale.meta["val"].shape
    return replace(match, scale=path.scale) if any(same_sizes(sizes, one) for one in fits) else None


@dataclass(frozen=True)
class _Path:
    """From a matrix to the bytes in memory that it is made of."""

    weight: fx.Node
    turned: bool = False  # an odd number of transposes
    scale: fx.Node | None = None
    scaled_rows: bool = False  # was it multiplied where the rows are one output's?


def _to_bytes(node: Any, turned: bool = False) -> _Path | None:
    """By way of conversions between floats, which all hold bytes exactly."""
    if not isinstance(node, fx.Node):
        return None
    if _dtype(node) is torch.int8:
        plain = transposed_from(node)
        return _Path(node, turned) if plain is None else _to_bytes(plain, not turned)
    if (plain := transposed_from(node)) is not None:
        return _to_bytes(plain, not turned)
    if _converts(node) and _is_float(node):
        return _to_bytes(node.args[0], turned)
    if node.target is not aten.mul.Tensor or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        path = _to_bytes(one, turned) if isinstance(other, fx.Node) and _is_float(other) else None
        if path is not None and path.scale is None and isinstance(other, fx.Node):
            return replace(path, scale=other, scaled_rows=turned)
    return None


def _dtype(node: fx.Node) -> torch.dtype | None:
    """None where nothing is known of a value, as between the operators of another region."""
    return getattr(node.meta.get("val"), "dtype", None)


def _is_bytes(weight: Any, stays: Stays) -> bool:
    is_matrix = weight in stays and weight.meta["val"].dim() == 2
    return is_matrix and _dtype(weight) is torch.int8


def _is_float(node: fx.Node) -> bool:
    return _dtype(node) in _FLOATS


# --- what follows a product -----------------------------------------------------------------------


def _with_what_follows(match: Int8Linear) -> Int8Linear | None:
    """With as many of the steps behind it as belong to the layer, each the only user of the one
    before. A value in between that is rounded to halves is rounded in the end only. None where a
    kernel would have to give something else than the rows are: integers, wider floats."""
    whole = None
    grown: Int8Linear | None = match
    while grown is not None:
        match = in_full_rank(grown)
        if match.dtype in (_FLOATS if match.of_bytes else (match.input.meta["val"].dtype,)):
            whole = match
        user = only_user(match.node)
        grown = None if user is None else _one_step(match, user)
    return whole


def _one_step(match: Int8Linear, user: fx.Node) -> Int8Linear | None:
    grown = replace(match, node=user)
    if _converts(user):
        return grown if _is_float(user) else None
    if not _is_float(user) or user.kwargs or len(user.args) != 2:
        return None
    other: Any = next((arg for arg in user.args if arg is not match.node), None)
    if not isinstance(other, fx.Node) or not _is_float(other) or _grows(match.node, user):
        return None
    if user.target is aten.mul.Tensor and match.bias is None:
        if match.row_scale is None and match.of_bytes and _is_for_rows(other, match):
            return replace(grown, row_scale=other)
        if match.scale is None and _is_for_columns(other, match):
            return replace(grown, scale=other)
    if user.target is aten.add.Tensor and match.bias is None and _is_for_columns(other, match):
        return replace(grown, bias=other)
    return None


def _converts(node: fx.Node) -> bool:
    if node.target is aten._to_copy.default:
        return set(node.kwargs) == {"dtype"}
    return node.target is prims.convert_element_type.default


def _grows(node: fx.Node, user: fx.Node) -> bool:
    return not same_sizes(node.meta["val"].shape, user.meta["val"].shape)


def _is_for_columns(node: Any, match: Int8Linear) -> bool:
    """One number for each output, whatever the row."""
    if not isinstance(node, fx.Node) or not _is_float(node):
        return False
    sizes = node.meta["val"].shape
    return bool(sizes) and same_sizes(sizes, (*[1] * (len(sizes) - 1), match.outputs))


def _is_for_rows(node: fx.Node, match: Int8Linear) -> bool:
    """One number for each row: all sizes but the last, which is 1."""
    value, result = node.meta["val"], match.node.meta["val"]
    return value.dim() == result.dim() and same_sizes(value.shape, (*result.shape[:-1], 1))
