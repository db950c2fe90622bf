"""Where Inductor's measured kernels do not compile, O3 computes what O2 does, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx, config

import kernel_dispatch
from tests.support.compiling import compile_at
from tests.support.regions import no_cached_graphs

Attempts = list[bool]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Inductor with a bug in its templates; the fixture's value is what was attempted."""
    made: Attempts = []
    generate = compile_fx.fx_codegen_and_compile

    def broken_with_templates(*args: Any, **kwargs: Any) -> Any:
        made.append(config.max_autotune)
        if config.max_autotune:
            raise AssertionError("a template's index has other dimensions\nand more lines")
        return generate(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", broken_with_templates)
    return made


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8))


def notes_of(compiled: Any) -> list[str]:
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.provider == "inductor" and graph.fallbacks == []
    return [note for note in graph.notes if "autotuning-failed" in note]


def test_inference_is_compiled_without_templates(attempts: Attempts) -> None:
    own, x = model().eval(), torch.randn(3, 6)
    compiled = compile_at("O3", own)
    with torch.no_grad(), no_cached_graphs():
        torch.testing.assert_close(compiled(x), own(x))
    assert attempts == [True, False]
    (note,) = notes_of(compiled)
    assert note.endswith("a template's index has other dimensions")  # the first line alone
    assert not config.max_autotune


def test_so_is_each_half_of_training(attempts: Attempts) -> None:
    own, x = model(), torch.randn(3, 6)
    compiled = compile_at("O3", own)
    with no_cached_graphs():
        compiled(x).square().sum().backward()
    gradients = [weight.grad for weight in own.parameters()]
    own.zero_grad()
    own(x).square().sum().backward()
    torch.testing.assert_close(gradients, [weight.grad for weight in own.parameters()])
    assert attempts == [True, False] * 2
    assert len(notes_of(compiled)) == 2


def test_at_o2_nothing_is_tried_twice(attempts: Attempts) -> None:
    own, x = model().eval(), torch.randn(3, 6)
    compiled = compile_at("O2", own)
    with torch.no_grad(), no_cached_graphs():
        torch.testing.assert_close(compiled(x), own(x))
    assert attempts == [False] and notes_of(compiled) == []


def test_a_graph_that_fails_either_way_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no code for this")

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", broken)
    own, x = model().eval(), torch.randn(3, 6)
    compiled = compile_at("O3", own)
    with torch.no_grad(), no_cached_graphs(), pytest.warns(kernel_dispatch.UnifiedWarning):
        torch.testing.assert_close(compiled(x), own(x))
    (graph,) = kernel_dispatch.report(compiled)
    assert [fallback.reason.code for fallback in graph.fallbacks] == ["compile-failed"]
    assert graph.provider == "eager"
