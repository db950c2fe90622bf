"""What this project reads of torch's private state is there in this torch, and means what it meant.

`kernel_dispatch/dynamo.py` answers "unknown" where torch has moved something, so that nobody's code
stops; in a supported torch nothing may be unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.modules import rnn  # torch_xla puts another GRU into `nn`

import kernel_dispatch
from kernel_dispatch import devices, doctor, dynamo
from kernel_dispatch.diagnosis import diagnose
from kernel_dispatch.reporting import GraphReport
from tests.support.compiling import compile_at
from triton_kernels.availability import status as triton_status


@dataclass
class Watched:
    """A backend that writes down what is known while it compiles; runs the graph as it stands."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner, name = dynamo.owner()
        self.seen.append(
            {
                "compile_id": dynamo.compile_id(),
                "owner": owner,
                "name": name,
                "versions": dynamo.versions(),
                "why": dynamo.recompile_reason(),
                "break": dynamo.graph_break(module),
                "wrapper": dynamo.wrapper_in_work(),
            }
        )
        return module.forward


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y * 2


class Net(nn.Module):
    """Not torch's own Linear: what is compiled in place has to be the user's code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_torch_is_within_the_window_and_doctor_says_so() -> None:
    window = doctor.torch_window()
    assert window is not None
    minor = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    assert window[0] <= minor < window[1]
    row = next(row for row in diagnose(doctor.collect({})) if row.name == "torch")
    assert row.status == "ok"


def test_dynamo_tells_whose_graph_it_is_and_how_often_it_was_compiled() -> None:
    watched = Watched()
    compiled = torch.compile(doubled, backend=watched, dynamic=False)
    for size in (3, 5):
        compiled(torch.randn(size))
    first, second = watched.seen
    assert first["compile_id"][1] == 0
    assert second["compile_id"][1] == 1
    assert re.fullmatch(r".*\d+/1", second["compile_id"][0])
    assert first["owner"] is doubled
    assert first["name"] == "doubled"
    assert (first["versions"], second["versions"]) == (1, 2)
    assert first["why"] == ""
    assert "size" in second["why"]
    assert dynamo.recompile_limit() == torch._dynamo.config.recompile_limit


def test_dynamo_tells_where_a_graph_broke() -> None:
    watched = Watched()
    torch.compile(broken, backend=watched)(torch.randn(3))
    first, last = (one["break"] for one in watched.seen)
    assert first is not None
    assert re.search(rf"{re.escape(__file__)}:\d+", first.place)
    assert last is None


def test_the_wrapper_around_the_backend_is_found_from_both_sides() -> None:
    compiled = torch.compile(doubled, backend="unified", options={"level": "O1"})
    compiled(torch.randn(3))
    assert dynamo.wrapper_of(compiled) is not None
    module = Net()
    module.compile(backend="unified", options={"level": "O1"})
    module(torch.randn(2, 3))
    assert dynamo.wrapper_of(module) is not None
    assert [graph.runs for graph in kernel_dispatch.report(compiled)] == [1]
    assert [graph.runs for graph in kernel_dispatch.report(module)] == [1]


def test_frames_of_dynamo_are_logged() -> None:
    log = dynamo.FrameLog()
    torch.compile(doubled, backend="eager")(torch.randn(3))
    (frame,) = log.frames()
    assert frame.function == "doubled"
    assert frame.place.startswith(__file__)
    assert frame.skipped is None


def test_exceptions_by_which_torch_restarts_are_known() -> None:
    names = {kind.__name__ for kind in dynamo.control_flow_errors()}
    assert {"RestartAnalysis", "SkipFrame"} <= names


@pytest.mark.parametrize("name", ["eager", "inductor", "mkldnn", "openmp", "mha", "opt_einsum"])
def test_providers_that_need_torch_and_a_compiler_only_are_here(name: str) -> None:
    found = devices.probe_provider(name)
    assert found.available, found.reason


def test_triton_of_this_torch_imports() -> None:
    found = triton_status()
    assert found.importable, found.reason


LEVELS = ("O0", "O1", "O2")


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_runs_without_a_fallback_forward_and_backward(level: str) -> None:
    """The numbers and the report, as everywhere; sizes that vary, a weight that changes."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    compiled = compile_at(level, model)
    for rows in (16, 33, 50):
        x = torch.randn(rows, 64)
        compiled(x).square().sum().backward()
        found = model[0].weight.grad.clone()
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(found, model[0].weight.grad, rtol=1e-4, atol=1e-4)
        model.zero_grad()
    frozen = compile_at(level, model.eval())
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)
            model[0].weight.mul_(1.5)
    reports: list[GraphReport] = [
        *kernel_dispatch.report(compiled),
        *kernel_dispatch.report(frozen),
    ]
    assert reports
    assert all(graph.fallbacks == [] and graph.runs for graph in reports)
    assert {graph.provider for graph in reports} == ({"inductor"} if level == "O2" else {"eager"})


@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_recurrent_layers_are_captured_by_their_sizes(kind: type[nn.RNNBase]) -> None:
    """Dynamo's switch and callbacks are where they were, and nobody goes through the steps."""
    layer, doubler = kind(8, 16, 2, batch_first=True, bidirectional=True).eval(), doubled
    # Asked for: torch_xla switches off that Dynamo finds out by itself which sizes change.
    compiled = compile_at("O1", lambda x: layer(doubler(x))[0], fullgraph=True, dynamic=True)
    with torch.no_grad():
        for steps in (5, 7, 400, 9):
            x = torch.randn(2, steps, 8)
            torch.testing.assert_close(compiled(x), layer(doubled(x))[0])
    (graph,) = kernel_dispatch.report(compiled)
    assert [region.name for region in graph.regions] == ["recurrent"]
    assert not torch._dynamo.config.allow_rnn
