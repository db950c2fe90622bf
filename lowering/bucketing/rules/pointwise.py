"""Each number of the result depends on the same position of the operands only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lowering.bucketing.call import Call, Known
from lowering.bucketing.expressions import is_number
from lowering.bucketing.layout import Padded, broadcast
from lowering.bucketing.neutral import NEUTRAL
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule

# Divisions of integers, which the CPU stops at where the divisor is zero.
_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})
assert NEUTRAL.keys() >= _DIVISIONS


@rule(
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten._to_copy.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.where.self",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.floor_divide.default",
    "aten.polar.default",
    "aten.complex.default",
    "prims.convert_element_type.default",
)
def pointwise(call: Call) -> Any:
    dims = broadcast(call.shape, [x.dims for x in call.tensors()])
    changes: dict[str, Any] = {}
    if "memory_format" in call.arguments:  # the strides of padded tensors are nobody's
        changes["memory_format"] = None
    divisor = call.get("other")
    if call.name in _DIVISIONS and isinstance(divisor, Padded):
        dtype = divisor.tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            changes["other"] = call.filled(0, divisor)
    numbers = {
        name: call.bucket.true(value.expr)
        for name, value in call.arguments.items()
        if isinstance(value, Known)
    }
    if numbers:
        return _with_numbers(call, changes, numbers, dims)
    result = call.run(**changes)
    if isinstance(result, torch.Tensor):
        return Padded(result, dims)
    return call.with_dims(result, *([dims] * len(result)))


def _with_numbers(call: Call, changes: Any, numbers: dict[str, Any], dims: Any) -> Padded:
    """Lengths as numbers stay the true ones: 0-d tensors in the place of Python numbers."""
    target = _taking_tensors(call.target, numbers)
    for argument in target._schema.arguments:
        value = numbers.get(argument.name, call[argument.name])
        if is_number(value) and "Tensor" in str(argument.type):
            numbers[argument.name] = torch.as_tensor(value, device=call.first.device)
    result = replace(call, target=target).run(**changes, **numbers)
    # A Python number gives way to any tensor's dtype, a 0-d tensor not to another one.
    return Padded(result.to(call.first.dtype), dims)


def _taking_tensors(target: torch._ops.OpOverload, names: Iterable[str]) -> torch._ops.OpOverload:
    """The overload that takes tensors where this one takes numbers."""
    packet = target.overloadpacket
    expected = [argument.name for argument in target._schema.arguments]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = {argument.name: argument for argument in candidate._schema.arguments}
        if list(arguments) == expected and all(
            "Tensor" in str(arguments[name].type) for name in names
        ):
            return candidate
    raise Refused("it is told a number that is made of sizes, and takes no tensor in its place")


@rule("aten.copy.default")
def copy(call: Call) -> Padded:
    """The second tensor, in the form of the first."""
    x, source = call["self"], call["src"]
    dims = broadcast(call.shape, [x.dims, source.dims])
    expanded = source.tensor.expand(call.bucket.shape(call.shape))
    return Padded(expanded.to(x.tensor.dtype).clone(), dims)
