"""Hands regions of an ATen graph to their providers: the same for eager (O1) and Inductor (O2)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lowering import (
    convolution_groups,
    group_norm,
    linear_groups,
    outputs,
    providers,
    wide_images,
)
from lowering.capability import CapabilityRow, Situation, Work, check
from lowering.contract import Region, RegionMaker, Request
from lowering.graphs import erase_dead, place
from lowering.native import library
from lowering.ranking import takers
from lowering.regions import (
    attention,
    batch_norm,
    convolution,
    embedding_bag,
    epilogue,
    gated,
    grouped_linear,
    int8_linear,
    linear,
    norm,
    product,
    quantized_convolution,
    quantized_linear,
    random_numbers,
    rope,
    softmax,
    training_convolution,
    transposed_convolution,
    weight_gradient,
    weights,
)
from lowering.regions import group_norm as groups

# Convolutions first: an addend that both could absorb is larger there. Products last: they are
# what is left when no weight that stays was found.
_REGIONS = {
    "quantized_convolution": quantized_convolution,
    "quantized_linear": quantized_linear,
    "convolution": convolution,
    "transposed_convolution": transposed_convolution,
    "linear": linear,
    "int8_linear": int8_linear,
    "grouped_linear": grouped_linear,
    "attention": attention,
    "product": product,
    "rope": rope,
    "norm": norm,
    "gated": gated,
    "training_convolution": training_convolution,
    "weight_gradient": weight_gradient,
    "batch_norm": batch_norm,
    "random": random_numbers,
    "softmax": softmax,
    "group_norm": groups,
    "embedding_bag": embedding_bag,
}
_OUR_LINEARS, _OUR_CONVOLUTIONS = ("linear", "openmp"), ("convolution", "openmp")
# Their results may lie in memory in another way than torch's.
_LAY_OUT_OTHERWISE = (
    "quantized_convolution",
    "convolution",
    "transposed_convolution",
    "attention",
    "rope",
    "weight_gradient",
    "embedding_bag",
)
_OF_CHANNELS_LAST = ("training_convolution", "weight_gradient")


def lower(
    graph: fx.Graph,
    request: Request,
    stays: Collection[str],
    stands_for: dict[fx.Node, fx.Node] | None = None,
) -> list[Region]:
    """Replace every region that a row takes; returns what was taken and by whom.

    In `stands_for`: the node that now gives a value -> the node that gave it.
    """
    made: dict[fx.Node, fx.Node] = {} if stands_for is None else stands_for
    taken: dict[tuple[str, str], Region] = {}
    for name, region in _REGIONS.items():
        rows = [row for row in request.region_rows if row.region == name and not row.early]
        for match in region.find(graph, weights.Stays(stays)) if rows else ():
            chosen = _choose(match, rows, request)
            if chosen is not None and chosen[1].emit is None:
                _count(match, chosen[0], taken).left = True
            elif chosen is not None:
                made.update(_replace(graph, match, *chosen, taken))
    if any(not region.left for region in taken.values()):
        graph.eliminate_dead_code()
    return list(taken.values())


def _choose(
    match: Any, rows: Iterable[CapabilityRow], request: Request
) -> tuple[CapabilityRow, RegionMaker] | None:
    """The first provider that takes this match, the fastest of the machine's profile first."""
    work, situation = match.work(), _situation(request)
    for row in in_order(rows, work, request):
        maker = providers.maker(row)
        if check(row, work, situation) or maker.refuses(match):
            continue
        if request.ranking and maker.declines(match):
            continue  # without a ranking one was chosen, and who is faster is not the question
        return row, maker
    return None


def in_order(rows: Iterable[CapabilityRow], work: Work, request: Request) -> list[CapabilityRow]:
    """By measured rate where the machine was measured, else by the rows' own priority."""
    (dtype,) = work.dtypes
    return takers(rows, request.ranking.get((work.region, dtype, work.shape_class), ()))


def _situation(request: Request) -> Situation:
    """Machine and wish were asked when the rows were chosen; here only the work is in question."""
    features = frozenset(name for row in request.region_rows for name in row.features)
    return Situation(level=request.level, features=features)


def _replace(
    graph: fx.Graph,
    match: Any,
    row: CapabilityRow,
    maker: RegionMaker,
    taken: dict[tuple[str, str], Region],
) -> dict[fx.Node, fx.Node]:
    assert maker.emit is not None
    absorbed = epilogue.absorb(match.node, maker.abilities)
    last = absorbed.last
    with graph.inserting_before(last):
        emitted = maker.emit(graph, match, absorbed)
    made = {emitted: last} if isinstance(emitted, fx.Node) else emitted
    for new, old in made.items():
        new.meta = {key: value for key, value in old.meta.items() if key != "eager_input_vals"}
        old.replace_all_uses_with(new)
    for old in made.values():
        erase_dead(graph, old)
    region = _count(match, row, taken)
    region.silent = maker.silent
    region.packed_bytes += _packed_bytes(match, maker)
    region.recipes = tuple(sorted({*region.recipes, *_recipes(match, maker)}))
    region.detail = _with(region.detail, absorbed.steps)
    return made


def _count(match: Any, row: CapabilityRow, taken: dict[tuple[str, str], Region]) -> Region:
    key = (row.region, row.provider)
    region = taken.get(key)
    if region is None:
        region = taken[key] = Region(*key, 0, place(match.node))
    region.one_more(row.why)
    return region


def _packed_bytes(match: Any, maker: RegionMaker) -> int:
    """What the weight's second form costs, padding aside."""
    weight = getattr(match, "weight", None)
    if weight is None:
        return 0
    values = int(weight.meta["val"].numel() * maker.transforms(match)[1])
    return values * maker.packed_element(match)


def _recipes(match: Any, maker: RegionMaker) -> list[str]:
    """What is done to the weights of a match, in the words of the documentation."""
    if not hasattr(match, "weight"):
        return []
    element = maker.packed_element(match)
    found = ["prepack"] if element else []
    if getattr(match, "norm", None) is not None:
        found.append("fold-batch-norm")
    if name := maker.transforms(match)[0]:
        found.append(name)
    stored = match.weight.meta["val"].dtype.itemsize
    if element > stored:
        found.append("widen-weight")
    elif 0 < element < stored:
        found.append("cast-weight")
    return found


def _with(detail: str, steps: list[str]) -> str:
    """The kinds of epilogue that were absorbed, each named once."""
    known = [part for part in detail.removeprefix("with ").split(", ") if part]
    joined = "+".join(steps)
    if joined and joined not in known:
        known.append(joined)
    return "with " + ", ".join(known) if known else ""


def uuid(request: Request) -> str:
    """Changes with our sources, the rows and what operators there are, so that no cached graph goes
    stale or is one that this process cannot run."""
    rows = [
        [sorted(value) if isinstance(value, frozenset) else value for value in astuple(row)]
        for row in request.region_rows
    ]  # sets print in another order in every process
    ranking = sorted((key, tuple(value)) for key, value in request.ranking.items())
    halves = [library.multiplies(dtype) for dtype in (torch.float16, torch.bfloat16)]
    found = (_sources(), rows, ranking, library.is_loaded(), halves, sorted(_untold(request)))
    return hashlib.sha256(repr(found).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A digest of this package: any file of it may decide what a lowered graph is."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def static_inputs(graph: fx.Graph) -> Collection[str]:
    """Names of the graph inputs that are parameters or buffers, by AOTAutograd's own account."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    positions = set(getattr(metadata, "static_input_indices", None) or ())
    placeholders = graph.find_nodes(op="placeholder")
    return {node.name for index, node in enumerate(placeholders) if index in positions}


def _untold(request: Request) -> set[int]:
    """Inputs that stay, but are inference tensors: whether those were written into cannot be told.
    A kernel would pack them in every call, which takes longer than most products."""
    inputs = request.example_inputs
    return {i for i in request.stays if isinstance(inputs[i], Tensor) and inputs[i].is_inference()}


def _packable(graph: fx.Graph, request: Request) -> Collection[str]:
    """Names of the inputs whose packed form can be kept."""
    names, untold = static_inputs(graph), _untold(request)
    if not untold:
        return names
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(request.example_inputs):  # some are of a subclass, and were parted
        return ()
    return set(names) - {placeholders[i].name for i in untold}


# --- around `lower`: what has to be true of the graph before and after it -------------------------


def lower_training(
    module: fx.GraphModule, request: Request, backward: bool = False
) -> list[Region]:
    """`lower` the forward or the backward of a training graph: its weights change in every step."""
    if request.inductor_config.get("layout_optimization") is False:  # images are to stay in rows
        left = tuple(row for row in request.region_rows if row.region not in _OF_CHANNELS_LAST)
        request = replace(request, region_rows=left)
    taken = lower(module.graph, request, ())
    return [replace(region, backward=backward) for region in taken]


def lower_inference(module: fx.GraphModule, request: Request) -> list[Region]:
    """`lower` an inference graph; where its memory shows, it lies as it would have without us."""
    strides = outputs.strides(module.graph)
    stands_for: dict[fx.Node, fx.Node] = {}
    names = _packable(module.graph, request)
    taken = lower(module.graph, request, names, stands_for)
    moved = [region for region in taken if not region.left]
    if any(region.name in _LAY_OUT_OTHERWISE for region in moved):
        outputs.put_back(module, strides, stands_for, group_norm.put_right)
    wide_images.keep(module.graph)
    for name in convolution_groups.join(module.graph, weights.Stays(names)):
        (ours,) = [one for one in taken if (one.name, one.provider) == _OUR_CONVOLUTIONS]
        ours.detail = _with(ours.detail, [name])
    if linear_groups.join(module.graph):
        (linears,) = [region for region in taken if (region.name, region.provider) == _OUR_LINEARS]
        linears.detail = _with(linears.detail, ["shared_input"])
    return taken
