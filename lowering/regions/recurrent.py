"""The recurrent region: LSTM, GRU and plain recurrent layers, stacked and in both directions.

Found where Dynamo sees one call of torch. Below, it is taken apart into the operators of every
single step, as often as the sequence is long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.calls import dtype_name, has_transforms, value_of

# torch's functions -> how many sums each hidden unit has
GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
_PADDED = "input state weights biases layers dropout training bidirectional batch_first".split()
_PACKED = "input lengths state weights biases layers dropout training bidirectional".split()


@dataclass(frozen=True)
class Recurrent:
    """One call: a whole stack of layers."""

    node: fx.Node
    input: fx.Node
    lengths: fx.Node | None  # how many sequences each step has, where they are packed
    state: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    biases: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool
    absorbed: Sequence[fx.Node] = ()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = value_of(self.input).dtype
        return dtype

    @property
    def is_projected(self) -> bool:
        """Is what a layer gives another size than its cells (LSTM with `proj_size`)?"""
        hidden, *cells = [value_of(state).shape[-1] for state in self.state]
        return any(cell != hidden for cell in cells)

    @property
    def weights_stay(self) -> bool:
        """Parameters and buffers, and what was computed of them ahead of the graph."""
        return all(
            node.op == "get_attr" or "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
            for node in self.weights
        )

    def work(self) -> Work:
        given, weights = value_of(self.input), [value_of(weight) for weight in self.weights]
        steps = math.prod(hint(size) for size in given.shape[:-1])
        numbers = sum(math.prod(hint(size) for size in one.shape) for one in weights)
        return Work(
            region="recurrent",
            dtypes=frozenset({dtype_name(given)}),
            op_count=1,
            flops=2 * steps * numbers,
            bytes_moved=numbers * given.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in given.shape),
        )


def find(graph: fx.Graph) -> Iterator[Recurrent]:
    if has_transforms(graph):  # our operators have no rules for them
        return
    for node in list(graph.nodes):
        match = read(node)
        if match is not None and _is_plain(match):
            yield match


def read(node: fx.Node) -> Recurrent | None:
    """What a node computes now: its operands change when another region is replaced."""
    if node.op != "call_function" or node.target not in GATES or node.kwargs:
        return None
    packed = len(node.args) > 3 and isinstance(node.args[3], list | tuple)
    names = _PACKED if packed else _PADDED
    if len(node.args) != len(names):
        return None
    given: dict[str, Any] = {
        "lengths": None,
        "batch_first": False,
        **dict(zip(names, node.args, strict=True)),
    }
    for name in ("state", "weights"):
        one = given[name]
        given[name] = tuple(one) if isinstance(one, list | tuple) else (one,)
    return Recurrent(node, **given)


def _is_plain(match: Recurrent) -> bool:
    """One dtype in and out (autocast is at work otherwise), all of it on the CPU."""
    result = match.node.meta.get("example_value")
    if not isinstance(result, list | tuple):
        return False
    given = [value_of(node) for node in (match.input, *match.state, *match.weights)]
    values = [*given, *result]
    return (
        all(isinstance(value, torch.Tensor) for value in values)
        and len({value.dtype for value in values}) == 1
        and all(value.device.type == "cpu" for value in values)
    )
