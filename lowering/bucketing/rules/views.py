"""The same numbers in another form."""

from __future__ import annotations

from lowering.bucketing.bucket import require_static
from lowering.bucketing.call import Call
from lowering.bucketing.expressions import Expr, quotient, same, shape_of
from lowering.bucketing.layout import Dim, Padded, broadcast, dim_of, joined, regrouped, size_of
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule


@rule("aten.view.default", "aten._unsafe_view.default")
def reshaped(call: Call) -> Padded:
    dims = regrouped(call.x.dims, call.shape)
    return Padded(call.x.tensor.reshape(call.bucket.shape(call.shape)), dims)


@rule("aten.permute.default")
def permuted(call: Call) -> Padded:
    order = call.dims("dims") if call["dims"] else []
    return Padded(call.run(), tuple(call.x.dims[dim] for dim in order))


@rule("aten.transpose.int")
def swapped(call: Call) -> Padded:
    one, other = call.dim("dim0"), call.dim("dim1")
    dims = list(call.x.dims)
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return Padded(call.run(), tuple(dims))


@rule("aten.t.default")
def transposed(call: Call) -> Padded:
    return Padded(call.run(), call.x.dims[::-1])


@rule("aten.unsqueeze.default")
def unsqueezed(call: Call) -> Padded:
    place = int(call["dim"]) % (len(call.x.dims) + 1)
    return Padded(call.run(), call.x.dims[:place] + ((),) + call.x.dims[place:])


@rule("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def squeezed(call: Call) -> Padded:
    """Of the original's size one; a bucket of size one is another matter."""
    along = set(call.dims())
    left = [dim for index, dim in enumerate(call.x.dims) if index not in along or dim != ()]
    return Padded(call.x.tensor.reshape(call.bucket.shape(call.shape)), tuple(left))


@rule("aten.expand.default")
def expanded(call: Call) -> Padded:
    """New positions hold what the old one held, so they are valid as far as is asked."""
    x, shape = call.x, call.shape
    dims = broadcast(shape, [x.dims])
    return Padded(x.tensor.expand(call.bucket.shape(shape)), dims)


@rule("aten.repeat.default")
def repeated(call: Call) -> Padded:
    """Whole copies one behind the other: an outer factor."""
    x, shape = call.x, call.shape
    sizes: list[Dim] = [()] * (len(shape) - len(x.dims)) + list(x.dims)
    dims: list[Dim] = []
    for size, dim in zip(shape, sizes, strict=True):
        if same(size, size_of(dim)):
            dims.append(dim)
        else:
            dims.append(_copies(size, dim))
    physical = [call.bucket.size(size_of(dim)) for dim in sizes]
    times = [
        call.bucket.size(size) // max(length, 1)
        for size, length in zip(shape, physical, strict=True)
    ]
    return Padded(x.tensor.repeat(times), tuple(dims))


def _copies(size: Expr, dim: Dim) -> Dim:
    times = dim_of(quotient(size, size_of(dim)))
    return joined([*times, *dim])


@rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int")
def split(call: Call) -> list[Padded]:
    place = call.dim()
    require_static(call.x, [place])
    own = []
    for value in call.value:
        size = shape_of(value)
        if len(size) < len(call.x.dims):
            own.append(call.x.dims[:place] + call.x.dims[place + 1 :])
            continue
        if not size[place].is_Integer:
            raise Refused(f"it splits off a part of size {size[place]}")
        part: Dim = (size[place],) if size[place] != 1 else ()
        own.append(call.x.dims[:place] + (part,) + call.x.dims[place + 1 :])
    results: list[Padded] = call.with_dims(list(call.run()), *own)
    return results
