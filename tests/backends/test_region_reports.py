"""What the report says of regions, also out of torch's caches; and regions that fail."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

import kernel_dispatch
from lowering import region_pass
from tests.support.compiling import every_row_applies
from tests.support.modules import Of, mlp, weight
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    hold,
    no_cached_graphs,
    places,
    provider_at,
)

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


@places()
def test_report(place: str) -> None:
    def spelled(m: Any, x: Tensor) -> Tensor:
        return torch.relu(functional.linear(x, m.w, m.b))

    model = Of(spelled, w=weight(48, 32), b=weight(48))
    line = inspect.getsourcelines(spelled)[1] + 1
    for cached in (False, True):  # what is known of a graph out of torch's caches is less
        torch._dynamo.reset()
        compiled = compile_in(place, model)
        with nullcontext() if cached else no_cached_graphs():
            hold(compiled, model, torch.randn(20, 32))
        provider = provider_at(place)
        assert_regions(compiled, ("linear", provider, 1, 1))
        (graph,) = kernel_dispatch.report(compiled)
        assert graph.region_runs("linear", provider) == 1
        assert f"region linear x1: {provider}, ran 1 time" in graph.text()
        (row,) = [r for r in graph.as_dict()["regions"] if r["region"] == "linear"]
        assert row["place"] == f"{__file__}:{line}"
        if not cached:
            assert details(compiled, "linear") == ["with relu"]
            assert (row["recipes"], row["packed_bytes"]) == (["prepack"], 48 * 32 * 4)


_SECOND_PROCESS = """
import torch
import kernel_dispatch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).eval()
x = torch.randn(64, 256)
c = torch.compile(model, backend="unified", options={OPTIONS})
with torch.no_grad():
    torch.testing.assert_close(c(x), model(x), rtol=1e-5, atol=1e-5)
    model[0].weight.mul_(2)
    torch.testing.assert_close(c(x), model(x), rtol=1e-5, atol=1e-5)
(g,) = kernel_dispatch.report(c)
print(g.cache, [r for r in g.as_dict()["regions"] if r["region"] == "linear"])
"""


@pytest.mark.slow
def test_in_a_second_process(python: Any, tmp_path: Any) -> None:
    """The cached graph holds a call of our operator: it has to be there, and be reported."""
    script = _SECOND_PROCESS.replace("{OPTIONS}", '{"level": "O2"}')
    outs = [
        python(script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")).stdout for _ in range(2)
    ]
    assert "'inductor': 'miss'" in outs[0]
    assert "'inductor': 'hit'" in outs[1]
    for out in outs:
        assert "'provider': 'openmp', 'count': 1, 'runs': 2" in out
    assert "'detail': 'with gelu_erf'" in outs[0]


# --- failures -------------------------------------------------------------------------------------


@places()
@pytest.mark.parametrize("when", ["compile", "run"])
def test_a_region_that_fails_falls_back(
    monkeypatch: pytest.MonkeyPatch, place: str, when: str
) -> None:
    """O1 runs library calls op by op; a library that fails there is a failure of ours as well."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the library could not create a primitive")

    model = mlp()
    broken = torch.library.Library("kernel_dispatch", "IMPL")
    if when == "compile":
        monkeypatch.setattr(region_pass, "lower", fail)
    else:
        broken.impl(f"{provider_at(place)}_linear", fail, "CPU", allow_override=True)
    try:
        # Sizes of their own, so that no cached graph makes compiling unnecessary.
        x = torch.randn(20 + PLACE_NUMBER[place] + 4 * (when == "run"), 64)
        compiled = compile_in(place, model)
        with torch.no_grad(), pytest.warns(kernel_dispatch.UnifiedWarning, match=f"{when}-failed"):
            got = compiled(x)
        with torch.no_grad():
            torch.testing.assert_close(got, model(x))
            torch.testing.assert_close(compiled(x), model(x))
    finally:
        broken._destroy()
    (graph,) = kernel_dispatch.report(compiled)
    assert {f.reason.code for f in graph.fallbacks} == {f"{when}-failed"}
    assert graph.runs == 2


PLACE_NUMBER = {"O1 mkldnn": 1, "O2 mkldnn": 2, "O2 openmp": 3}


def test_a_pass_of_the_users_own_runs_beside_regions() -> None:
    seen: list[int] = []

    def users_pass(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.nodes))

    model, x = mlp(), torch.randn(31, 64)
    options = {"inductor": {"post_grad_custom_pre_pass": users_pass}}
    compiled = torch.compile(model, backend="unified", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert seen
    (graph,) = kernel_dispatch.report(compiled)
    assert any(region.name == "linear" for region in graph.regions)
