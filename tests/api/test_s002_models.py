"""S002-10 to 12 and 25 to 30: what becomes of a model, and what the levels promise of it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_dispatch
from kernel_dispatch.backends import BaseBackend, OptimizationLevel, get_backend
from lowering.errors import SettingError
from lowering.levels import Level
from tests.api.vendors import Net
from tests.support.compiling import every_row_applies
from tests.support.reports import assert_ran_as_planned, fallbacks_of, providers_of

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}


@pytest.fixture
def cpu() -> BaseBackend:
    return get_backend("cpu")


@pytest.fixture
def library_calls() -> Iterator[None]:
    """Every library call of O1 is taken, on any processor and for the smallest shapes."""
    with every_row_applies():
        yield


# --- prepare_model --------------------------------------------------------------------------------

LEVELS = {
    **{name: name for name in ("O0", "O1", "O2", "O3")},
    "none": "O0",
    "Conservative": "O1",
    "balanced": "O2",
    "AGGRESSIVE": "O3",
    OptimizationLevel.O1: "O1",
    None: "O2",
}


@pytest.mark.parametrize("given", LEVELS, ids=str)
def test_s002_10_prepare_model_takes_every_level(given: Any, cpu: Any) -> None:
    """`prepare_model(model, level)` gives the model on the backend's device, compiled by `unified`
    at that level (a member, a name, an alias; None is the configuration's, else O2). It is still of
    its class, with its methods and its state_dict, and the caller's own object stays uncompiled."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)  # one operator: no level generates code for it
    prepared = cpu.prepare_model(model, given)
    torch.testing.assert_close(prepared(x), model(x))
    (graph,) = kernel_dispatch.report(prepared)
    assert (graph.level, graph.target, graph.runs) == (LEVELS[given], "cpu", 1)
    source = "default" if given is None else "options="
    assert graph.settings.as_dict()["level"]["source"] == source


@pytest.mark.quick
def test_s002_10_an_unknown_level(cpu: Any) -> None:
    with pytest.raises(SettingError, match=r"unknown level 'balancd'.*'balanced'"):
        cpu.prepare_model(nn.Linear(2, 2), "balancd")


def test_s002_10_it_is_still_the_model(cpu: Any) -> None:
    model, x = Net(8), torch.randn(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = cpu.prepare_model(model, "O0")
    assert type(prepared) is Net
    assert prepared is not model
    assert model._compiled_call_impl is None
    assert torch.equal(prepared.twice(x), 2 * model(x))
    assert_ran_as_planned(prepared, "O0")
    assert list(prepared.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(prepared.parameters(), model.parameters(), strict=True))
    prepared(x).sum().backward()
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(prepared.up.weight, before)
    assert torch.equal(prepared(x), model(x))


def test_s002_10_it_saves_and_loads(cpu: Any) -> None:
    model, x = Net(8), torch.randn(2, 8)
    prepared = cpu.prepare_model(model, "O0")
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    expected = prepared(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.equal(prepared(x), expected)
    file.seek(0)
    prepared.load_state_dict(torch.load(file))
    assert torch.equal(prepared(x), expected)
    assert torch.equal(model(x), expected)
    for copied in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert type(copied) is Net
        assert torch.equal(copied(x), expected)
        assert copied.up.weight is not model.up.weight
        assert not kernel_dispatch.report(copied)  # a copy is to be prepared again


def test_s002_10_hooks_and_modes_are_shared(cpu: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, out: (calls.append(1), out + 1)[1])
    prepared = cpu.prepare_model(model, "O0")
    prepared.eval()
    assert not model[1].training
    x = torch.randn(2, 4)
    assert torch.equal(prepared(x), model.eval()(x))
    assert len(calls) == 2


def test_s002_10_modules_of_torch_itself_are_compiled(cpu: Any) -> None:
    """`nn.Sequential(...).compile()` of torch compiles nothing, without a word."""
    prepared = cpu.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "O0")
    prepared(torch.randn(2, 4))
    (graph,) = kernel_dispatch.report(prepared)
    assert graph.function == "Sequential"
    assert graph.runs == 1
    assert "kernel_dispatch" not in graph.place


def test_s002_10_one_class_many_times(cpu: Any) -> None:
    """Compiled graphs are kept by code, eight of them: each prepared model has its own."""
    for width, level in itertools.product(range(2, 7), ("O0", "O1")):
        prepared = cpu.prepare_model(Net(width), level)
        prepared(torch.randn(1, width))
        assert [graph.level for graph in kernel_dispatch.report(prepared)] == [level]


def test_s002_10_sizes_of_one_model_say_nothing_of_another(cpu: Any) -> None:
    """Dynamo takes a size for dynamic once it has seen two of them at one place in the source."""
    for rows in (2, 3):
        prepared = cpu.prepare_model(nn.Sequential(nn.Linear(4, 4)), "O0")
        prepared(torch.randn(rows, 4))
        (graph,) = kernel_dispatch.report(prepared)
        assert not graph.facts.dynamic


def test_s002_10_what_is_compiled_already(cpu: Any) -> None:
    model, x = Net(8), torch.randn(2, 8)
    for given in (torch.compile(model, backend="eager"), cpu.prepare_model(model, "O1")):
        prepared = cpu.prepare_model(given, "O0")
        assert type(prepared) is Net
        assert torch.equal(prepared(x), model(x))
        assert [graph.level for graph in kernel_dispatch.report(prepared)] == ["O0"]


def test_s002_10_a_prepared_model_is_not_kept_alive(cpu: Any) -> None:
    prepared = cpu.prepare_model(Net(8), "O0")
    prepared(torch.randn(2, 8))
    gone = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert gone() is None


def test_s002_10_a_backend_that_was_named_beats_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNIFIED_DEVICE", "neuron")  # forced there, it would be an error
    prepared = get_backend("cpu").prepare_model(nn.Linear(4, 4), "O1")
    prepared(torch.randn(2, 4))
    (graph,) = kernel_dispatch.report(prepared)
    assert graph.target == "cpu"
    assert graph.settings.as_dict()["device"] == {"value": "cpu", "source": "options="}


@pytest.mark.quick
def test_s002_10_what_is_no_model(cpu: Any) -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    lazy = nn.Sequential(nn.LazyLinear(4))
    for wrong, why in ((Net, "the class Net"), (3, "not 3"), (scripted, "TorchScript"), (lazy, "")):
        with pytest.raises(SettingError, match=why or "call it once with a sample"):
            cpu.prepare_model(wrong)


# --- inference ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library_calls")
def test_s002_11_optimize_for_inference(cpu: Any) -> None:
    """`optimize_for_inference(model, sample_input, dtype)` gives the model in evaluation mode and
    without gradients, near to eager, at the level at which it was prepared; a sample (a tensor, a
    tuple, a dict) compiles it now, and a dtype is applied to a copy and to the inputs."""
    model, x = (
        nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)),
        torch.ones(4, 16),
    )
    optimized = cpu.optimize_for_inference(cpu.prepare_model(model, "O1"), sample_input=x)
    (graph,) = kernel_dispatch.report(optimized)  # compiled already
    assert (graph.level, graph.facts.training, graph.runs) == ("O1", False, 1)
    assert not optimized.training
    assert not model[1].training
    out = optimized(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, model.eval()(x), **CLOSE)
    assert graph.runs == 2
    assert "mkldnn" in providers_of(optimized)
    assert not fallbacks_of(optimized)
    assert all(parameter.requires_grad for parameter in optimized.parameters())


class _Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


@pytest.mark.parametrize("sample", [(2, 1), {"b": 1, "a": 2}], ids=["tuple", "dict"])
def test_s002_11_samples(sample: Any, cpu: Any) -> None:
    ones = torch.ones(3)
    given = (
        {name: n * ones for name, n in sample.items()}
        if isinstance(sample, dict)
        else tuple(n * ones for n in sample)
    )
    optimized = cpu.optimize_for_inference(cpu.prepare_model(_Pair(), "O0"), sample_input=given)
    assert [graph.runs for graph in kernel_dispatch.report(optimized)] == [1]
    assert torch.equal(optimized(2 * ones, ones), ones)


def test_s002_11_dtype_is_applied_to_a_copy(cpu: Any) -> None:
    model, x = Net(16), torch.randn(4, 16)
    before = model.up.weight.detach().clone()
    optimized = cpu.optimize_for_inference(
        cpu.prepare_model(model, "O1"), sample_input=x, dtype=torch.bfloat16
    )
    assert optimized(x).dtype == torch.bfloat16
    assert optimized.up.weight.dtype == torch.bfloat16
    assert torch.equal(model.up.weight, before)
    expected = copy.deepcopy(model).to(torch.bfloat16)(x.to(torch.bfloat16))
    torch.testing.assert_close(optimized(x), expected)
    (graph,) = kernel_dispatch.report(optimized)
    assert graph.facts.dtypes == ("bfloat16",)
    assert graph.level == "O1"
    with pytest.raises(SettingError, match="floating-point"):
        cpu.optimize_for_inference(model, dtype=torch.int8)


def test_s002_11_new_weights_are_seen(cpu: Any) -> None:
    model, x = Net(16), torch.randn(4, 16)
    with every_row_applies():
        optimized = cpu.optimize_for_inference(cpu.prepare_model(model, "O1"), sample_input=x)
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
        torch.testing.assert_close(optimized(x), model(x).detach(), **CLOSE)
        assert "mkldnn" in providers_of(optimized)


# --- training -------------------------------------------------------------------------------------

STEPS = 5


def losses(model: Callable[..., torch.Tensor], optimizer: Any, dtype: Any = None) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    told = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        loss = functional.mse_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_s002_12_optimize_for_training(dtype: Any, cpu: Any) -> None:
    """`optimize_for_training(model)` gives the model in training mode, with an optimizer both; the
    optimizer stays valid, the loss falls and follows eager's. A dtype is autocast: weights keep
    theirs."""
    model = Net(8).eval()
    eager = copy.deepcopy(model).train()
    expected = losses(eager, torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9), dtype)
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained, optimizer = cpu.optimize_for_training(cpu.prepare_model(model, "O1"), mine, dtype)
    assert optimizer is mine
    assert trained.training
    told = losses(trained, optimizer)
    assert told[-1] < told[0]
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-6)
    (graph,) = kernel_dispatch.report(trained)
    assert (graph.level, graph.facts.training, graph.runs) == ("O1", True, STEPS)
    assert ("bfloat16" in graph.facts.dtypes) is (dtype is not None)
    assert model.up.weight.dtype == torch.float32


def test_s002_12_both_shapes(cpu: Any) -> None:
    model = Net(8)
    prepared = cpu.prepare_model(model, "O0")
    assert cpu.optimize_for_training(prepared) is prepared
    alone = cpu.optimize_for_training(model)
    assert type(alone) is Net
    assert alone is not model
    again = cpu.optimize_for_training(cpu.optimize_for_inference(prepared))
    assert again.training
    assert again(torch.randn(1, 8)).requires_grad


@pytest.mark.quick
def test_s002_12_mistakes(cpu: Any) -> None:
    strange = torch.optim.SGD(Net(8).parameters(), lr=0.1)
    with pytest.raises(SettingError, match="none of the model's parameters"):
        cpu.optimize_for_training(Net(8), strange)
    with pytest.raises(SettingError, match=r"torch\.optim\.Optimizer"):
        cpu.optimize_for_training(Net(8), optimizer=0.1)
    with pytest.raises(SettingError, match=r"float64 for training: give torch\.bfloat16"):
        cpu.optimize_for_training(Net(8), dtype=torch.float64)


# --- levels ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_s002_25_levels_are_ordered_and_equal_to_their_names() -> None:
    """`OptimizationLevel` has O0 to O3; each is equal to its name, and they are ordered."""
    levels = list(OptimizationLevel)
    assert [level.name for level in levels] == ["O0", "O1", "O2", "O3"]
    assert all(level.value == level.name == level == str(level) for level in levels)
    assert sorted(levels, reverse=True) == levels[::-1]
    assert OptimizationLevel.O1 < OptimizationLevel.O2 <= "balanced" < OptimizationLevel.O3
    assert OptimizationLevel.O3 > "O2" >= OptimizationLevel.O2
    assert not OptimizationLevel.O2 < "O2"
    assert [level.level for level in levels] == list(Level)
    assert [Level.parse(level) for level in levels] == list(Level)
    with pytest.raises(SettingError, match="unknown level 'fast'"):
        OptimizationLevel.O1 < "fast"  # noqa: B015


@pytest.mark.quick
def test_s002_26_none_is_o0() -> None:
    """`from_string` takes O0 to O3, none, conservative, balanced, aggressive, in any case; "none"
    is O0, and an unknown name is a ValueError, never O2."""
    assert OptimizationLevel.from_string("none") is OptimizationLevel.O0
    words = {"conservative": "O1", "Balanced": "O2", "AGGRESSIVE": "O3", "o2": "O2", " O3 ": "O3"}
    for word, name in words.items():
        assert OptimizationLevel.from_string(word) is OptimizationLevel[name]
    for wrong in ("O4", "agressive", "", None, True):
        with pytest.raises(ValueError, match="unknown level"):
            OptimizationLevel.from_string(wrong)
    with pytest.raises(SettingError, match="Did you mean 'aggressive'"):
        OptimizationLevel.from_string("agressive")


@pytest.mark.usefixtures("library_calls")
def test_s002_27_o0_is_eager(cpu: Any) -> None:
    """O0 places the model and no more: results are bit for bit eager's, and nothing is lowered."""
    model, x = Net(16).eval(), torch.randn(4, 16)
    prepared = cpu.prepare_model(model, "O0")
    with torch.no_grad():
        assert torch.equal(prepared(x), model(x))
    (graph,) = kernel_dispatch.report(prepared)
    assert (graph.provider, graph.regions, graph.runs) == ("eager", [], 1)


@pytest.mark.usefixtures("library_calls")
@pytest.mark.status("met, not run on hardware: on the CPU it is, no GPU here")
def test_s002_28_o1_keeps_the_numbers(cpu: Any) -> None:
    """O1 changes no dtype and stays within rtol 1.3e-6, atol 1e-5 of eager in float32: library
    calls with what follows them, no code generation, TF32 as the user left it."""
    before = torch.get_float32_matmul_precision()
    model, x = Net(64).eval(), torch.randn(32, 64)
    prepared = cpu.prepare_model(model, "O1")
    with torch.no_grad():
        out = prepared(x)
        torch.testing.assert_close(out, model(x), **CLOSE)
    (graph,) = kernel_dispatch.report(prepared)
    assert graph.provider == "eager"  # nothing is generated
    assert [(part.name, part.count) for part in graph.regions] == [("linear", 2)]
    assert graph.regions[0].detail == "with gelu_erf"  # in the same pass
    assert graph.facts.dtypes == ("float32",)
    assert torch.get_float32_matmul_precision() == before


class _Block(nn.Module):
    """Much that is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return functional.gelu(hidden) * torch.sigmoid(hidden).exp()


def saved_bytes(run: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> Any:
    """What autograd keeps for the backward, without weights and inputs; and the result."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run(x)
    here = {one.untyped_storage().data_ptr() for one in (*model.parameters(), x)}
    return sum(size for place, size in kept.items() if place not in here), out


@pytest.mark.usefixtures("library_calls")
def test_s002_29_o2_keeps_less_for_the_backward(cpu: Any) -> None:
    """O2, the default, compiles the whole graph and computes again in the backward what is cheap,
    so that less is kept of the forward than at O0; results and gradients stay near."""
    model, x = _Block(), torch.randn(64, 32)
    kept, results = {}, {}
    for level in ("O0", "O2"):
        prepared = cpu.prepare_model(model, level)
        prepared(x)  # compiles, while no hook is in force
        kept[level], out = saved_bytes(prepared, model, x)
        model.zero_grad()
        out.sum().backward()
        results[level] = [out, *(parameter.grad.clone() for parameter in model.parameters())]
        assert_ran_as_planned(prepared, level)
    assert "inductor" in providers_of(prepared)
    assert 0 < 2 * kept["O2"] <= kept["O0"]
    torch.testing.assert_close(results["O2"], results["O0"], rtol=1e-4, atol=1e-5)


@pytest.mark.status(
    "met, not run on hardware: no NVIDIA GPU here; 8-bit floats need tolerance=0.05 beside O3"
)
def test_s002_30_o3_plans_fewer_bits_and_autotuning() -> None:
    """O3 times Inductor's alternatives, replays CUDA graphs, and multiplies eligible linear layers
    in 8-bit floats or int8 where `tolerance` allows it, each checked on its first inputs;
    `tolerance=0` opts out."""
    from lowering.targets import cuda

    assert cuda.inductor_config(Level.O3)["max_autotune"]
    assert cuda.inductor_config(Level.O3)["triton.cudagraphs"]
    assert cuda.inductor_config(Level.O2) == {}
    layer = nn.Linear(1024, 4096, dtype=torch.bfloat16, device="meta")
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    takers = {}
    for tolerance in (0.05, 0.0):
        torch._dynamo.reset()
        options = {"level": OptimizationLevel.O3, "tolerance": tolerance}
        with torch.no_grad():
            told = kernel_dispatch.dry_run(layer, (x,), device="cuda:sm90", options=options)
        (region,) = told.graphs[0].regions
        takers[tolerance] = region.provider
        assert region.left or "8-bit floats" in region.why
    assert takers == {0.05: "triton", 0.0: "inductor"}


def test_s002_11_the_sample_leaves_no_trace() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + torch.rand_like(x)

    x, before = torch.randn(3), torch.get_rng_state()
    model = get_backend("cpu").optimize_for_inference(Counts(), x)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_s002_11_a_dtype_is_a_dtype() -> None:
    with pytest.raises(ValueError, match="dtype=bfloat16"):
        get_backend("cpu").optimize_for_inference(nn.Linear(2, 2), dtype="bfloat16")
