"""Which operators of torch mind how their inputs lie in memory: `lowering.outputs` knows them all.

A graph is traced with eager's layouts. Where a convolution of ours gives images channels last, what
follows reads another one than in the trace: such an operator raises, or computes other numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from lowering import outputs
from tests.sweep.samples import UNINITIALISED, Case, cases, ops, samples

aten = torch.ops.aten
OPS = [case for case in cases(("float32",)) if case.op not in UNINITIALISED]
SAMPLES = 5
PARTS = 4  # of the database


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def some_channels_of_more(x: Tensor) -> Tensor:
    wider = torch.cat((x, x, x[:, :1]), 1)
    return channels_last(wider)[:, : x.shape[1]]


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (channels_last, some_channels_of_more)


def traced(case: Case, arguments: Any) -> tuple[fx.GraphModule, list[Tensor]] | None:
    """As O1 runs it; None where nothing has two dimensions, or torch cannot trace it."""
    op = ops()[case.op, case.variant]
    leaves, spec = pytree.tree_flatten(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> list[Tensor]:
        left = list(tensors)
        filled = [left.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return [out for out in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(out, Tensor)]

    if not any(_can_lie_otherwise(tensor) for tensor in given):
        return None
    try:
        module = make_fx(functionalize(call))(*[tensor.clone() for tensor in given])
    except Exception:  # noqa: BLE001  data-dependent, sparse, quantised, out of place ...
        return None
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    module.recompile()
    return module, given


def _can_lie_otherwise(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dim() > 1 and tensor.numel() > 0


def run(module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    # The CPU's only: for a GPU to come, torch.manual_seed would keep a copy of the stack each time.
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        result: list[Tensor] = module(*inputs)
    return result


def minds(module: fx.GraphModule, given: list[Tensor]) -> str:
    """What goes wrong when the inputs lie otherwise; empty: nothing does."""
    rows = run(module, [tensor.clone() for tensor in given])
    wrong = _with_layouts(module, given, rows)
    if wrong and not all(map(_same, rows, run(module, [tensor.clone() for tensor in given]))):
        return ""  # the same inputs do not give the same numbers either
    return wrong


def _with_layouts(module: fx.GraphModule, given: list[Tensor], rows: list[Tensor]) -> str:
    for layout in LAYOUTS:
        inputs = [layout(t.clone()) if _can_lie_otherwise(t) else t.clone() for t in given]
        try:
            got = run(module, inputs)
        except RuntimeError as error:
            return f"{layout.__name__}: {error}"
        if not all(map(_same, got, rows)):
            return f"{layout.__name__}: other numbers"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided:
        return True
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def is_known(node: fx.Node) -> bool:
    listed = (*outputs._READ_MEMORY, *outputs._READ_DENSE)
    return node.target in listed or outputs._draws_in_order(node)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_that_minds_is_known(part: int) -> None:
    unknown, known = [], 0
    for case in OPS[part::PARTS]:
        for sample in samples(case, requires_grad=False, limit=SAMPLES):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = traced(case, sample.arguments)
                wrong = minds(*found) if found is not None else ""
            if wrong and found is not None:
                expected = any(map(is_known, found[0].graph.nodes))
                known += expected
                unknown += [] if expected else [f"{case}: {wrong}"]
    assert unknown == []
    assert known  # or the layouts did not reach the operators
