"""Which rows are held in registers, and for whom. What is gained is measured on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from lowering import rows_at_once

quick = pytest.mark.quick


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_at_once, "on_measured_gpus", lambda inputs: True)


def held(numbers: Any, hint: ReductionHint = ReductionHint.INNER, shared: bool = False) -> bool:
    features = SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=numbers)
    with pytest.MonkeyPatch.context() as patch:
        torchs_own = staticmethod(lambda features, cooperative: False)
        patch.setattr(InductorChoices, "should_use_persistent_reduction", torchs_own)
        return V.choices.should_use_persistent_reduction(features, shared)


@quick
@pytest.mark.usefixtures("on_hopper")
def test_which_rows() -> None:
    longest, one_more = sympy.Integer(8192), sympy.Integer(8193)
    assert not held(longest)
    with rows_at_once.read_once([]):
        assert held(longest)
        assert held(2048)
        assert not held(one_more)
        assert not held(sympy.Symbol("s0"))  # a size that changes may be any
        assert not held(longest, ReductionHint.OUTER)
        assert not held(longest, shared=True)
    assert not held(longest)


@quick
@pytest.mark.usefixtures("on_hopper")
def test_what_torch_holds_already_stays_so() -> None:
    features = SimpleNamespace(get_reduction_hint=lambda: ReductionHint.OUTER, reduction_numel=7)
    with pytest.MonkeyPatch.context() as patch, rows_at_once.read_once([]):
        torchs_own = staticmethod(lambda features, cooperative: True)
        patch.setattr(InductorChoices, "should_use_persistent_reduction", torchs_own)
        assert V.choices.should_use_persistent_reduction(features, False)


@quick
@pytest.mark.usefixtures("on_hopper")
def test_the_users_own_choices_count_more() -> None:
    class Own(InductorChoices):
        pass

    own = Own()
    with V.set_choices_handler(own), rows_at_once.read_once([]):
        assert V.choices is own


@quick
def test_other_devices_are_left_alone() -> None:
    assert not rows_at_once.on_measured_gpus([torch.ones(2), 3])
    with rows_at_once.read_once([torch.ones(2)]):
        assert type(V.choices) is InductorChoices


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("training", [False, True])
def test_graphs_are_compiled_with_it_and_backwards_are_not(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.graph import GraphLowering

    seen: list[tuple[bool, str]] = []
    real = GraphLowering.codegen

    def codegen(graph: Any) -> Any:
        seen.append((graph.is_backward, type(V.choices).__name__))
        return real(graph)

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    x = torch.randn(4, 2048, requires_grad=training)
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(lambda x: torch.sin(x).softmax(-1), backend="unified")(x)
        if training:
            out.sum().backward()
    wanted = [(False, "RowsAtOnce")]
    assert seen == [*wanted, (True, "InductorChoices")] if training else wanted
