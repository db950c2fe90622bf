"""explain(): what Dynamo and the backend did with one call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import configure, explain

X = torch.randn(5)


@pytest.fixture(autouse=True)
def without_code_generation() -> Any:
    """explain() takes the settings in force: O1 is quick, and Dynamo's side is the same."""
    with configure(level="O1"):
        yield


def line_of(fn: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    offset = next(number for number, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + offset}"


def clean(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x.sin() * scale + 1


def test_a_clean_function() -> None:
    told = explain(clean, X, scale=3.0)
    assert torch.equal(told.result, clean(X, 3.0))
    assert told.called
    assert told.never_called is None
    assert (told.graph_breaks, told.skipped, told.recompiles) == ([], [], [])
    (graph,) = told.graphs
    assert (graph.level, graph.provider, graph.runs) == ("O1", "eager", 1)
    assert graph.function.endswith("clean")
    assert graph.place == line_of(clean, "return")
    assert "target cpu" in str(told)


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() + 1
    print(end="")
    return y.cos() * 2


def test_a_graph_break_has_its_line() -> None:
    told = explain(broken, X)
    assert torch.equal(told.result, broken(X))
    assert len(told.graphs) == 2
    (reason,) = told.graph_breaks
    assert reason.code == "graph-break"
    assert reason.place == line_of(broken, "print")
    assert f"graph break: {reason}" in str(told)


def loops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.sin() + 1
        torch._dynamo.graph_break()
    return x * 2


def test_a_break_inside_a_loop_names_frame_and_line() -> None:
    told = explain(loops, X)
    assert torch.equal(told.result, loops(X))
    text = str(told)
    assert "loops" in text
    places = [reason.place for reason in [*told.graph_breaks, *told.skipped]]
    if not places:  # torch 2.8 keeps no line for a function that it skips: then the function's own
        assert told.never_called is not None
        places = [told.never_called.place]
        assert places == [line_of(loops, "def loops")]
        return
    assert line_of(loops, "graph_break") in places, text


def test_a_break_in_a_called_function_names_its_line() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x + 1) - 1

    told = explain(outer, X)
    assert torch.equal(told.result, outer(X))
    assert line_of(inner, "graph_break") in [reason.place for reason in told.graph_breaks]


def test_recompiles() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return once(x) + once(x[:3]).sum()

    once = torch.compile(clean, backend="unified", dynamic=False)

    def driver(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with kernel_dispatch.explaining.watching() as watched:
        once(X), once(torch.randn(7))
    told = watched.explanation()
    assert len(told.graphs) == 2
    (text,) = told.recompiles
    assert "clean" in text
    assert "size" in text
    assert "recompiled" in str(told)
    assert torch.equal(twice(X), clean(X) + clean(X[:3]).sum())
    assert driver(X) is X


# torch.compile itself looks through a `disable` on the very function that it is given.
DISABLED = torch.compiler.disable(lambda x: x.sin() + 1)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("no tensor", lambda x: 3),
        ("disabled", lambda x: DISABLED(x)),
    ],
)
def test_never_called(name: str, fn: Callable[..., Any]) -> None:
    told = explain(fn, X)
    assert not told.called
    assert told.graphs == []
    assert told.never_called is not None
    assert told.never_called.code == "never-called"
    assert "never called" in str(told)
    assert told.as_dict()["called"] is False


def test_a_stance_that_forbids_compiling() -> None:
    with torch.compiler.set_stance("force_eager"):
        told = explain(clean, X)
    assert torch.equal(told.result, clean(X))
    assert told.never_called is not None


def test_an_already_compiled_callable_keeps_its_options() -> None:
    compiled = torch.compile(clean, backend="unified", options={"level": "O0"})
    compiled(X)
    told = explain(compiled, X)
    assert [graph.level for graph in told.graphs] == ["O0"]
    assert torch.equal(told.result, clean(X))
    assert told.recompiles == []
    compiled(X)
    assert kernel_dispatch.report(compiled)[0].runs == 2


def test_an_already_compiled_module_keeps_its_options() -> None:
    compiled = torch.compile(nn.Linear(5, 2), backend="unified", mode="O0")
    told = explain(compiled, X)
    assert [graph.level for graph in told.graphs] == ["O0"]
    assert told.result.shape == (2,)


def test_training() -> None:
    model = nn.Linear(5, 2)
    told = explain(model, X)
    told.result.sum().backward()
    assert model.weight.grad is not None
    assert told.graphs[0].facts.training


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(IndexError):
        explain(lambda x: x[torch.tensor([9])] + 1, X)


def test_as_dict_and_json() -> None:
    told = explain(broken, X)
    shown = json.loads(told.json())
    assert shown["called"] is True
    assert shown["never_called"] is None
    assert shown["graph_breaks"][0]["code"] == "graph-break"
    assert shown["graphs"][0]["target"] == "cpu"
    assert shown["torch"] == torch.__version__
    assert shown == json.loads(json.dumps(told.as_dict(), default=str))
