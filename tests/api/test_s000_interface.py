"""What every provider can be asked for: information, compilation, memory, capabilities."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernel_dispatch
from kernel_dispatch import ProviderId, devices
from kernel_dispatch.config import LIMITS
from kernel_dispatch.registry import (
    BackendInterface,
    BackendRegistry,
    CompileContext,
    Provider,
    measures,
    table,
)
from lowering import machine
from lowering.errors import BackendNotAvailableError, SettingError
from tests.support.fake_machine import gpu, pretend

NAMES = tuple(table.BY_NAME)
NO_NVIDIA = "met, not run on hardware: no NVIDIA GPU here"


def provider(name: str) -> Provider:
    found = BackendRegistry.instance().get_backend(name)
    assert isinstance(found, Provider)
    return found


@pytest.fixture
def cpu() -> Iterator[Provider]:
    fresh = Provider(table.BY_NAME["cpu"])
    yield fresh
    assert fresh.allocated_bytes == 0


# --- information ----------------------------------------------------------------------------------


def test_s000_16_every_provider_tells_what_it_is() -> None:
    """Every provider tells its number and its name, and looks at the machine to say whether it is
    here; if not, why."""
    for name in NAMES:
        found = provider(name)
        assert found.get_name() == name
        assert found.get_type() is table.BY_NAME[name].type
        assert found.is_available() == (found.reason == "")
    assert provider("cpu").is_available()


@pytest.mark.quick
def test_s000_16_an_answer_follows_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the operating system is called, nor a variable: the probe decides, each time."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    assert not provider("nki").is_available()
    pretend(monkeypatch, {"cuda": gpu("sm90")}, ["cudnn"], ["cusparselt"])
    assert provider("cuda").is_available()
    assert provider("cudnn").is_available()
    assert not provider("cusparselt").is_available(), "the GPU is here, its library is not"


@pytest.mark.quick
def test_s000_16_the_interface_is_abstract() -> None:
    """All eleven calls of the design have to be there."""

    class Half(BackendInterface):
        def get_name(self) -> str:
            return "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
    calls = set(BackendInterface.__abstractmethods__)
    assert calls == set(
        "get_type get_name is_available compile get_compile_flags allocate_memory free_memory "
        "synchronize get_max_memory get_max_shared_memory supports_data_type".split()
    )


# --- compilation ----------------------------------------------------------------------------------


def double(x: Tensor) -> Tensor:
    return x.sin() * 2


def test_s000_17_true_only_if_there_is_something_to_call() -> None:
    """`compile` is true only where a callable exists; a source that fails gives false and keeps the
    error."""
    ctx, x = CompileContext(double, (torch.ones(8),), level="O1"), torch.randn(8)
    assert provider("cpu").compile(ctx)
    assert ctx.compiled is not None
    torch.testing.assert_close(ctx.compiled(x), double(x))
    assert ctx.report == kernel_dispatch.report(ctx.compiled)
    assert [graph.runs for graph in ctx.report] == [2]
    assert ctx.error is None

    def fails(x: Tensor) -> Tensor:
        return x @ x.new_ones(3, 3)

    broken = CompileContext(fails, (torch.ones(8, 8),), level="O1")
    assert not provider("cpu").compile(broken)
    assert broken.compiled is None
    assert isinstance(broken.error, RuntimeError)


def test_s000_17_absent_and_wrong() -> None:
    """Who is absent says why; a mistake in the request is an error, not a false."""
    ctx = CompileContext(double, (torch.ones(8),))
    assert not provider("mps").compile(ctx)
    assert isinstance(ctx.error, BackendNotAvailableError)
    assert provider("mps").reason in str(ctx.error)
    with pytest.raises(TypeError, match="CompileContext"):
        provider("cpu").compile(double)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is 3"):
        provider("cpu").compile(CompileContext(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give a tuple"):
        provider("cpu").compile(CompileContext(double, torch.ones(8)))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="level"):
        provider("cpu").compile(CompileContext(double, (torch.ones(8),), level="O9"))
    with pytest.raises(SettingError, match="disable"):
        provider("cpu").compile(CompileContext(double, (), options={"disabel": ["mkl"]}))


def test_s000_17_what_computed_nothing_says_why() -> None:
    """A provider that took nothing is no failure: its notes have the reasons of the plan."""
    ctx = CompileContext(double, {"x": torch.ones(8)}, level="O1")
    assert provider("mha").compile(ctx)
    assert ctx.taken == ()
    assert "mha computed nothing" in ctx.notes[0]
    assert any("level-too-low" in note for note in ctx.notes)


def test_s000_17_training_when_it_is_asked_for() -> None:
    """By default nothing has gradients, since libraries lay weights out for inference."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    ctx = CompileContext(layer, (x,), level="O1", training=True)
    assert provider("cpu").compile(ctx)
    assert ctx.compiled is not None
    ctx.compiled(x).sum().backward()
    assert layer.weight.grad is not None
    assert ctx.report is not None
    assert ctx.report[0].facts.training


def test_s000_17_flags_are_those_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are the options of this provider, the level in force, Inductor's config of its
    target and the C++ compiler's."""
    flags = provider("mkl").get_compile_flags().split()
    assert {"provider=mkl", "device=cpu", "level=O2"} <= set(flags)
    assert "disable=ipex,mha,mkldnn,nnpack,openmp,opt_einsum" in flags
    with kernel_dispatch.configure(level="O3", threads=3):
        at_o3 = provider("cpu").get_compile_flags().split()
    assert {"level=O3", "threads=3", "inductor.max_autotune=True"} <= set(at_o3)
    assert not any(flag.startswith("disable=") for flag in at_o3)
    pretend(monkeypatch, {"cuda": gpu("sm90")}, ["triton"])
    with kernel_dispatch.configure(level="O3"):
        gpu_flags = provider("triton").get_compile_flags().split()
    assert "inductor.max_autotune_gemm_backends=TRITON" in gpu_flags
    assert "disable=cudnn,cusparselt,mha" in gpu_flags


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.status("met, not run on hardware: on GPUs the same calls go to torch's allocator")
def test_s000_18_memory_rises_and_falls(cpu: Provider) -> None:
    """Memory is allocated by size and freed by address: the allocated bytes rise and fall, and the
    device can be waited for."""
    first, second = cpu.allocate_memory(1000), cpu.allocate_memory(24)
    assert cpu.allocated_bytes == 1024
    assert first != second
    cpu.memory_view(first).fill_(7)
    gc.collect()
    assert int(cpu.memory_view(first).sum()) == 7000
    cpu.free_memory(first)
    assert cpu.allocated_bytes == 24
    cpu.synchronize()
    cpu.free_memory(second)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-1, "above 0"),
        (0, "above 0"),
        (1.5, "whole number"),
        (True, "whole number"),
        ("8", "whole number"),
        (1 << 60, "in all"),
    ],
)
def test_s000_18_sizes_that_cannot_be(cpu: Provider, size: Any, message: str) -> None:
    """A size that is none is an error that names it."""
    with pytest.raises(SettingError, match=message):
        cpu.allocate_memory(size)


def test_s000_18_freed_once(cpu: Provider) -> None:
    """Freeing twice, or what never was, is an error and changes nothing."""
    block = cpu.allocate_memory(8)
    cpu.free_memory(block)
    for pointer in (block, 12345, "there"):
        with pytest.raises(ValueError, match="nothing is allocated there"):
            cpu.free_memory(pointer)  # type: ignore[arg-type]
    with pytest.raises(BackendNotAvailableError):
        provider("mps").allocate_memory(8)
    with pytest.raises(BackendNotAvailableError):
        provider("mps").synchronize()


# --- capabilities ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_s000_19_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and shared memory are asked of the machine (a CPU's largest cache stands for the
    second); constants serve only where the question fails."""
    facts = machine.cpu()
    known = [one for one in (facts.memory_bytes, facts.memory_limit_bytes) if one]
    assert provider("cpu").get_max_memory() == min(known, default=LIMITS["cpu"].memory)
    assert 0 < provider("cpu").get_max_shared_memory() < 1 << 34
    pretend(monkeypatch, {"cuda": gpu("sm90", memory=141 << 30)})
    assert provider("cuda").get_max_memory() == 141 << 30
    monkeypatch.setattr(measures, "_largest_cache", lambda: 0)
    nothing = machine.CpuFacts(**{**vars(facts), "memory_bytes": 0, "memory_limit_bytes": None})
    monkeypatch.setattr(machine, "cpu", lambda: nothing)
    assert provider("cpu").get_max_memory() == 64 << 30
    assert provider("cpu").get_max_shared_memory() == 32 << 20


@pytest.mark.quick
def test_s000_26_the_figures_of_the_design() -> None:
    """The design's limits are there for all fourteen (2 GiB and 96 KiB on CUDA, 64 GiB and 32 MiB
    on CPUs, 16 GiB and 64 KiB on Apple GPUs), and what the machine says comes before them."""
    assert provider("cpu").get_max_memory() != LIMITS["cpu"].memory
    assert set(LIMITS) == set(NAMES)
    found = {name: (LIMITS[name].memory, LIMITS[name].shared) for name in ("cuda", "cpu", "mps")}
    assert found == {
        "cuda": (2 << 30, 96 << 10),
        "cpu": (64 << 30, 32 << 20),
        "mps": (16 << 30, 64 << 10),
    }
    assert all(one.memory > one.shared > 0 for one in LIMITS.values())


@pytest.mark.quick
@pytest.mark.status(NO_NVIDIA)
def test_s000_19_shared_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one block of threads may use, by the driver; the design's figure without a driver."""
    pretend(monkeypatch, {"cuda": gpu("sm90")})
    card = type("Card", (), {"shared_memory_per_block_optin": 232448, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert provider("cuda").get_max_shared_memory() == 227 << 10
    info = kernel_dispatch.get_backend_info("cuda")
    assert (info["compute_units"], info["compute_capability"]) == (132, 90)

    def no_driver(index: int) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_driver)
    assert provider("cuda").get_max_shared_memory() == LIMITS["cuda"].shared


@pytest.mark.quick
@pytest.mark.parametrize(("card", "has"), [("sm80", False), ("sm86", False), ("sm89", True)])
def test_s000_19_eight_bit_floats(monkeypatch: pytest.MonkeyPatch, card: str, has: bool) -> None:
    """8-bit floats are computed in from compute capability 8.9 on."""
    pretend(monkeypatch, {"cuda": gpu(card)}, ["triton", "cudnn"])
    for name in ("cuda", "triton"):
        assert provider(name).supports_data_type(torch.float8_e4m3fn) == has
    assert not provider("cudnn").supports_data_type("float8_e4m3fn")
    assert provider("cudnn").supports_data_type("half")


@pytest.mark.quick
def test_s000_19_dtypes_are_those_of_the_capability_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype is supported where a row of the provider takes it, with the instructions it needs."""
    assert provider("mkl").supports_data_type(torch.float32)
    assert not provider("mkl").supports_data_type(torch.bfloat16)
    assert not provider("mps").supports_data_type("torch.float64")
    assert not provider("cpu").supports_data_type(torch.float8_e5m2)
    assert provider("cpu").supports_data_type(torch.complex64)
    real = devices.probe
    for isa, has in ((["neon"], False), (["avx2"], True), (["avx512_bf16"], True)):
        fake = lambda target, isa=isa: type(real(target)).yes("", features=isa)  # noqa: E731
        monkeypatch.setattr(devices, "probe", fake)
        assert provider("mkldnn").supports_data_type(torch.bfloat16) == has
    with pytest.raises(SettingError, match=r"Did you mean 'float32'"):
        provider("cpu").supports_data_type("flaot32")
    with pytest.raises(SettingError, match="dtype"):
        provider("cpu").supports_data_type(32)  # type: ignore[arg-type]


def test_s000_16_numbers_are_an_enumeration() -> None:
    """Numbers compare with plain integers, as in the original."""
    assert ProviderId.BT_CPU is ProviderId.CPU
    assert ProviderId(24) is ProviderId.OPT_EINSUM


def test_s000_17_each_compilation_stands_alone() -> None:
    """Dynamo's limit of compilations counts one context, and so does what was taken."""
    for number in range(10):
        model = nn.Sequential(nn.Linear(16, 16 + number), nn.ReLU()).eval()
        ctx = CompileContext(model, (torch.randn(64, 16),), level="O0")
        assert provider("cpu").compile(ctx), ctx.error
        (graph,) = ctx.report or []
        assert graph.runs == 1


@pytest.mark.quick
def test_s000_21_a_number_is_a_key_too() -> None:
    registry = BackendRegistry.instance()
    assert registry.get_backend(10) is registry.get_backend("cpu")
    assert registry.get_backend(4711) is None
    assert registry.get_backend(True) is None
