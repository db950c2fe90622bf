"""Values that depend on weights alone: computed once, and again when one of the weights changed.

The graph is cut in two before autograd. What depends on weights alone runs ahead of each call, and
only if one of them is not what it was (`lowering/packing.py`); the rest gets the values as further
inputs that stay from call to call, so that a later region can pack them like any weight. Torch's
caches see an ordinary graph, and equal layers share its code, never its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lowering.capability import CapabilityRow
from lowering.contract import Graph, Region, Request
from lowering.graphs import place
from lowering.packing import PackedWeights
from lowering.regions.from_weights import Found, find

REGION = "from_weights"
RECIPE = "fold-constants"


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Ahead:
    """What runs ahead of a graph; without regions, nothing does."""

    regions: list[Region] = field(default_factory=list)
    values: Callable[[Sequence[Any]], tuple[Tensor, ...]] = lambda args: ()
    notes: list[str] = field(default_factory=list)

    def of(self, run: Graph) -> Graph:
        """The graph, called as the one that was there before it was cut."""
        if not self.regions:
            return run
        values = self.values
        return lambda *args: run(*args, *values(args))


def split(request: Request) -> tuple[Request, Ahead]:
    """The request without what depends on weights alone, and that as what runs ahead of it."""
    row = next((row for row in request.region_rows if row.region == REGION), None)
    mode = torch._guards.detect_fake_mode(request.example_inputs)
    if row is None or mode is None:
        return request, Ahead()
    names = [node.name for node in request.graph.graph.find_nodes(op="placeholder")]
    try:
        found = find(request.graph, weights(request))
        part = None if found is None else _part(found, names, row)
    except Exception as error:  # noqa: BLE001  (a graph that we cannot read is whole without us)
        return request, Ahead(notes=[f"what depends on weights alone stays where it is: {error!r}"])
    if found is None or part is None:
        return request, Ahead()
    ahead, layouts = part
    with mode:
        inputs = [layout.empty() for layout in layouts]
    _cut(request.graph, found, inputs)
    return replace(
        request,
        example_inputs=[*request.example_inputs, *inputs],
        stays=(*request.stays, *range(len(names), len(names) + len(inputs))),
    ), ahead


def _part(found: Found, names: Sequence[str], row: CapabilityRow) -> tuple[Ahead, list[_Layout]]:
    layouts = [_layout(node.meta["example_value"]) for node in found.values]
    positions = [names.index(node.name) for node in found.weights]
    values = _Values(_alone(found), positions, layouts)
    return Ahead([_region(found, layouts, row)], values), layouts


def weights(request: Request) -> set[str]:
    """Inputs by their names. Not inference tensors: whether those have changed cannot be told."""
    placeholders = request.graph.graph.find_nodes(op="placeholder")
    examples = {placeholders[i].name: request.example_inputs[i] for i in request.stays}
    return {
        name
        for name, example in examples.items()
        if isinstance(example, Tensor) and not example.is_inference()
    }


def _layout(value: Any) -> _Layout:
    """As it lies, but without gaps: it is to have memory of its own."""
    with value.fake_mode:
        return _Layout(value.dtype, value.shape, torch.empty_like(value).stride())


def _region(found: Found, layouts: Sequence[_Layout], row: CapabilityRow) -> Region:
    computing = Counter(found.instead_of)
    return Region(
        name=row.region,
        provider=row.provider,
        count=len(layouts),
        place=place(found.values[0]),
        detail="in place of " + ", ".join(f"{name} x{n}" for name, n in computing.items()),
        recipes=(RECIPE,),
        packed_bytes=sum(
            one.shape.numel() * one.dtype.itemsize
            for node, one in zip(found.values, layouts, strict=True)
            if not found.is_of_a_weight(node)
        ),
        why=row.why,
        silent=True,
    )


def _alone(found: Found) -> fx.GraphModule:
    """A graph from the weights to the values, without fake tensors: it is kept."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for weight in found.weights:
        copies[weight] = graph.placeholder(weight.name)
    for node in found.cones:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(tuple(copies[node] for node in found.values))
    return fx.GraphModule({}, graph)


def _cut(module: fx.GraphModule, found: Found, inputs: Sequence[Tensor]) -> None:
    last = module.graph.find_nodes(op="placeholder")[-1]
    for i, (node, value) in enumerate(zip(found.values, inputs, strict=True)):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"from_weights_{i}")
        last.meta = {"example_value": value, "tensor_dict": {_STATIC: "unguarded"}}
        last._dynamo_source = None
        node.replace_all_uses_with(last)
    for node in reversed(found.cones):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


_STATIC = "_dynamo_static_input_type"  # by this AOTAutograd knows of parameters and buffers


class _Values:
    """The values of each model that runs this code, kept for as long as its weights live."""

    def __init__(
        self, compute: fx.GraphModule, positions: Sequence[int], layouts: Sequence[_Layout]
    ) -> None:
        self._compute = compute.forward
        self._positions = positions
        self._layouts = layouts
        self._kept = PackedWeights()

    def __call__(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        weights = tuple([args[i] for i in self._positions])
        kept: tuple[Tensor, ...] = self._kept.get(weights, (), lambda: self._computed(weights))
        return kept

    def _computed(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Ordinary tensors under inference_mode too, which later calls can tell apart; where not
        even the weights can be, inference tensors, which nobody packs in vain."""
        inference = any(weight.is_inference() for weight in weights)
        with torch.inference_mode(inference), torch.no_grad(), _no_stale_casts():
            # Detached: what is kept may be a view, and a view keeps what it is of alive.
            values = self._compute(*[weight.detach() for weight in weights])
            return tuple(map(_as_planned, values, self._layouts))


@contextmanager
def _no_stale_casts() -> Iterator[None]:
    """Autocast remembers a cast weight for as long as it lasts, whatever is written meanwhile."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _as_planned(value: Tensor, layout: _Layout) -> Tensor:
    """Compiled code relies on dtype, sizes and strides; what is kept keeps no memory besides."""
    if (value.dtype, value.shape) != (layout.dtype, layout.shape):
        raise RuntimeError(f"planned as {layout}, computed as {value.dtype} {tuple(value.shape)}")
    whole = value.untyped_storage().nbytes() == value.numel() * value.itemsize
    if whole and value.stride() == layout.stride and not value.requires_grad:
        return value
    return layout.empty().copy_(value)
