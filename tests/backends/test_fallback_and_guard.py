"""When a lowering fails: eager's answer, one warning, a row in the report, an error if strict."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import StrictModeError, UnifiedWarning
from tests.conftest import Python
from tests.support.compiling import compile_at
from tests.support.reports import fallbacks_of


def fn(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + x


def written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 10


X = torch.randn(8)


class Injected(RuntimeError):
    """What the broken lowerings of this file raise."""


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replace Inductor's entry by a function of ours: (graph's forward, call number, args)."""
    from torch._inductor import compile_fx as module

    def install(run: Callable[..., Any]) -> None:
        def fake(gm: Any, inputs: Any, **_: Any) -> Any:
            calls = [0]

            def compiled(*args: Any) -> Any:
                calls[0] += 1
                return run(gm.forward, calls[0], *args)

            return compiled

        monkeypatch.setattr(module, "compile_fx", fake)

    return install


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    from torch._inductor import compile_fx as module

    def install(error: BaseException) -> None:
        def fake(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(module, "compile_fx", fake)

    return install


def unified(f: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(f, backend="unified", options=options)


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, UnifiedWarning)]


class Warned:
    def __enter__(self) -> list[str]:
        self._context = warnings.catch_warnings(record=True)
        self._raw = self._context.__enter__()
        warnings.simplefilter("always")
        self._shown: list[str] = []
        return self._shown

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._shown += our_warnings(self._raw)


# --- compile time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_failure_while_compiling(
    broken_compiler: Callable[[BaseException], None], level: str
) -> None:
    broken_compiler(Injected("no kernel for you"))
    compiled = unified(fn, level=level)
    with Warned() as said:
        for _ in range(3):
            assert torch.equal(compiled(X), fn(X))
    assert len(said) == 1
    for part in ("inductor", "eager", "compile-failed", "Injected", "no kernel for you"):
        assert part in said[0]
    assert "test_fallback_and_guard.py:" in said[0]
    (record,) = kernel_dispatch.report(compiled)
    (fallback,) = record.fallbacks
    assert (fallback.stage, fallback.provider, fallback.taken_by) == (
        "compile",
        "inductor",
        "eager",
    )
    assert (fallback.reason.code, fallback.error) == ("compile-failed", "Injected")
    assert "test_fallback_and_guard.py:" in fallback.reason.place
    assert record.provider == "eager"
    assert record.plan.provider == "inductor"
    assert record.runs_by_provider == {"eager": 3}
    assert record.as_dict()["fallbacks"][0]["code"] == "compile-failed"
    assert "FALLBACK while compiling" in record.text()


def test_a_failure_while_compiling_for_training(
    broken_compiler: Callable[[BaseException], None],
) -> None:
    broken_compiler(Injected("no backward"))
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    compiled = unified(model)
    x = torch.randn(5, 4)
    with pytest.warns(UnifiedWarning, match="compile-failed"):
        compiled(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=True))


def test_a_backward_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd may compile the backward lazily, when nobody is left to fall back."""
    from torch._inductor import compile_fx as module

    real = module.compile_fx_inner

    def fake(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            raise Injected("no backward kernel")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "compile_fx_inner", fake)
    compiled, x = unified(fn), torch.randn(37, requires_grad=True)
    with pytest.warns(UnifiedWarning, match="compile-failed"):
        compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2 + 1)
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.provider == "inductor", "the forward compiled, and stays"
    assert [(f.provider, f.taken_by) for f in graph.fallbacks] == [("inductor", "eager")]
    assert "the backward" in graph.fallbacks[0].reason.text


def test_two_graphs_two_warnings(broken_compiler: Callable[[BaseException], None]) -> None:
    broken_compiler(Injected("nothing works"))

    def broken_in_two(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() + 1

    compiled = unified(broken_in_two)
    with Warned() as said:
        for _ in range(2):
            assert torch.equal(compiled(X), broken_in_two(X))
    assert len(said) == 2, "one for each graph and reason"
    assert len(kernel_dispatch.report(compiled).fallbacks) == 2


@pytest.mark.parametrize("when", ["compile", "run"])
def test_strict_names_both(
    broken_compiler: Callable[[BaseException], None],
    lowering: Callable[[Callable[..., Any]], None],
    when: str,
) -> None:
    def fail(forward: Any, call: int, *args: Any) -> Any:
        raise Injected("no kernel for you")

    if when == "compile":
        broken_compiler(Injected("no kernel for you"))
    else:
        lowering(fail)
    compiled = unified(fn, strict=True)
    with pytest.raises(StrictModeError) as caught, Warned() as said:
        compiled(X)
    message = str(caught.value)
    for part in ("inductor", f"{when}-failed", "no kernel for you"):
        assert part in message
    assert isinstance(caught.value.__cause__, Injected)
    assert said == []
    (record,) = kernel_dispatch.report(compiled)
    assert [fallback.reason.code for fallback in record.fallbacks] == [f"{when}-failed"]
    assert record.runs == 0


def test_strict_keeps_raising(lowering: Callable[[Callable[..., Any]], None]) -> None:
    """A second call must not run eager in silence."""

    def fail(forward: Any, call: int, *args: Any) -> Any:
        raise Injected("broken")

    lowering(fail)
    compiled = unified(fn, strict=True)
    for _ in range(2):
        with pytest.raises(StrictModeError):
            compiled(X)


def test_keyboard_interrupt_while_compiling(
    broken_compiler: Callable[[BaseException], None],
) -> None:
    broken_compiler(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        unified(fn)(X)


# --- run time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failure_while_running(
    lowering: Callable[[Callable[..., Any]], None], failing_call: int
) -> None:
    calls = []

    def run(forward: Any, call: int, *args: Any) -> Any:
        calls.append(call)
        if call == failing_call:
            raise Injected("kernel crashed")
        return forward(*args)

    lowering(run)
    compiled = unified(fn)
    with Warned() as said:
        for _ in range(4):
            assert torch.equal(compiled(X), fn(X))
    assert calls == list(range(1, failing_call + 1)), "a demoted graph was tried again"
    assert len(said) == 1
    assert "run-failed" in said[0]
    assert "kernel crashed" in said[0]
    (record,) = kernel_dispatch.report(compiled)
    (fallback,) = record.fallbacks
    assert (fallback.stage, fallback.provider, fallback.taken_by) == ("run", "inductor", "eager")
    assert (fallback.reason.code, fallback.error) == ("run-failed", "Injected")
    assert record.provider == "eager"
    wanted = {"inductor": failing_call - 1, "eager": 5 - failing_call}
    assert record.runs_by_provider == {name: n for name, n in wanted.items() if n}


def test_out_of_memory_has_its_own_reason(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    def run(forward: Any, call: int, *args: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 PiB")

    lowering(run)
    compiled = unified(fn)
    with pytest.warns(UnifiedWarning, match="out-of-memory"):
        assert torch.equal(compiled(X), fn(X))
    (fallback,) = kernel_dispatch.report(compiled).fallbacks
    assert fallback.reason.code == "out-of-memory"
    assert fallback.error == "OutOfMemoryError"


def test_a_failure_while_running_in_training(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    def run(forward: Any, call: int, *args: Any) -> Any:
        raise Injected("kernel crashed")

    lowering(run)
    compiled, x = unified(fn), torch.randn(5, requires_grad=True)
    with pytest.warns(UnifiedWarning, match="run-failed"):
        compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2 + 1)


def test_keyboard_interrupt_while_running(lowering: Callable[[Callable[..., Any]], None]) -> None:
    def run(forward: Any, call: int, *args: Any) -> Any:
        if call == 1:
            raise KeyboardInterrupt
        return forward(*args)

    lowering(run)
    compiled = unified(fn)
    with pytest.raises(KeyboardInterrupt):
        compiled(X)
    assert torch.equal(compiled(X), fn(X))
    (record,) = kernel_dispatch.report(compiled)
    assert record.runs_by_provider == {"inductor": 1}
    assert record.fallbacks == []


def test_an_error_of_eager_too_is_the_users(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    """The lowering fails in a way of its own where eager fails too: eager's error is raised."""

    def run(forward: Any, call: int, x: Any) -> Any:
        if bool((x == 0).all()):
            raise Injected("some message of a kernel")
        return forward(x)

    lowering(run)
    compiled = unified(lambda x: torch.linalg.inv(x) + 1)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(2, 2))
    compiled(torch.eye(2))
    (record,) = kernel_dispatch.report(compiled)
    assert (record.provider, record.fallbacks) == ("inductor", [])


def half_written(forward: Any, call: int, *args: Any) -> None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg.detach()[: len(arg) // 2] = -77
    raise Injected("crashed half-way")


def test_a_written_input_is_put_back_on_the_first_call(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    lowering(half_written)
    compiled = unified(written)
    x = torch.arange(6.0)
    with pytest.warns(UnifiedWarning, match="run-failed"):
        assert torch.equal(compiled(x), (torch.arange(6.0) + 1) * 10)
    assert torch.equal(x, torch.arange(6.0) + 1)
    y = torch.arange(6.0)
    assert torch.equal(compiled(y), (torch.arange(6.0) + 1) * 10)
    assert kernel_dispatch.report(compiled)[0].runs_by_provider == {"eager": 2}


def test_a_written_view_is_put_back(lowering: Callable[[Callable[..., Any]], None]) -> None:
    """Written through a view, with strides of its own, and memory beside it that is not written."""
    lowering(half_written)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x[:, 1].mul_(2)
        return x.sum(0)

    compiled = unified(fn)
    base, own = (torch.arange(24.0).view(6, 4) for _ in range(2))
    x, y = base.t()[1:3], own.t()[1:3]
    with pytest.warns(UnifiedWarning, match="run-failed"):
        assert torch.equal(compiled(x), fn(y))
    assert torch.equal(base, own)


def test_strict_puts_a_written_input_back(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    lowering(half_written)
    x = torch.arange(6.0)
    with pytest.raises(StrictModeError):
        unified(written, strict=True)(x)
    assert torch.equal(x, torch.arange(6.0)), "an error must not leave the input half-written"


def test_a_written_input_on_a_later_call_is_an_error(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    def run(forward: Any, call: int, *args: Any) -> Any:
        return forward(*args) if call == 1 else half_written(forward, call, *args)

    lowering(run)
    compiled, x = unified(written), torch.arange(6.0)
    compiled(x)
    with (
        pytest.warns(UnifiedWarning, match="from the next call on"),
        pytest.raises(Injected, match="half-way") as caught,
    ):
        compiled(x)
    assert any(
        "half-written" in note for note in getattr(caught.value, "__notes__", ["half-written"])
    )
    (record,) = kernel_dispatch.report(compiled)
    assert record.runs_by_provider == {"inductor": 1}
    assert [f.reason.code for f in record.fallbacks] == ["run-failed"]
    x, twin = torch.arange(6.0), torch.arange(6.0)
    torch.testing.assert_close(compiled(x), written(twin))
    assert torch.equal(x, twin), "eager answers from the next call on"


def test_running_statistics_are_not_counted_twice(
    lowering: Callable[[Callable[..., Any]], None],
) -> None:
    """BatchNorm writes into buffers; eager after a half-done run must not update them again."""

    def run(forward: Any, call: int, *args: Any) -> Any:
        forward(*args)
        raise Injected("crashed after the update")

    lowering(run)
    model, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    compiled = unified(nn.Sequential(model, nn.ReLU()))
    x = torch.randn(16, 3) + 2
    with pytest.warns(UnifiedWarning, match="run-failed"):
        got = compiled(x)
    assert torch.equal(got, twin(x).relu())
    assert torch.equal(model.running_mean, twin.running_mean)
    assert torch.equal(model.running_var, twin.running_var)
    assert int(model.num_batches_tracked) == 1


# --- the recompile limit --------------------------------------------------------------------------


def test_the_recompile_limit_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    compiled = torch.compile(grows, backend="unified", dynamic=False, options={"level": "O1"})
    with Warned() as said:
        for rows in range(3, 13):
            x = torch.randn(rows)
            assert torch.equal(compiled(x), grows(x))
    assert len(said) == 1, said
    assert "recompile limit" in said[0]
    assert "grows" in said[0]
    assert "size mismatch at index 0" in said[0] or "shape" in said[0], "the failing guard"
    assert "dynamic=True" in said[0]
    records = kernel_dispatch.report(compiled)
    assert len(records) == torch._dynamo.config.recompile_limit
    assert sum(bool("recompile-limit" in note) for r in records for note in r.notes) == 1


def test_a_limit_of_the_callables_own() -> None:
    """`torch.compile(..., recompile_limit=3)` moves the limit, so it moves the warning too."""
    import inspect

    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this torch has no recompile_limit=")

    def grows(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 2

    compiled = torch.compile(
        grows, backend="unified", dynamic=False, recompile_limit=3, options={"level": "O1"}
    )
    with Warned() as said:
        for rows in range(3, 9):
            x = torch.randn(rows)
            assert torch.equal(compiled(x), grows(x))
    assert len(kernel_dispatch.report(compiled)) == 3
    assert len(said) == 1
    assert "3 times" in said[0]


# --- no compiler on the machine -------------------------------------------------------------------

_NO_COMPILER = """
import warnings
import torch

shown = []
warnings.showwarning = lambda m, c, f, l, *_: shown.append((c.__name__, str(m)))
warnings.simplefilter("always")

def one(x): return (x @ x).relu() + 1
def two(x): return x.sin() * 2
def three(x):
    y = x.exp() + 1
    torch._dynamo.graph_break()
    return y.log() * 3

x = torch.rand(16, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.ReLU())
for fn in (one, two, three, model):
    c = torch.compile(fn, backend="unified", options={"level": LEVEL})
    for _ in range(2):
        torch.testing.assert_close(c(x), fn(x))
c(x).sum().backward()

import kernel_dispatch
graphs = kernel_dispatch.report()
assert len(graphs) >= 5, len(graphs)
assert {g.provider for g in graphs} == {"eager"}
ours = [text for kind, text in shown if kind == "UnifiedWarning"]
codes = [f.reason.code for f in graphs.fallbacks]
print("WARNINGS", len(ours))
print("CODES", sorted(set(codes)), len(codes) == len(graphs))
print(*ours, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "count"), [("O1", 0), ("O2", 1)])
def test_without_a_compiler(python: Python, tmp_path: Any, level: str, count: int) -> None:
    """O1 wants no compiler, so it has nothing to warn of; O2 drops to eager and says so once."""
    out = python(
        _NO_COMPILER.replace("LEVEL", repr(level)),
        CXX="/nonexistent",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    ).stdout
    assert f"WARNINGS {count}" in out
    if count:
        assert "CODES ['provider-absent'] True" in out
        assert "/nonexistent" in out
        assert "provider-absent" in out
    else:
        assert "CODES [] False" in out


@pytest.mark.slow
def test_without_a_compiler_strict_is_an_error(python: Python, tmp_path: Any) -> None:
    script = """
import torch
c = torch.compile(lambda x: x.sin() + 1, backend="unified", options={"strict": True})
try:
    c(torch.randn(4))
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    out = python(script, CXX="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "c")).stdout
    assert out.startswith("StrictModeError")
    assert "inductor" in out
    assert "provider-absent" in out


def test_modules_of_torchs_own_share_a_limit_and_are_not_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each was compiled once; a warning would be an error of theirs."""
    kinds = [nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.Mish, nn.Softplus]
    for kind in [*kinds, nn.Hardswish]:
        torch.compile(kind(), backend="unified", options={"level": "O0"})(torch.randn(4))
    assert caplog.text.count("compilations of all such modules together") == 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_checkpoint_around_compiled_code_ends_its_recomputation(level: str) -> None:
    """It leaves the second forward by an exception, which is not a failure of the graph."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    compiled = compile_at(level, model)
    x = torch.randn(4, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(compiled, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(got, expected)
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_input_whose_storage_was_freed(level: str) -> None:
    """As FSDP frees it between uses. The copy that a failure would have needed was fatal."""

    def bring_back(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        p.untyped_storage().resize_(p.numel() * p.element_size())
        with torch.no_grad():
            p.copy_(x)
        return (p * 2).sin()

    p, x = torch.empty(8, 8), torch.randn(8, 8)
    p.untyped_storage().resize_(0)
    compiled = compile_at(level, bring_back)
    with torch.no_grad():
        torch.testing.assert_close(compiled(p, x), (x * 2).sin())
    assert fallbacks_of(compiled) == []
    torch.testing.assert_close(p, x)
