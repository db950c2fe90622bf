"""A weight that changes after compilation shows in the next output, packed or not.

oneDNN's linear region is for AMD processors with AVX-512. On other machines the features are
injected, so that the same code runs: only its speed is not what it would be.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from tests.conftest import Python
from tests.support.compiling import compile_at
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.reports import assert_ran_as_planned, providers_of

LEVELS = ("O0", "O1", "O2")
Compiled = Any


def conv_bn() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model(torch.randn(4, 3, 8, 8) * 2 + 1)  # running statistics that are not the initial ones
    return model.eval()


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(16, 8), nn.ReLU()), torch.randn(4, 16)),
    "conv_bn": lambda: (conv_bn(), torch.randn(2, 3, 8, 8)),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)),
        torch.randint(0, 20, (5,)),
    ),
}


def load_state_dict(model: nn.Module) -> None:
    state = {k: v * 2 + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)


def in_place_through_data(model: nn.Module) -> None:
    """`.data` has a version counter of its own, so that the parameter's does not move."""
    for parameter in model.parameters():
        parameter.data.mul_(-2)


def swapped(model: nn.Module) -> None:
    """`module.to()` and functional_call replace what is behind a Parameter object."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.randn_like(parameter)))


CHANGES = [load_state_dict, optimizer_step, new_data, in_place, in_place_through_data, swapped]


def hold(level: str, compiled: Compiled, model: nn.Module, x: torch.Tensor, where: str) -> Any:
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        got, eager = compiled(x), model(x)
        reference = wide(x.double() if x.is_floating_point() else x)
    if level == "O0":
        assert_bit_identical(got, eager, where)
    else:
        assert_contract(got, eager, reference, where)
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_a_change_shows_in_the_next_output(name: str, level: str) -> None:
    model, x = MODELS[name]()
    compiled = compile_at(level, model)
    before = hold(level, compiled, model, x, "before")
    for change in CHANGES:
        change(model)
        after = hold(level, compiled, model, x, f"{level} after {change.__name__}")
        assert not torch.equal(before, after), f"{change.__name__} changed nothing"
        before = after
    if name == "conv_bn":
        model[1].running_mean.add_(1)
        after = hold(level, compiled, model, x, "after a change of the running mean")
        assert not torch.equal(before, after)
    assert_ran_as_planned(compiled, level)


# --- the linear region of oneDNN ------------------------------------------------------------------


@pytest.fixture
def epyc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's CPU, as one that the row for oneDNN's linear takes."""
    from kernel_dispatch import devices
    from lowering.targets.cpu import TARGET

    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    real = devices.probe

    def probe(target: Any) -> Any:
        found = real(target)
        if target is not TARGET:
            return found
        features = sorted({*found.details["features"], "amd", "avx512f"})
        return replace(found, details={**found.details, "features": features})

    monkeypatch.setattr(devices, "probe", probe)
    yield
    from lowering.providers import mkldnn

    mkldnn.weights.clear()


def big(bias: bool = True, n: int = 1) -> nn.Module:
    layers = [part for _ in range(n) for part in (nn.Linear(256, 256, bias=bias), nn.GELU())]
    return nn.Sequential(*layers).eval()


ROWS = 64  # 2 * 64 * 256 * 256 FLOPs are above the row's limit of 4 MFLOP

REGION = pytest.mark.usefixtures("epyc")
BOTH = pytest.mark.parametrize("level", ["O1", "O2"])


def region_rows(compiled: Compiled) -> list[tuple[str, str, int, int]]:
    """(region, provider, how many in the graph, how often run) over all graphs."""
    return [
        (row["region"], row["provider"], row["count"], row["runs"])
        for graph in kernel_dispatch.report(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] != "graph"
    ]


@REGION
@BOTH
@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS)], ids=["2d", "3d"])
@pytest.mark.parametrize("bias", [True, False])
def test_region_numbers_and_rows(level: str, bias: bool, shape: tuple[int, ...]) -> None:
    model, x = big(bias, n=2), torch.randn(*shape, 256)
    compiled = compile_at(level, model)
    for call in range(3):
        hold(level, compiled, model, x, f"call {call}")
    assert_ran_as_planned(compiled, level)
    assert region_rows(compiled) == [("linear", "mkldnn", 2, 6)]
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.region_runs("linear", "mkldnn") == 6
    assert "region linear x2: mkldnn, ran 6 times" in graph.text()


@REGION
@BOTH
def test_region_rows_after_a_cache_hit(level: str) -> None:
    """Inductor does not run the pass again for a graph that it takes from its cache."""
    model, x = big(), torch.randn(ROWS, 256)
    for _ in range(2):
        torch._dynamo.reset()
        compiled = compile_at(level, model)
        hold(level, compiled, model, x, level)
        assert region_rows(compiled) == [("linear", "mkldnn", 1, 1)]


@REGION
@BOTH
def test_region_stays_fresh(level: str) -> None:
    from lowering.providers import mkldnn

    model, x = big(), torch.randn(ROWS, 256)
    compiled = compile_at(level, model)
    before = hold(level, compiled, model, x, "before")
    packed = mkldnn.weights.packed
    hold(level, compiled, model, x, "again")
    assert mkldnn.weights.packed == packed, "packed again although nothing changed"
    for change in (load_state_dict, optimizer_step, new_data, in_place, swapped):
        change(model)
        after = hold(level, compiled, model, x, f"{level} after {change.__name__}")
        assert not torch.equal(before, after)
        before = after
    assert all(row[:2] == ("linear", "mkldnn") for row in region_rows(compiled))
    assert sum(row[3] for row in region_rows(compiled)) == 7


@REGION
@BOTH
def test_region_sees_a_change_through_data(level: str) -> None:
    """`weight.data.mul_(2)` moves neither the version counter nor the pointer."""
    model, x = big(), torch.randn(ROWS, 256)
    compiled = compile_at(level, model)
    hold(level, compiled, model, x, "before")
    in_place_through_data(model)
    hold(level, compiled, model, x, "after")
    assert sum(row[3] for row in region_rows(compiled)) == 2


@REGION
@BOTH
def test_region_written_by_hand(level: str) -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(128, 256))
            self.b = nn.Parameter(torch.randn(128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w.t() + self.b

    model, x = ByHand(), torch.randn(ROWS * 2, 256)
    compiled = compile_at(level, model)
    before = hold(level, compiled, model, x, "before")
    in_place(model)
    assert not torch.equal(before, hold(level, compiled, model, x, "after"))
    assert region_rows(compiled) == [("linear", "mkldnn", 1, 2)]
    rows = kernel_dispatch.report(compiled)[0].as_dict()["regions"]  # also out of a warm cache
    line = inspect.getsourcelines(ByHand.forward)[1] + 1
    assert [r["place"] for r in rows if r["region"] == "linear"] == [f"{__file__}:{line}"]


@REGION
@BOTH
def test_region_with_a_dynamic_batch(level: str) -> None:
    model = big()
    compiled = compile_at(level, model, dynamic=True)
    for rows in (64, 96, 1, 33):
        hold(level, compiled, model, torch.randn(rows, 256), f"{rows} rows")
    assert len(kernel_dispatch.report(compiled)) <= 2  # Dynamo specialises on a batch of 1
    assert region_rows(compiled)[0][:3] == ("linear", "mkldnn", 1)
    assert region_rows(compiled)[0][3] >= 3


@REGION
@BOTH
def test_region_with_an_empty_batch(level: str) -> None:
    model = big()
    compiled = compile_at(level, model)
    hold(level, compiled, model, torch.randn(ROWS, 256), "full")
    hold(level, compiled, model, torch.randn(0, 256), "empty")
    assert sum(row[3] for row in region_rows(compiled) if row[1] == "mkldnn") == 1


@REGION
@BOTH
def test_region_takes_strided_inputs(level: str) -> None:
    model = big()
    compiled = compile_at(level, model)
    hold(level, compiled, model, torch.randn(256, ROWS).t(), "transposed")
    hold(level, compiled, model, torch.randn(ROWS, 512)[:, ::2], "every other column")
    assert sum(row[3] for row in region_rows(compiled)) == 2


@REGION
@BOTH
def test_weights_that_are_inputs_are_not_packed(level: str) -> None:
    from lowering.providers import mkldnn

    before = mkldnn.weights.packed

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w, b).relu()

    args = (torch.randn(ROWS, 256), torch.randn(256, 256), torch.randn(256))
    compiled = compile_at(level, fn)
    with torch.no_grad():
        assert_contract(compiled(*args), fn(*args), fn(*(a.double() for a in args)), level)
    assert region_rows(compiled) == []
    assert mkldnn.weights.packed == before


@REGION
@BOTH
def test_training_graphs_are_not_touched(level: str) -> None:
    model = big().train()
    twin, x = copy.deepcopy(model), torch.randn(ROWS, 256)
    compiled = compile_at(level, model)
    compiled(x).sum().backward()
    twin(x).sum().backward()
    for got, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, eager.grad)
    assert region_rows(compiled) == []
    assert_ran_as_planned(compiled, level)


@REGION
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_where_the_row_does_not_apply(level: str) -> None:
    """Not at O0, not for other dtypes, not for small products, not when it is disabled."""
    cases = [
        (big().double(), torch.randn(ROWS, 256).double(), {}),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), {}),
        (big(), torch.randn(ROWS, 256), {"disable": ["mkldnn"]}),
    ]
    if level == "O0":
        cases = [(big(), torch.randn(ROWS, 256), {})]
    for model, x, options in cases:
        compiled = compile_at(level, model, options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert region_rows(compiled) == []


@REGION
@BOTH
def test_region_in_inference_mode(level: str) -> None:
    model, x = big(), torch.randn(ROWS, 256)
    compiled = compile_at(level, model)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    hold(level, compiled, model, x, "no_grad")
    with torch.inference_mode():
        loaded = copy.deepcopy(model)  # weights without a version counter
        other = compile_at(level, loaded)
        before = other(x)
        torch.testing.assert_close(before, loaded(x), rtol=1e-5, atol=1e-5)
        loaded[0].weight.mul_(3)
        torch.testing.assert_close(other(x), loaded(x), rtol=1e-5, atol=1e-5)


@REGION
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["compile", "run"])
def test_a_region_that_fails_falls_back(
    monkeypatch: pytest.MonkeyPatch, level: str, when: str
) -> None:
    """O1 runs library calls op by op; a library that fails there is a failure of ours as well."""
    from lowering import region_pass
    from lowering.providers import mkldnn

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("oneDNN could not create a primitive")

    if when == "compile":
        monkeypatch.setattr(region_pass, "lower", fail)
    else:
        monkeypatch.setattr(mkldnn.weights, "_pack", fail)
    model, x = big(n=3), torch.randn(ROWS + (level == "O1") + 2 * (when == "run"), 256)
    compiled = compile_at(level, model)
    with torch.no_grad(), pytest.warns(kernel_dispatch.UnifiedWarning, match=f"{when}-failed"):
        got = compiled(x)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x))
        torch.testing.assert_close(compiled(x), model(x))
    (graph,) = kernel_dispatch.report(compiled)
    assert [f.reason.code for f in graph.fallbacks] == [f"{when}-failed"] * len(graph.fallbacks)
    assert graph.runs == 2


@REGION
@BOTH
def test_region_keeps_written_inputs(level: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            y = self.layer(x)
            cache.copy_(y)
            return cache * 2

    model = Writes().eval()
    compiled, x = compile_at(level, model), torch.randn(ROWS, 256)
    with torch.no_grad():
        for call in range(3):
            cache = torch.zeros(ROWS, 256)
            got = compiled(x, cache)
            expected = model.layer(x)
            torch.testing.assert_close(cache, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got, expected * 2, rtol=1e-5, atol=1e-5)
            assert int(model.calls) == call + 1
    assert region_rows(compiled) == [("linear", "mkldnn", 1, 3)]


@REGION
def test_equal_layers_share_nothing_that_they_should_not() -> None:
    """Two models with one compiled graph between them (a cache hit) keep their own weights."""
    first, second, x = big(), big(), torch.randn(ROWS, 256)
    one, two = compile_at("O2", first), compile_at("O2", second)
    a = hold("O2", one, first, x, "first")
    b = hold("O2", two, second, x, "second")
    assert not torch.equal(a, b)
    hold("O2", one, first, x, "first again")


@REGION
def test_packed_weights_are_forgotten_with_their_model() -> None:
    import gc

    from lowering.providers import mkldnn

    mkldnn.weights.clear()
    model, x = big(), torch.randn(ROWS, 256)
    compiled = compile_at("O1", model)
    with torch.no_grad():
        compiled(x)
    assert len(mkldnn.weights._entries) == 1
    del compiled, model
    torch._dynamo.reset()
    gc.collect()
    assert len(mkldnn.weights._entries) == 0


_SECOND_PROCESS = """
import sys
from dataclasses import replace
import torch
import kernel_dispatch
from kernel_dispatch import devices

real = devices.probe
def probe(target):
    found = real(target)
    if target.name != "cpu":
        return found
    features = sorted({*found.details["features"], "amd", "avx512f"})
    return replace(found, details={**found.details, "features": features})
devices.probe = probe

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).eval()
x = torch.randn(64, 256)
c = torch.compile(model, backend="unified")
with torch.no_grad():
    torch.testing.assert_close(c(x), model(x), rtol=1e-5, atol=1e-5)
    model[0].weight.mul_(2)
    torch.testing.assert_close(c(x), model(x), rtol=1e-5, atol=1e-5)
(g,) = kernel_dispatch.report(c)
print(g.cache, [r for r in g.as_dict()["regions"] if r["region"] == "linear"])
"""


@pytest.mark.slow
def test_region_in_a_second_process(python: Python, tmp_path: Any) -> None:
    """The cached graph holds a call of our operator: it has to be there, and be reported."""
    outs = [
        python(_SECOND_PROCESS, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")).stdout
        for _ in range(2)
    ]
    assert "'inductor': 'miss'" in outs[0]
    assert "'inductor': 'hit'" in outs[1]
    for out in outs:
        assert "'provider': 'mkldnn', 'count': 1, 'runs': 2" in out


@REGION
def test_providers_of_a_graph_with_a_region() -> None:
    compiled = compile_at("O2", big())
    with torch.no_grad():
        compiled(torch.randn(ROWS, 256))
    assert providers_of(compiled) == ["inductor"]
