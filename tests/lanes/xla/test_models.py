"""The model set through XLA, from tensors on the CPU: outputs, a training step, who computed."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

import kernel_dispatch
from kernel_dispatch.numerics import to_reference
from tests.models.zoo import ENTRIES, Entry, outputs
from tests.support.numerics import assert_contract

pytestmark = pytest.mark.slow

NAMES = {entry.name: entry for entry in ENTRIES}
# The router's experts are computed by operators of transformers, which XLA does not have.
SPLIT = {"mixture_of_experts": {"aten.histc.default", "transformers.grouped_mm_fallback.default"}}


def assert_ran_on_xla(compiled: Any, entry: Entry, runs: int) -> None:
    """Every graph ran there each time; nothing fell back but what XLA lacks, by name."""
    graphs = kernel_dispatch.report(compiled)
    assert len(graphs) > 0
    lacking = SPLIT.get(entry.name, set())
    for graph in graphs:
        assert (graph.target, graph.runs_by_provider) == ("xla", {"torch_xla": runs})
        assert {fallback.reason.code for fallback in graph.fallbacks} <= {"op-unsupported"}
        told = " ".join(fallback.reason.text for fallback in graph.fallbacks)
        assert all(name in told for name in lacking)
        assert bool(told) == bool(lacking)


@pytest.mark.filterwarnings("ignore::lowering.errors.UnifiedWarning")
@pytest.mark.parametrize("name", NAMES)
def test_outputs(name: str) -> None:
    entry = NAMES[name]
    model = entry.model()
    compiled = torch.compile(model, backend="unified")
    for seed in (1, 2):
        batch = entry.batch(seed)
        with torch.no_grad():
            got, eager = outputs(compiled(**batch)), outputs(model(**batch))
            reference = _in_float64(model, batch)
        assert all(value.device.type == "cpu" for value in got.values())
        _compare(got, eager, reference, f"{name} {seed}")
    assert_ran_on_xla(compiled, entry, runs=2)


# XLA adds up the gradient of a bias in an order of its own: on a Xeon 1.07 times what the contract
# allows, on EPYC within it.
SUMMED_OTHERWISE = {"state_space": "dt_proj.bias"}


@pytest.mark.filterwarnings("ignore::lowering.errors.UnifiedWarning")
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    entry = NAMES[name]
    model, batch = entry.model(), entry.batch(1)
    compiled = torch.compile(model, backend="unified")
    got = _gradients(model, compiled, batch)
    assert_ran_on_xla(compiled, entry, runs=1)
    eager = _gradients(model, model, batch)
    wide = copy.deepcopy(model).double()
    reference = None
    with contextlib.suppress(RuntimeError):  # transformers' grouped product takes no float64
        reference = _gradients(wide, wide, to_reference(batch))
    for tree in (got, eager, reference or {}):
        for key in [key for key in tree if key.endswith(entry.null_gradients or ("-",))]:
            del tree[key]
    for key in [key for key in got if key.endswith(SUMMED_OTHERWISE.get(name, "-"))]:
        torch.testing.assert_close(got.pop(key), eager.pop(key), rtol=1e-4, atol=1e-7)
        if reference is not None:
            del reference[key]
    _compare(got, eager, reference, name)


def _compare(got: Any, eager: Any, reference: Any, where: str) -> None:
    if reference is not None:
        assert_contract(got, eager, reference, where)
    else:
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


def _gradients(model: torch.nn.Module, call: Any, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    call(**batch).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _in_float64(model: torch.nn.Module, batch: Any) -> Any:
    with contextlib.suppress(RuntimeError):  # transformers' grouped product takes no float64
        return outputs(copy.deepcopy(model).double()(**to_reference(batch)))
    return None
