"""One call of an ATen operator in the original graph, as rules see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.bucketing.bucket import Bucket
from lowering.bucketing.expressions import Expr, expression, is_number, shape_of
from lowering.bucketing.layout import Dim, Padded
from lowering.bucketing.refused import Refused


@dataclass(frozen=True)
class Known:
    """A number that is made of sizes."""

    expr: Expr


@dataclass
class Call:
    bucket: Bucket
    target: torch._ops.OpOverload
    arguments: dict[str, Any]  # by the schema's names, defaults included; tensors are Padded
    value: Any  # what the original graph says of the result: fake tensors

    @classmethod
    def of(cls, bucket: Bucket, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        arguments = {
            argument.name: given.get(argument.name, argument.default_value) for argument in schema
        }
        return cls(bucket, node.target, arguments, node.meta.get("val"))

    @property
    def name(self) -> str:
        """Without its overload: `sum`, `add`."""
        return self.target._schema.name.split("::")[1]

    @property
    def first(self) -> torch.Tensor:
        """The result, or the first of several."""
        return self.value if isinstance(self.value, torch.Tensor) else self.value[0]

    @property
    def shape(self) -> tuple[Expr, ...]:
        return shape_of(self.first)

    @property
    def x(self) -> Padded:
        """The tensor that most operators are about."""
        return next(self.tensors())

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def tensors(self) -> Iterator[Padded]:
        for value in self.arguments.values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Padded):
                    yield item

    def expr(self, name: str) -> Expr:
        """A number among the arguments, whether it is made of sizes or not."""
        value = self.arguments[name]
        return value.expr if isinstance(value, Known) else expression(value)

    def dim(self, name: str = "dim") -> int:
        return int(self.arguments[name]) % max(len(self.x.dims), 1)

    def dims(self, name: str = "dim") -> list[int]:
        """One, several or (none given) all dimensions, counted from the front."""
        given, rank = self.arguments.get(name), len(self.x.dims)
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return list(range(rank))
        listed = given if isinstance(given, (list, tuple)) else [given]
        return [int(dim) % max(rank, 1) for dim in listed]

    def filled(
        self, operand: int, x: Padded, dims: Iterable[int] | None = None, given: Any = None
    ) -> torch.Tensor:
        along = range(len(x.dims)) if dims is None else dims
        return self.bucket.filled(self.name, operand, x, along, given)

    def run(self, /, **changes: Any) -> Any:
        """The operator itself, on the bucket's tensors."""
        arguments = self.arguments | changes
        args, kwargs = [], {}
        for argument in self.target._schema.arguments:
            value = _plain(arguments[argument.name])
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.target(*args, **kwargs)

    def with_dims(self, result: Any, *dims: Sequence[Dim]) -> Any:
        """The results of `run`, each with its dimensions."""
        if isinstance(result, torch.Tensor):
            return Padded(result, tuple(dims[0]))
        return [
            Padded(one, tuple(its)) if isinstance(one, torch.Tensor) else one
            for one, its in zip(result, dims, strict=True)
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, Padded):
        return value.tensor
    if isinstance(value, Known):
        raise Refused(f"it is told the number {value.expr}, which is another in the bucket")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def fixed(value: Any) -> bool:
    """Is no size in it that varies?"""
    if isinstance(value, (list, tuple)):
        return all(map(fixed, value))
    if isinstance(value, Padded):
        return all(factor.is_Integer for dim in value.dims for factor in dim)
    if isinstance(value, torch.Tensor):
        return all(size.is_Integer for size in shape_of(value))
    if isinstance(value, Known) or is_number(value):
        expr = value.expr if isinstance(value, Known) else expression(value)
        return not expr.free_symbols
    return True
