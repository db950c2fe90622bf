"""Graphs that Dynamo shares, explain() beside earlier compilations, and reports that travel."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import kernel_dispatch as kd
from kernel_dispatch.explaining import _can_isolate

pytestmark = pytest.mark.quick
X = torch.randn(4, 3)
O0 = {"level": "O0"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


def test_configure_around_a_shared_graph_is_not_ignored_silently() -> None:
    model = Net()
    with kd.configure(level="O1"):
        torch.compile(model, backend="unified")(X)
    with kd.configure(level="O0"):
        again = torch.compile(model, backend="unified")
        with pytest.warns(kd.UnifiedWarning, match="level is O1 and configure.. asks for O0"):
            again(X)
        again(X)  # said once; a second warning would be an error here
    again(X)
    assert kd.report(again)[0].runs == 4


def test_an_option_beats_the_context_without_a_word() -> None:
    compiled = torch.compile(Net(), backend="unified", options=O0)
    compiled(X)
    with kd.configure(level="O1"):
        compiled(X)
    assert [(graph.level, graph.runs) for graph in kd.report(compiled)] == [("O0", 2)]


def test_a_second_instance_is_told_of_the_graph_that_it_shares() -> None:
    first, second = (torch.compile(Net(), backend="unified", options=O0) for _ in range(2))
    first(X), second(X)
    (shared,) = kd.report(second)
    assert shared is kd.report(first)[0]
    assert shared.runs == 2
    assert not kd.report(torch.compile(nn.Tanh(), backend="unified"))


@pytest.mark.skipif(not _can_isolate(), reason="this torch counts all compilations of a function")
def test_explain_leaves_the_recompile_limit_alone() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    compiled = torch.compile(f, backend="unified", options=O0)
    compiled(X)
    with kd.configure(level="O0"):
        for _ in range(12):
            assert kd.explain(f, X).called
    before = len(kd.report(compiled))
    compiled(X.double())
    assert len(kd.report(compiled)) == before + 1


def test_explain_takes_compiled_methods_and_modules_compiled_in_place() -> None:
    class Holder:
        scale = 3

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + 1

    told = kd.explain(torch.compile(Holder().method, backend="unified", options=O0), X)
    assert torch.equal(told.result, X * 3 + 1)
    assert told.graphs[0].level == "O0"
    model = Net()
    model.compile(backend="unified", options=O0)
    model(X)
    with kd.configure(level="O0"):
        told = kd.explain(model, X)
    assert told.called
    assert model._compiled_call_impl is not None


def test_methods_of_two_objects_are_told_apart() -> None:
    class Holder:
        def __init__(self, scale: int) -> None:
            self.scale = scale

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    one, two = Holder(2), Holder(3)
    torch.compile(one.method, backend="unified", options=O0)(X)
    assert len(kd.report(one.method)) == 1
    assert not kd.report(two.method)


def test_reports_travel() -> None:
    torch.compile(Net(), backend="unified", options=O0)(X)
    sent = pickle.loads(pickle.dumps(kd.report()))
    assert sent.as_dict() == kd.report().as_dict()
    assert copy.deepcopy(sent[0]).runs == 1
    assert isinstance(kd.report()[:1], kd.Report)
    assert repr(kd.report()) == kd.report().text()
    sent[0].ran("eager")
    assert sent[0].runs == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda:²"}, "cuda:²"),
        ({"threads": "²"}, "²"),
        ({"threads": 10**30}, "4096"),
        ({"disable": b"mkldnn"}, "b'mkldnn'"),
        ({"inductor": {"cpp.threads": "x"}}, "cpp.threads='x'"),
        ({"inductor": {"max_autotune": 1}}, "give a bool"),
    ],
)
def test_odd_values_get_one_clear_error(options: dict, named: str) -> None:
    with pytest.raises(kd.SettingError, match=re.escape(named)):
        torch.compile(Net(), backend="unified", options=options)(X)


def test_a_mode_that_is_no_string() -> None:
    from kernel_dispatch.settings import resolve

    with pytest.raises(kd.SettingError, match="mode="):
        resolve(mode=["x"])  # type: ignore[arg-type]
