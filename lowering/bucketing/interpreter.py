"""Runs the original graph on a bucket's tensors, each operator by its rule."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowering.bucketing.bucket import Bucket
from lowering.bucketing.call import Call, Known, fixed
from lowering.bucketing.expressions import expression, is_number, same, shape_of
from lowering.bucketing.layout import Dim, Padded, dims_of, size_of
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules import RULES
from lowering.bucketing.rules.pointwise import pointwise


class Interpreter(fx.Interpreter):
    """`run` takes the inputs that are no numbers, padded, and returns the outputs as Padded."""

    def __init__(self, module: fx.GraphModule, bucket: Bucket) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self._bucket = bucket
        self.at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        value = n.meta.get("val")
        if is_number(value):  # sizes are known without computing them again
            return number(value)
        try:
            return super().run_node(n)
        except Refused as no:
            no.node = no.node or n
            raise
        except Exception as error:  # what a rule did not expect is a no as well
            raise Refused(f"{type(error).__name__}: {error}", n) from error

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        tensor = super().placeholder(target, args, kwargs)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        assert self.at is not None
        return Padded(tensor, dims_of(self.at.meta["val"]))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return Padded(value, dims_of(value)) if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(target, torch._ops.OpOverload):
            raise Refused(f"{getattr(target, '__name__', target)} is no operator of ATen")
        assert self.at is not None
        result = _apply(Call.of(self._bucket, self.at, args, kwargs))
        _check(self._bucket, result, self.at.meta.get("val"))
        return result

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise Refused(f"the method {target} is no operator of ATen")

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise Refused(f"the module {target} is no operator of ATen")

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return list(args[0])


def number(value: Any) -> Any:
    """A number of the graph: a plain one, or known by its expression."""
    if isinstance(value, (int, float)):
        return value
    expr = expression(value)
    if not expr.is_number:
        return Known(expr)
    return int(expr) if isinstance(value, torch.SymInt) else value.node.pytype(expr)


def _apply(call: Call) -> Any:
    target = call.target
    if target._schema.is_mutable:
        raise Refused("it writes into a tensor")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise Refused("it draws random numbers, of which a larger shape draws others")
    value = call.value
    if value is not None and fixed(value) and all(map(fixed, call.arguments.values())):
        return _run_fixed(call)
    rule = RULES.get(str(target))
    if rule is None and torch.Tag.pointwise in target.tags:
        rule = pointwise
    if rule is None:
        raise Refused("it has no rule for padded tensors")
    return rule(call)


def _run_fixed(call: Call) -> Any:
    """Nothing here varies: the operator itself, whatever it is."""
    values = call.value if isinstance(call.value, (list, tuple)) else [call.value]
    dims: list[tuple[Dim, ...]] = [
        dims_of(value) if isinstance(value, torch.Tensor) else () for value in values
    ]
    return call.with_dims(call.run(), *dims)


def _check(bucket: Bucket, result: Any, value: Any) -> None:
    """A rule must agree with the original graph on every size, and so must the bucket's tensor."""
    if isinstance(value, (list, tuple)):
        for one, its in zip(result, value, strict=True):
            _check(bucket, one, its)
    elif isinstance(value, torch.Tensor):
        assert isinstance(result, Padded)
        shape = shape_of(value)
        agree = len(shape) == len(result.dims) and all(
            same(size_of(dim), size) for dim, size in zip(result.dims, shape, strict=True)
        )
        there = list(result.tensor.shape)
        if not agree or there != [bucket.size(size) for size in shape]:
            raise Refused(f"its result of {list(shape)} would be {there} in a bucket")
        if result.tensor.dtype != value.dtype:
            raise Refused(f"its result would be {result.tensor.dtype}, not {value.dtype}")
