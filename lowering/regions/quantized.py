"""Layers between bytes, as `prepare_pt2e` and `convert_pt2e` write them:

    quantize(act(layer(dequantize(x), dequantize(weight), bias) + dequantize(other)))

Bytes stand for the numbers of a grid, (byte - zero) * step. Everything behind the product is
optional: what is not there, or not taken, leaves a layer that gives floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import call, hint, only_user, same_sizes
from lowering.profile import gemm_shape
from lowering.regions.epilogue import NONE, Activation, activation_of
from lowering.regions.flattened import VIEWS, in_full_rank
from lowering.regions.weights import Stays, transposed_from, under_cast

aten = torch.ops.aten

BYTES = (torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.bfloat16)
# By their names: torch defines them when a module is imported that nothing else needs.
_READ = "quantized_decomposed::dequantize_per_tensor"
_READ_BY_TENSORS = f"{_READ}.tensor"
_READ_CHANNELS = "quantized_decomposed::dequantize_per_channel"
_WRITE = "quantized_decomposed::quantize_per_tensor"
# Sums of so many products of bytes, 255 * 128 at most, fit into 32 bits.
_MOST_PRODUCTS = (1 << 31) // (255 * 128) - 1


@dataclass(frozen=True)
class Grid:
    """The numbers that bytes stand for. Nodes where they are found in each call."""

    step: float | fx.Node = 1.0
    zero: int | fx.Node = 0
    dtype: torch.dtype | None = None

    @property
    def is_fixed(self) -> bool:
        return not isinstance(self.step, fx.Node)


FLOAT = Grid()


@dataclass(frozen=True)
class Takes:
    """What one kind of layer computes in the same pass."""

    activations: frozenset[str]
    behind_a_sum: frozenset[str]
    adds: bool  # another tensor
    floats_to_bytes: bool  # does it add floats to what then becomes bytes?


@dataclass(frozen=True)
class QuantizedLayer:
    """One match; `node` is its result: bytes of the grid `out`, or floats."""

    region: str
    node: fx.Node
    input: fx.Node  # bytes, in the end; floats while what follows is being found
    grid: Grid
    weight: fx.Node  # a graph input of bytes that does not change from call to call
    weight_step: fx.Node | float  # one for each output, or one for all
    weight_zero: fx.Node | None
    bias: fx.Node | None
    in_out: bool = False  # is the weight stored as (in, out)?
    geometry: tuple[Any, ...] = ()  # of a convolution: stride, padding, dilation, groups
    activation: Activation = NONE
    other: fx.Node | None = None  # what is added: bytes of `other_grid`, or floats
    other_grid: Grid = FLOAT
    out: Grid = FLOAT
    steps: tuple[str, ...] = ()  # for the report

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def outputs(self) -> Any:
        return self.weight.meta["val"].shape[1 if self.in_out else 0]

    @property
    def products(self) -> int:
        """That are added up for one number of the result."""
        return int(self.weight.meta["val"].numel() // max(1, self.outputs))

    def tensors(self) -> tuple[Any, ...]:
        """What comes first of an operator's arguments."""
        step = self.weight_step if isinstance(self.weight_step, fx.Node) else None
        return (self.input, self.weight, step, self.weight_zero, self.bias, self.other)

    def grids(self) -> tuple[list[Any], list[Any]]:
        """Steps and zeros of the weight (where one step holds for all), the input, the result and
        `other`."""
        step = 1.0 if isinstance(self.weight_step, fx.Node) else self.weight_step
        given = self.grid if self.grid.is_fixed else FLOAT
        grids = (given, self.out, self.other_grid)
        return [step, *(one.step for one in grids)], [0, *(one.zero for one in grids)]

    def found_grid(self) -> tuple[Any, Any]:
        """Step and zero of the input, where they are found in each call."""
        return (None, None) if self.grid.is_fixed else (self.grid.step, self.grid.zero)

    def work(self) -> Work:
        value = self.node.meta["val"]
        places = math.prod(hint(size) for size in value.shape) // max(1, self.outputs)
        return Work(
            region=self.region,
            dtypes=frozenset({str(self.grid.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * places * self.weight.meta["val"].numel(),
            dynamic=any(not isinstance(size, int) for size in value.shape),
            shape_class=gemm_shape(places),
        )


# --- one layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    node: fx.Node
    step: fx.Node | float
    zero: fx.Node | None
    axis: int | None  # along which the steps differ
    turned: bool


def weight_of(node: Any, stays: Stays, turned: bool = False) -> Weight | None:
    """Bytes that stay, with one step for each output or one for all."""
    node = under_cast(node)
    if (plain := transposed_from(node)) is not None:
        return weight_of(plain, stays, not turned)
    name = _name(node)
    args: Any = getattr(node, "args", ())
    if name == _READ_CHANNELS and len(args) > 3:
        bytes_, step, zero, axis = args[:4]
        if _is_weight(bytes_, stays) and step in stays and stays.or_none(zero):
            return Weight(bytes_, step, zero, axis, turned)
    if name == _READ and _is_weight(args[0], stays) and args[2] == 0:
        return Weight(args[0], float(args[1]), None, None, turned)
    return None


def _is_weight(node: Any, stays: Stays) -> bool:
    return node in stays and node.meta["val"].dtype is torch.int8 and node.meta["val"].numel() > 0


def read(node: Any) -> tuple[fx.Node, Grid] | None:
    """The bytes that a value is made of, and their grid."""
    name = _name(node)
    if name not in (_READ, _READ_BY_TENSORS):
        return None
    bytes_, step, zero, *_ = node.args
    value = bytes_.meta.get("val")
    known = isinstance(value, torch.Tensor) and value.dtype in BYTES
    if name == _READ:
        return (bytes_, Grid(float(step), int(zero), value.dtype)) if known else None
    single = all(hint(one.meta["val"].numel()) == 1 for one in (step, zero))
    return (bytes_, Grid(step, zero, value.dtype)) if known and single else None


def finished(match: QuantizedLayer, takes: Takes) -> QuantizedLayer | None:
    """`match`, whose input is still the floats that the product reads, with all that follows."""
    if match.products > _MOST_PRODUCTS or match.dtype not in FLOATS:
        return None
    whole = with_what_follows(match, takes)
    found = read(under_cast(whole.input)) or _read_under_view(whole.input)
    return None if found is None else replace(whole, input=found[0], grid=found[1])


def _read_under_view(node: Any) -> tuple[fx.Node, Grid] | None:
    """The bytes of a view, where a linear layer reads flattened rows and nothing turns it back."""
    under = node
    while isinstance(under, fx.Node) and under.target in VIEWS:
        under = under_cast(under.args[0])
    found = read(under) if under is not node else None
    if found is None:
        return None
    bytes_, grid = found
    with node.graph.inserting_before(node):
        return call(node.graph, aten.reshape.default, bytes_, node.args[1]), grid


# --- what follows ---------------------------------------------------------------------------------


def with_what_follows(match: QuantizedLayer, takes: Takes) -> QuantizedLayer:
    """With as many of the steps behind it as belong to the layer, each the only user of the one
    before. What lies between is rounded to halves, if at all, in the end only."""
    whole: QuantizedLayer = match
    grown: QuantizedLayer | None = match
    while grown is not None:
        as_it_is = grown.geometry or grown.other is not None  # which has the shape of `node`
        match = grown if as_it_is else in_full_rank(grown)
        if _may_end(match, takes):
            whole = match
        user = only_user(match.node)
        grown = None if user is None else _one_step(match, user, takes)
    return whole


def _may_end(match: QuantizedLayer, takes: Takes) -> bool:
    if _converts(match.node):
        return False
    if match.other_grid is not FLOAT:  # bytes are added onto bytes of their kind
        return match.out.dtype is match.other_grid.dtype
    adds_floats = match.other is not None
    return not (adds_floats and match.out is not FLOAT) or takes.floats_to_bytes


def _one_step(match: QuantizedLayer, user: fx.Node, takes: Takes) -> QuantizedLayer | None:
    grown = replace(match, node=user)
    if match.out is not FLOAT or not same_sizes(_sizes(match.node), _sizes(user)):
        return None
    if _converts(user):
        return grown if user.meta["val"].dtype in FLOATS else None
    if (out := _written(user)) is not None:
        return replace(grown, out=out, steps=(*match.steps, "quantize"))
    if match.activation is not NONE or user.meta["val"].dtype not in FLOATS:
        return None
    if user.target is aten.add.Tensor and match.other is None:
        return _with_other(match, grown) if takes.adds else None
    activation = activation_of(user)
    known = takes.activations if match.other is None else takes.behind_a_sum
    if activation is None or activation.name not in known or user.args[0] is not match.node:
        return None
    if activation.name == "clamp" and activation.a > activation.b:
        return None
    return replace(grown, activation=activation, steps=(*match.steps, activation.name))


def _with_other(match: QuantizedLayer, grown: QuantizedLayer) -> QuantizedLayer | None:
    given: Any = grown.node.args
    others = [one for one in given if one is not match.node]
    if grown.node.kwargs or len(given) != 2 or len(others) != 1:
        return None
    (other,) = others
    if not isinstance(other, fx.Node) or not same_sizes(_sizes(other), _sizes(match.node)):
        return None
    steps = (*match.steps, "add")
    found = read(under_cast(other))
    if found is not None and found[1].is_fixed:
        return replace(grown, other=found[0], other_grid=found[1], steps=steps)
    floats = {one.meta["val"].dtype for one in (other, match.node)} == {torch.float32}
    return replace(grown, other=other, steps=steps) if floats else None


def _written(node: fx.Node) -> Grid | None:
    """The grid of a value that becomes bytes, any of them: fewer would have to be clamped."""
    if _name(node) != _WRITE or len(node.args) < 6 or node.kwargs:
        return None
    _, step, zero, low, high, dtype = node.args
    numbers: list[Any] = [step, zero, low, high]
    if dtype not in BYTES or not all(isinstance(one, (int, float)) for one in numbers):
        return None
    limits = torch.iinfo(dtype)  # type: ignore[arg-type]
    if (low, high) != (limits.min, limits.max):
        return None
    return Grid(float(numbers[0]), int(numbers[1]), dtype)  # type: ignore[arg-type]


def _converts(node: fx.Node) -> bool:
    return under_cast(node) is not node


def _sizes(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else ()


def _name(node: Any) -> str:
    target = getattr(node, "target", None)
    return target.name() if isinstance(target, torch._ops.OpOverload) else ""
