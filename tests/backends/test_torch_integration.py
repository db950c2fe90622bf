"""What torch offers around torch.compile goes on working with this backend."""

from __future__ import annotations

import inspect
import json
import re
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import kernel_dispatch
from tests.conftest import Python
from tests.support.compiling import compile_at, every_row_applies
from tests.support.regions import no_cached_graphs
from tests.support.torches import refuses_to_swap_compiled_parameters

X = torch.randn(6, 6)


def fn(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + x


def unified(f: Any, level: str = "O1", **kwargs: Any) -> Any:
    return torch.compile(f, backend="unified", options={"level": level}, **kwargs)


def runs(compiled: Any) -> list[int]:
    return [graph.runs for graph in kernel_dispatch.report(compiled)]


# --- reset, stances, disable, fullgraph -----------------------------------------------------------


def test_reset_forgets_graphs_and_compiles_again() -> None:
    compiled = unified(fn)
    compiled(X)
    assert runs(compiled) == [1]
    torch.compiler.reset()
    assert kernel_dispatch.report() == []
    torch.testing.assert_close(compiled(X), fn(X))
    assert runs(compiled) == [1]


def test_stance_force_eager() -> None:
    compiled = unified(fn)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(X), fn(X))
    assert runs(compiled) == []
    compiled(X)
    assert runs(compiled) == [1]


def test_stance_eager_on_recompile() -> None:
    compiled = unified(fn)
    compiled(X)
    y = torch.randn(2, 3, 4)
    with torch.compiler.set_stance("eager_on_recompile"):
        torch.testing.assert_close(compiled(y), fn(y))
        compiled(X)
    assert runs(compiled) == [2]


def test_stance_fail_on_recompile() -> None:
    compiled = unified(fn)
    compiled(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(X)
        with pytest.raises(RuntimeError, match=r"[Dd]etected recompile"):
            compiled(torch.randn(2, 3, 4))
    assert runs(compiled) == [2]


def test_disable() -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return outside(x.sin() + 1).cos() * 2

    compiled = unified(f)
    torch.testing.assert_close(compiled(X), f(X))
    records = kernel_dispatch.report(compiled)
    assert len(records) == 2
    assert all("cumsum" not in dict(record.facts.ops) for record in records)
    assert records[0].graph_break is not None
    assert unified(fn, disable=True)(X).equal(fn(X))


def test_fullgraph_raises_on_a_break() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        unified(broken, fullgraph=True)(X)
    assert unified(fn, fullgraph=True)(X).equal(fn(X))


def test_error_on_graph_break_and_nested_compile() -> None:
    inner = unified(fn)
    outer = unified(lambda x: inner(x) + 1)
    torch.testing.assert_close(outer(X), fn(X) + 1)
    assert runs(outer) == [1]


# --- whose graph is it ----------------------------------------------------------------------------


def test_report_belongs_to_the_right_callable() -> None:
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    one, two, three = unified(first), unified(second, "O0"), unified(fn)
    one(X)
    two(X), two(X)
    three(X), three(X), three(X)
    assert (runs(one), runs(two), runs(three)) == ([1], [2], [3])
    assert kernel_dispatch.report(one)[0].level == "O1"
    assert kernel_dispatch.report(two)[0].level == "O0"
    assert runs(first) == [1]
    assert runs(fn) == [3]
    assert len(kernel_dispatch.report()) == 3
    assert kernel_dispatch.report(one)[0].function == "Linear"


def test_module_compile() -> None:
    model = _model(3)  # torch skips the frames of its own containers here, with any backend
    model.compile(backend="unified", options={"level": "O1"})
    with torch.no_grad():
        torch.testing.assert_close(model(X), model.layer(X).tanh())
    assert runs(model) == [1]
    assert kernel_dispatch.report(model)[0].level == "O1"


def test_a_decorator() -> None:
    @torch.compile(backend="unified", options={"level": "O0"})
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    torch.testing.assert_close(decorated(X), X.exp() + 1)
    assert runs(decorated) == [1]
    assert kernel_dispatch.report(decorated)[0].function.endswith("decorated")


def test_bound_methods() -> None:
    class Plain:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.scale

    class Model(nn.Module):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() + 1

    a, b, m = Plain(2.0), Plain(3.0), Model()
    one, two, three = unified(a.run), unified(b.run, "O0"), unified(m.encode)
    torch.testing.assert_close(one(X), X.sin() * 2)
    torch.testing.assert_close(two(X), X.sin() * 3)
    torch.testing.assert_close(three(X), m.encode(X))
    assert [g.level for g in kernel_dispatch.report(one)] == ["O1"]
    assert [g.level for g in kernel_dispatch.report(two)] == ["O0"]
    assert runs(three) == [1]


def test_one_function_compiled_twice() -> None:
    one, two = unified(fn, "O1"), unified(fn, "O0")
    one(X), two(X), two(X)
    assert [(g.level, g.runs) for g in kernel_dispatch.report(one)] == [("O1", 1)]
    assert [(g.level, g.runs) for g in kernel_dispatch.report(two)] == [("O0", 2)]
    assert len(kernel_dispatch.report(fn)) == 2


def test_a_compiled_module_that_is_gone_does_not_stay_alive() -> None:
    import gc
    import weakref

    model = nn.Linear(6, 3)
    gone = weakref.ref(model)
    compiled = unified(model)
    compiled(X)
    del model, compiled
    torch._dynamo.reset_code_caches() if hasattr(torch._dynamo, "reset_code_caches") else None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("packed", [False, True], ids=["training", "packed"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_are_swapped_where_torch_is_told_to(level: str, packed: bool) -> None:
    """It refuses a tensor with a weak reference: only packed weights have one, until reset()."""
    if reason := refuses_to_swap_compiled_parameters():
        pytest.skip(reason)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()), torch.randn(64, 256)
    compiled = unified(model, level)
    # On Intel no library is known to be faster than eager at O1.
    with torch.set_grad_enabled(not packed), no_cached_graphs(), every_row_applies():
        torch.testing.assert_close(compiled(x), model(x))
        (graph,) = kernel_dispatch.report(compiled)
        assert graph.facts.training is not packed
        assert graph.regions or not packed
        if packed:
            torch.compiler.reset()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        torch.testing.assert_close(compiled(x.double()), model(x.double()))


def test_name() -> None:
    if "name" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this torch has no name=")
    compiled = unified(fn, name="my_block")
    torch.testing.assert_close(compiled(X), fn(X))
    (record,) = kernel_dispatch.report(compiled)
    assert record.runs == 1
    assert record.notes == []


def test_keyword_arguments_of_a_newer_torch_are_noted() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    backend = lookup_backend("unified")
    compiled = torch.compile(fn, backend=lambda gm, inputs: backend(gm, inputs, from_the_future=1))
    torch.testing.assert_close(compiled(X[:1]), fn(X[:1]))
    (record,) = kernel_dispatch.report(compiled)
    assert any("unexpected-kwargs" in note and "from_the_future" in note for note in record.notes)


# --- threads --------------------------------------------------------------------------------------


def _model(width: int) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).tanh()

    forward = Model.forward
    code = forward.__code__.replace(co_name=f"forward_{width}")
    Model.forward = types.FunctionType(code, globals(), f"forward_{width}")  # type: ignore
    return Model().eval()


@pytest.mark.skipif(
    torch.__version__.startswith("2.11.")
    and torch.version.cuda is not None
    and not torch.cuda.is_available(),
    reason="torch 2.11 for CUDA without a GPU crashes in fake_tensor.py, with any backend",
)
def test_eight_threads_two_option_sets() -> None:
    """Each thread compiles and calls its own model; options must not leak into another's graphs."""
    levels = ["O1", "O2"] * 4
    # Dynamo counts recompiles per code object, so each model gets a forward of its own.
    models = [_model(4 + i) for i in range(8)]
    compiled = [
        compile_at(level, model, options={"threads": 1 + (level == "O2")})
        for level, model in zip(levels, models, strict=True)
    ]
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                barrier.wait()
                for rows in (6, 9):
                    x = torch.randn(rows, 6)
                    for _ in range(3):
                        torch.testing.assert_close(compiled[index](x), models[index](x))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index, level in enumerate(levels):
        records = kernel_dispatch.report(compiled[index])
        assert {record.level for record in records} <= {level}
        assert {record.provider for record in records} <= {"inductor" if level == "O2" else "eager"}
        assert {record.settings.threads for record in records} <= {1 + (level == "O2")}
        counted = sum(record.runs for record in records)
        # Before torch 2.13 calls run uncompiled while another thread traces.
        assert counted == 6 or (counted < 6 and TorchVersion(torch.__version__) < (2, 13))
        assert [record.fallbacks for record in records] == [[]] * len(records)


def test_one_compiled_function_in_eight_threads() -> None:
    torch.set_num_threads(
        torch.get_num_threads()
    )  # later threads start with it: Dynamo guards on it
    compiled = unified(fn)
    # Compiled before the threads start: Dynamo would compile a missing version once per thread.
    compiled(torch.zeros(6, 6))
    wrong: list[int] = []

    def work(index: int) -> None:
        x = torch.full((6, 6), float(index))
        wrong.extend(index for _ in range(50) if not torch.equal(compiled(x), fn(x)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(runs(compiled)) == 401


def test_calls_while_another_thread_compiles() -> None:
    """FX's mark of a trace belongs to the process: compiled functions must not stumble over it."""
    calls: list[BaseException | bool] = []

    def call() -> None:
        try:
            calls.append(torch.equal(ready(X), fn(X)))
        except BaseException as error:  # noqa: BLE001
            calls.append(error)

    def call_in_another_thread() -> None:
        other = threading.Thread(target=call)
        other.start()
        other.join(30)

    torch.set_num_threads(torch.get_num_threads())  # see above
    ready = unified(fn)
    ready(X)
    library = torch.library._scoped_library("kernel_dispatch_tests", "FRAGMENT")
    with library as scope, no_cached_graphs():
        scope.define("traced_slowly(Tensor x) -> Tensor")
        scope.impl("traced_slowly", torch.clone, "CPU")

        @torch.library.register_fake("kernel_dispatch_tests::traced_slowly", lib=scope)
        def traced_slowly(x: torch.Tensor) -> torch.Tensor:
            call_in_another_thread()
            return torch.empty_like(x)

        compiled = unified(lambda x: torch.ops.kernel_dispatch_tests.traced_slowly(x) + 1, "O2")
        torch.testing.assert_close(compiled(X), X + 1)
    assert runs(compiled) == [1]
    assert len(calls) > 1 and set(map(str, calls)) == {"True"}  # Dynamo's trace, then AOTAutograd's


# --- caches across processes ----------------------------------------------------------------------

_CACHED = """
import json, sys
import torch
import kernel_dispatch

def fn(x): return (x.sin() @ x.t()).relu() + 1
x = torch.randn(9, 5)
c = torch.compile(fn, backend="unified")
torch.testing.assert_close(c(x), fn(x))
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh())
m = torch.compile(model, backend="unified", options={"threads": 1})
m(x).sum().backward()
print(json.dumps([kernel_dispatch.report(f)[0].cache for f in (c, m)]))
"""


@pytest.mark.slow
def test_a_second_process_hits_both_caches(python: Python, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first, second = (
        json.loads(python(_CACHED, TORCHINDUCTOR_CACHE_DIR=cache).stdout) for _ in range(2)
    )
    for outcome in first:
        assert (outcome["inductor"], outcome["aot_autograd"]) == ("miss", "miss")
    for outcome in second:
        assert (outcome["inductor"], outcome["aot_autograd"]) == ("hit", "hit")
        assert "bypass_causes" not in outcome


def test_a_bypass_is_reported_with_its_cause() -> None:
    """A random constant of a graph that cannot be hashed: here a custom pass without a uuid."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Unhashable(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> None:
            return None

    compiled = torch.compile(
        fn, backend="unified", options={"inductor": {"post_grad_custom_post_pass": Unhashable()}}
    )
    assert torch.allclose(compiled(X), fn(X))
    cache = kernel_dispatch.report(compiled)[0].cache
    assert "bypass" in " ".join(str(v) for k, v in cache.items() if k != "bypass_causes")
    assert cache["bypass_causes"]
    assert "bypass" in kernel_dispatch.report(compiled).text()


# --- logs, traces, debug folder, minifier ---------------------------------------------------------

_SMALL = """
import torch
def fn(x, y):
    x = x + 1
    return (x.sin() * y).relu()
c = torch.compile(fn, backend="unified")
x, y = torch.randn(4, 3), torch.randn(3)
torch.testing.assert_close(c(x, y), fn(x, y))
"""


@pytest.mark.slow
def test_torch_trace_holds_the_plan(python: Python, tmp_path: Path) -> None:
    done = python(_SMALL, TORCH_TRACE=str(tmp_path / "trace"))
    assert "target cpu" not in done.stderr, "nobody asked for logs"
    text = "".join(f.read_text() for f in (tmp_path / "trace").glob("*.log"))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if '"unified_plan"' in line)
    head = json.loads(lines[at][lines[at].index("{") :])
    assert head["artifact"] == {"name": "unified_plan", "encoding": "json"}
    assert (head["frame_id"], head["frame_compile_id"]) == (0, 0)
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line)
    plan = json.loads("\n".join(payload))
    assert (plan["target"], plan["provider"], plan["level"]) == ("cpu", "inductor", "O2")
    assert plan["settings"]["level"]["source"] == "default"


@pytest.mark.slow
def test_torch_logs(python: Python) -> None:
    done = python(_SMALL, TORCH_LOGS="+kernel_dispatch")
    assert "kernel_dispatch" in done.stderr
    assert "target cpu, provider inductor, level O2" in done.stderr
    assert python("import torch", TORCH_LOGS="+kernel_dispatch").returncode == 0


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_debug_folder_and_reproducer(python: Python, tmp_path: Path, level: str) -> None:
    script = _SMALL.replace(
        'backend="unified"', f'backend="unified", options={{"level": "{level}"}}'
    )
    python(script, TORCH_COMPILE_DEBUG="1")
    (folder,) = tmp_path.glob("torch_compile_debug/*/unified/graph_0")
    before = (folder / "before.py").read_text()
    assert "sin" in before
    after = "".join(file.read_text() for file in folder.glob("after_*.py"))
    assert "relu" in after
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["level"], plan["target"], plan["function"]) == (level, "cpu", "fn")
    out = python((folder / "repro.py").read_text()).stdout
    error = re.search(r"output 0: shape \(4, 3\), largest difference ([\d.e+-]+)", out)
    assert error is not None, out
    assert float(error[1]) < 1e-5
    assert f"level {level} (from options=)" in out


@pytest.mark.slow
def test_the_minifier_sees_the_failure(python: Python, tmp_path: Path) -> None:
    script = """
import torch
import torch._inductor.compile_fx as module
def fake(gm, *args, **kwargs):
    if any("relu" in str(node.target) for node in gm.graph.nodes):
        raise AssertionError("relu is broken")
    return gm.forward
module.compile_fx = fake
c = torch.compile(lambda x: (x.sin() + 1).relu() * 2, backend="unified")
c(torch.randn(4))
"""
    debug = str(tmp_path / "debug")
    done = python(
        script, check=False, TORCHDYNAMO_REPRO_AFTER="dynamo", TORCHDYNAMO_REPRO_DIR=debug,
        TORCH_COMPILE_DEBUG_DIR=debug,
    )  # fmt: skip
    assert done.returncode != 0
    assert "relu is broken" in done.stderr
    launchers = list(tmp_path.rglob("minifier_launcher.py"))
    assert len(launchers) == 1, done.stderr[-3000:]
    text = launchers[0].read_text()
    assert "unified" in text
    assert "relu" in text


@pytest.mark.slow
def test_the_new_precision_interface(python: Python) -> None:
    """Whoever has used the new settings must not meet the old ones: torch raises when both are."""
    script = """
import warnings
import torch
warnings.simplefilter("error", UserWarning)
if hasattr(torch.backends, "fp32_precision"):
    torch.backends.fp32_precision = "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
import kernel_dispatch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
x = torch.randn(32, 64)
for level in ("O0", "O1", "O2"):
    c = torch.compile(model, backend="unified", options={"level": level})
    with torch.no_grad():
        torch.testing.assert_close(c(x), model(x))
    (g,) = kernel_dispatch.report(c)
    assert not g.fallbacks, g
if hasattr(torch.backends, "fp32_precision"):
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
print("fine")
"""
    assert python(script).stdout.strip() == "fine"


@pytest.mark.slow
def test_warnings_as_errors_do_not_reach_what_torch_warns_itself_of(python: Python) -> None:
    """As under `python -W error`, or `filterwarnings = error` of a user's own test suite."""
    script = """
import torch
import kernel_dispatch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
for level in ("O0", "O1", "O2"):
    c = torch.compile(model, backend="unified", options={"level": level})
    c(torch.randn(32, 64)).sum().backward()
    (g,) = kernel_dispatch.report(c)
    assert not g.fallbacks, g
print("fine")
"""
    slow = "ignore:Guards may run slower:RuntimeWarning"  # Dynamo's, of Python 3.13.0
    assert python(script, PYTHONWARNINGS=f"error,{slow}").stdout.strip() == "fine"
