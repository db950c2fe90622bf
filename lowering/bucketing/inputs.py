"""What goes into a graph: which sizes its inputs bring, and how they are padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.bucketing.expressions import Expr, Symbol, evaluate, expression, is_number, shape_of
from lowering.bucketing.refused import Refused
from lowering.graphs import hint

Sizes = Mapping[Symbol, int]


@dataclass(frozen=True)
class Source:
    """Where the value of a symbol is found: a number, or a dimension of a tensor."""

    position: int
    dim: int | None
    hint: int

    def value(self, args: Sequence[Any]) -> int:
        arg = args[self.position]
        return int(arg) if self.dim is None else int(arg.shape[self.dim])


class Inputs:
    def __init__(self, module: fx.GraphModule) -> None:
        self.nodes = module.graph.find_nodes(op="placeholder")
        self._values = [node.meta.get("val") for node in self.nodes]
        self._tensors = [i for i, value in enumerate(self._values) if not is_number(value)]
        self._shapes = {
            position: shape_of(self._values[position])
            for position in self._tensors
            if isinstance(self._values[position], torch.Tensor)
        }
        self._varying = [
            position
            for position, shape in self._shapes.items()
            if not all(size.is_Integer for size in (*shape, *self._strides(position)))
        ]
        self.sources = self._find_sources()
        self.symbols = tuple(sorted(self.sources, key=str))

    def _strides(self, position: int) -> tuple[Expr, ...]:
        return tuple(expression(stride) for stride in self._values[position].stride())

    def _find_sources(self) -> dict[Symbol, Source]:
        found: dict[Symbol, Source] = {}
        for position, value in enumerate(self._values):
            sizes: list[tuple[int | None, Any]] = (
                [(None, value)] if isinstance(value, torch.SymInt) else []
            )
            if position in self._shapes:
                sizes = list(enumerate(value.shape))
            for dim, size in sizes:
                if isinstance(size, torch.SymInt) and (expr := expression(size)).is_Symbol:
                    found.setdefault(expr, Source(position, dim, hint(size)))
        return found

    def true_sizes(self, args: Sequence[Any]) -> dict[Symbol, int]:
        return {symbol: self.sources[symbol].value(args) for symbol in self.symbols}

    def padded(self, args: Sequence[Any], sizes: Sizes) -> list[Any]:
        """The tensors in their bucket's sizes, then the true lengths. Inputs stay as they are, and
        what has no size that varies is handed on as the same object."""
        ready = []
        device = torch.device("cpu")
        with torch.no_grad():
            for position in self._tensors:
                arg = args[position]
                if position in self._varying:
                    device = arg.device if device.type == "cpu" else device
                    arg = _enlarged(arg, [evaluate(s, sizes) for s in self._shapes[position]])
                ready.append(arg)
            true = self.true_sizes(args)
            lengths = [torch.tensor(true[symbol], device=device) for symbol in self.symbols]
        return [*ready, *lengths]

    def fakes(self, sizes: Sizes) -> list[Any]:
        """What `padded` gives, without data: call it in a fake mode."""
        ready, device = [], torch.device("cpu")
        for position in self._tensors:
            value = self._values[position]
            if position in self._shapes:
                shape = [evaluate(size, sizes) for size in self._shapes[position]]
                made = torch.empty(shape, dtype=value.dtype, device=value.device)
                if position in self._varying:
                    device = value.device if device.type == "cpu" else device
                else:
                    made = made.new_empty_strided(shape, value.stride())
                value = made
            ready.append(value)
        lengths = [torch.empty((), dtype=torch.int64, device=device) for _ in self.symbols]
        return [*ready, *lengths]

    def symbols_of_sizes(self, module: fx.GraphModule) -> frozenset[Symbol]:
        """The symbols that some tensor's size is made of; each has to come with an input."""
        found: set[Symbol] = set()
        for node in module.graph.nodes:
            value = node.meta.get("val")
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    found |= {symbol for size in shape_of(one) for symbol in size.free_symbols}
            if not found <= self.sources.keys():
                raise Refused("how long its result is depends on the data", node)
        return frozenset(found)


def _enlarged(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if list(tensor.shape) == shape:
        return tensor.contiguous()
    larger = tensor.new_zeros(shape)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger
