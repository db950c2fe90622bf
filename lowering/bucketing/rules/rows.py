"""Operators that treat every index of the padded dimensions for itself: rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.bucketing.bucket import require_static
from lowering.bucketing.call import Call, Known
from lowering.bucketing.expressions import Expr, shape_of
from lowering.bucketing.layout import Dim, Padded, dim_of, dims_of
from lowering.bucketing.rules.table import rule


def _batched(call: Call, inner: int, **changes: Any) -> Any:
    """The last `inner` dimensions are its business, those before them are a batch."""
    x = call.x
    batch = len(x.dims) - inner
    require_static(x, range(batch, len(x.dims)))
    values = call.value if isinstance(call.value, (list, tuple)) else [call.value]
    dims = [x.dims[:batch] + dims_of(value)[batch:] for value in values]
    return call.with_dims(call.run(**changes), *dims)


@rule("aten.native_layer_norm.default")
def layer_norm(call: Call) -> Any:
    return _batched(call, len(call["normalized_shape"]))


@rule("aten.native_group_norm.default")
def group_norm(call: Call) -> Any:
    """Whole images are a batch."""
    x = call.x
    require_static(x, range(1, len(x.dims)))
    rows = call["N"]
    changes = {"N": call.bucket.size(rows.expr)} if isinstance(rows, Known) else {}
    dims = [x.dims[:1] + dims_of(value)[1:] for value in call.value]
    return call.with_dims(call.run(**changes), *dims)


@rule("aten._native_batch_norm_legit_no_training.default")
def batch_norm(call: Call) -> Any:
    """With given statistics: pointwise but for the channel."""
    x = call.x
    require_static(x, [1])
    saved = [dims_of(value) for value in call.value[1:]]
    return call.with_dims(call.run(), x.dims, *saved)


@rule(
    "aten.max_pool2d_with_indices.default",
    "aten.avg_pool2d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.reflection_pad2d.default",
    "aten.replication_pad2d.default",
)
def of_images(call: Call) -> Any:
    return _batched(call, 2)


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def of_channels_and_images(call: Call) -> Any:
    return _batched(call, 3)


@rule("aten.view_as_real.default")
def as_pairs(call: Call) -> Any:
    return _batched(call, 0)


@rule("aten.view_as_complex.default")
def of_pairs(call: Call) -> Any:
    return _batched(call, 1)


@rule(
    "aten.sort.default",
    "aten.sort.stable",
    "aten.topk.default",
    "aten.kthvalue.default",
    "aten.median.dim",
    "aten.glu.default",
)
def along_one_dimension(call: Call) -> Any:
    """What it does along a dimension that is not padded is nobody's business."""
    return _along(call, [call.dim()])


@rule("aten.flip.default")
def along_dimensions(call: Call) -> Any:
    return _along(call, call.dims("dims"))


@rule("aten.roll.default")
def rolled(call: Call) -> Any:
    """Without dimensions it rolls the flattened tensor, through all of them."""
    return _along(call, call.dims("dims"))


def _along(call: Call, along: list[int]) -> Any:
    x = call.x
    require_static(x, along)
    values = call.value if isinstance(call.value, (list, tuple)) else [call.value]
    return call.with_dims(call.run(), *(_kept(x, along, shape_of(value)) for value in values))


def _kept(x: Padded, along: list[int], shape: Sequence[Expr]) -> tuple[Dim, ...]:
    """The result's dimensions, where only those along which it works have changed or gone."""
    if len(shape) < len(x.dims):
        return tuple(dim for index, dim in enumerate(x.dims) if index not in along)
    return tuple(
        dim_of(shape[index]) if index in along else dim for index, dim in enumerate(x.dims)
    )
