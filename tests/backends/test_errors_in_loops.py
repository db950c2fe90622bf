"""An index out of range within a loop that threads share: an error, and the process goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import kernel_dispatch
from lowering.errors_in_loops import is_a_wrong_index, with_errors_kept
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

Function = Callable[[Tensor, Tensor], Tensor]
# Each with a part of the generated source that says what it is an example of.
FUNCTIONS: dict[str, tuple[Function, str]] = {
    "embedding": (lambda table, places: functional.embedding(places, table) * 2, "omp for"),
    "rows": (lambda table, places: table[places].tanh(), "omp for"),
    "rows of the first places": (
        lambda table, places: table[places[:3, :100]].tanh(),
        "collapse(2)",
    ),
    "gather": (lambda table, places: table.gather(1, places) * 2, "omp for"),
    "scatter": (lambda table, places: table.scatter(1, places[:, :20], 1.0) * 2, "omp single"),
    "put": (lambda table, places: table.index_put((places[0],), table[:1]) * 2, "omp for"),
    "take": (lambda table, places: table.take(places) * 2, "omp for"),
    "sum of rows": (lambda table, places: table[places].sum(1), "omp for"),
    "sum of all": (lambda table, places: table[places].abs().sum(), "omp for"),
    "sum of softmax": (lambda table, places: table[places].softmax(-1).sum(1), "omp for"),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with size_limits_lifted(), no_cached_graphs():
        yield
    torch.set_num_threads(before)


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(50, 160), torch.randint(0, 50, (40, 150))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_eagers_error(name: str) -> None:
    (function, _), (table, places) = FUNCTIONS[name], given()
    wrong = places.clone()
    wrong[0, 3] = 10**6
    compiled = compile_at("O2", function)
    with torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(table, wrong)
        _, (code,) = run_and_get_code(compiled, table, places)
        with pytest.raises(type(eager.value)) as got:
            compiled(table, wrong)
        assert str(got.value).split("\n")[0] == str(eager.value).split("\n")[0]
        assert_contract(
            compiled(table, places),
            function(table, places),
            function(table.double(), places),
            "torch.float32",
        )
    assert "rethrow_exception" in code
    assert_ran_as_planned(compiled, "O2")
    assert kernel_dispatch.report(compiled)[0].runs_by_provider == {"inductor": 2}


@pytest.mark.parametrize("kind", ["omp for", "collapse(2)", "omp single"])
def test_each_kind_of_shared_loop_is_among_them(kind: str) -> None:
    """What the tests above would not show, if Inductor made other loops of those functions."""
    name = next(one for one, (_, example) in FUNCTIONS.items() if example == kind)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compile_at("O2", FUNCTIONS[name][0]), *given())
    assert kind in code
    assert "rethrow_exception" in code


def test_each_thread_may_find_an_error() -> None:
    table, places = given()
    compiled = compile_at("O2", FUNCTIONS["rows"][0])
    compiled(table, places)
    for _ in range(20):
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(table, places - 100)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pad", [(0, 0, 1, 1), (2, 3), (2, 3, 1, 1)], ids=str)
def test_under_a_mask(pad: tuple[int, ...], dtype: torch.dtype) -> None:
    """Which Inductor does not check: what it read of foreign memory had no error, or the last."""
    table, places = given()

    def padded(table: Tensor, places: Tensor) -> Tensor:
        return functional.pad(table[places], pad) * 2

    def added(table: Tensor, places: Tensor) -> Tensor:
        return functional.pad(table[places], pad).sum(1)

    for function in (padded, added):
        compiled = compile_at("O2", function)
        with torch.no_grad():
            own, exact = function(table.to(dtype), places), function(table.double(), places)
            assert_contract(compiled(table.to(dtype), places), own, exact, str(pad))
            for wrong in (53, -51, 10**9):
                beyond = places.clone()
                beyond[3, 4] = wrong
                with pytest.raises(IndexError, match="out of bounds"):
                    compiled(table.to(dtype), beyond)
        assert_ran_as_planned(compiled, "O2")


def test_while_a_graph_is_trained() -> None:
    table, places = given()
    table.requires_grad_()
    function = FUNCTIONS["embedding"][0]
    compiled = compile_at("O2", function)
    with pytest.raises(IndexError, match="out of range"):
        compiled(table, places + 50)
    double = table.detach().double().requires_grad_()
    got, own, exact = (
        torch.autograd.grad(one(where, places).square().sum(), where)
        for one, where in ((compiled, table), (function, table), (function, double))
    )
    assert_contract(got, own, exact, "torch.float32")
    assert_ran_as_planned(compiled, "O2")


def test_in_a_graph_that_writes_into_its_inputs() -> None:
    """Eager cannot be asked on top of what may be half-written; the graph stays compiled."""

    def function(count: Tensor, table: Tensor, places: Tensor) -> Tensor:
        count.add_(1)
        return table[places] * 2

    table, places = given()
    count = torch.zeros(40, 150)
    compiled = compile_at("O2", function)
    with torch.no_grad():
        compiled(count, table, places)
        with pytest.raises(RuntimeError, match="index out of bounds") as got:
            compiled(count, table, places + 50)
        assert "half-written" in "".join(getattr(got.value, "__notes__", ["half-written"]))
        torch.testing.assert_close(compiled(count, table, places), table[places] * 2)
    assert_ran_as_planned(compiled, "O2")
    assert kernel_dispatch.report(compiled)[0].runs_by_provider == {"inductor": 2}


def test_a_fault_of_ours_is_no_wrong_index() -> None:
    """A graph with one of those goes to eager."""
    assert is_a_wrong_index(
        RuntimeError("kernel, main.cpp:9, index out of bounds: 0 <= tmp3 < 50L")
    )
    assert is_a_wrong_index(IndexError("index 7 is out of bounds for dimension 0 with size 5"))
    for error in (IndexError("list index out of range"), KeyError("is out of bounds")):
        assert not is_a_wrong_index(error)
    assert not is_a_wrong_index(RuntimeError("the kernel failed"))


def test_with_sizes_that_change() -> None:
    table, places = given()
    compiled = compile_at("O2", FUNCTIONS["rows"][0], dynamic=True)
    for count in (40, 30, 20):
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(table, places[:count] + 50)
        torch.testing.assert_close(compiled(table, places[:count]), table[places[:count]].tanh())


def test_a_loop_without_checks_is_left_as_it_is() -> None:
    with torch.no_grad():
        _, (code,) = run_and_get_code(compile_at("O2", lambda x: x.tanh() + 1), given()[0])
    assert "omp for" in code
    assert "rethrow_exception" not in code


def test_a_source_of_another_form_is_left_as_it_is() -> None:
    for source in (
        "",
        "#pragma omp for",
        "{\n#pragma omp for\nfor (;;) { TORCH_CHECK(x) }\n}",
        "{\n  #pragma omp for\n  for (;;)\n  {\n    TORCH_CHECK(x)\n",
    ):
        assert with_errors_kept(source) == source
