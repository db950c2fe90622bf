"""The usage guide of the providers, row by row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernel_dispatch
from kernel_dispatch import default_backend
from kernel_dispatch.registry import BackendRegistry, CompileContext, select_backend, table
from lowering import machine
from lowering.errors import BackendNotAvailableError, SettingError, UnifiedWarning
from tests.support.fake_machine import gpu, pretend

NEXT = "next: comes with PersistentKernel"
DOCS = Path(__file__).parents[2] / "docs"
NAMES = tuple(table.BY_NAME)


@pytest.fixture(autouse=True)
def no_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("UNIFIED_DEVICE", raising=False)
    default_backend.choose(None)
    yield
    default_backend.choose(None)


@pytest.mark.quick
def test_s001_01_the_nine_names_of_the_guide() -> None:
    """The nine names of the guide are among the fourteen."""
    nine = {"cuda", "cpu", "mps", "cudnn", "mkl", "mkldnn", "openmp", "nki", "triton"}
    assert nine <= set(NAMES)
    assert all(kernel_dispatch.get_backend_info(name)["summary"] for name in nine)


@pytest.mark.quick
def test_s001_02_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a forced device, else what was set, else cuda where it is here, else the first
    that is."""
    first = kernel_dispatch.get_available_backends()[0]
    assert kernel_dispatch.get_default_backend() == first
    pretend(monkeypatch, {"cuda": gpu("sm90")}, ["triton"])
    assert kernel_dispatch.get_default_backend() == "cuda"
    kernel_dispatch.set_default_backend("mkldnn")
    assert kernel_dispatch.get_default_backend() == "mkldnn"
    monkeypatch.setenv("UNIFIED_DEVICE", "cpu")
    assert kernel_dispatch.get_default_backend() == "mkldnn", "which computes on the CPU"
    monkeypatch.setenv("UNIFIED_DEVICE", "nvidia:0")
    assert kernel_dispatch.get_default_backend() == "cuda"
    monkeypatch.setenv("UNIFIED_DEVICE", "mps")
    with pytest.raises(BackendNotAvailableError, match=r"mps.*forced.*Available: cuda, cpu"):
        kernel_dispatch.get_default_backend()
    found = BackendRegistry.instance()
    monkeypatch.delenv("UNIFIED_DEVICE")
    assert found.get_default_backend() is found.get_backend("mkldnn")


@pytest.mark.quick
def test_s001_02_targets_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD it is Triton, which computes there; where none of the fourteen does, an error."""
    pretend(monkeypatch, {"rocm": gpu("gfx942"), "xpu": {}}, ["triton"])
    monkeypatch.setenv("UNIFIED_DEVICE", "rocm")
    assert kernel_dispatch.get_default_backend() == "triton"
    monkeypatch.setenv("UNIFIED_DEVICE", "xpu")
    with pytest.raises(BackendNotAvailableError, match="none of the fourteen"):
        kernel_dispatch.get_default_backend()


@pytest.mark.quick
def test_s001_03_s001_09_set_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default holds for everything that is compiled later until it is taken back; a provider that
    is not here is refused with the reason, and an overruling environment is said."""
    kernel_dispatch.set_default_backend("CPU")
    assert kernel_dispatch.get_default_backend() == "cpu"
    with pytest.raises(ValueError, match=r"'mps' cannot be the default.*macOS.*Available: .*cpu"):
        kernel_dispatch.set_default_backend("mps")
    with pytest.raises(SettingError, match="Did you mean 'mkl'"):
        kernel_dispatch.set_default_backend("mlk")
    assert kernel_dispatch.get_default_backend() == "cpu", "as before the mistakes"
    assert select_backend() == "cpu", "where none is named"
    kernel_dispatch.set_default_backend(None)
    assert default_backend.chosen() is None
    pretend(monkeypatch, {"cuda": gpu("sm90")})
    kernel_dispatch.set_default_backend("cpu")
    assert kernel_dispatch.get_backend().BACKEND_NAME == "cpu"
    monkeypatch.setenv("UNIFIED_DEVICE", "cuda")
    with pytest.warns(UnifiedWarning, match=r"no effect while UNIFIED_DEVICE=cuda"):
        kernel_dispatch.set_default_backend("cpu")
    assert kernel_dispatch.get_default_backend() == "cuda"


def test_s001_04_list_backends(capsys: pytest.CaptureFixture[str]) -> None:
    """The list names all fourteen and marks the default; `verbose` prints strictly more, with the
    reasons of those that are absent."""
    kernel_dispatch.list_backends()
    short = capsys.readouterr().out
    kernel_dispatch.list_backends(verbose=True)
    long = capsys.readouterr().out
    assert len(short.splitlines()) == 14
    assert set(short.splitlines()) < set(long.splitlines())
    (default,) = [line for line in short.splitlines() if line.startswith("*")]
    assert default.split()[1] == kernel_dispatch.get_default_backend()
    for name in NAMES:
        info = kernel_dispatch.get_backend_info(name)
        assert (info["reason"] or info["summary"]) in long


@pytest.mark.quick
@pytest.mark.status("met, not run on hardware: 90 on a Hopper GPU is asserted by a fake probe")
def test_s001_05_backend_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """The information has compute capability, compute units, memory, shared memory and devices, all
    of them whole numbers: 90 on Hopper, a CPU's vector width in bits, 0 devices where it is
    absent."""
    numbers = "compute_capability compute_units max_memory max_shared_memory device_count".split()
    cpu = kernel_dispatch.get_backend_info("cpu")
    assert all(type(cpu[key]) is int and cpu[key] > 0 for key in numbers)
    assert cpu["compute_units"] == machine.cpu().effective_cores
    assert cpu["compute_capability"] in (64, 128, 256, 512)
    for name in NAMES:
        info = kernel_dispatch.get_backend_info(name)
        assert all(type(info[key]) is int for key in numbers), name
        assert info["available"] or info["reason"]
        if name in ("cuda", "mps", "nki") and not info["available"]:
            assert info["device_count"] == 0
    pretend(monkeypatch, {"cuda": gpu("sm90", cards=2)})
    cuda = kernel_dispatch.get_backend_info("nvidia")
    assert (cuda["compute_capability"], cuda["device_count"]) == (90, 2)
    assert "float8_e4m3fn" in cuda["dtypes"]
    assert divmod(cuda["compute_capability"], 10) == (9, 0), "as the guide prints it"


def test_s001_06_the_sample_of_the_other_language() -> None:
    """The C++ sample, call by call: the registry lists what is here, finds a provider by name, and
    gives the default as an object."""
    registry = BackendRegistry.get_instance()
    names = []
    for kind in registry.get_available_backends():
        backend = registry.get_backend(kind)
        assert backend is not None
        names.append(backend.get_name())
    assert names == kernel_dispatch.get_available_backends()
    cuda_backend = registry.get_backend("cuda")
    assert cuda_backend is not None
    assert cuda_backend.is_available() == ("cuda" in names)
    assert registry.get_default_backend().get_name() == kernel_dispatch.get_default_backend()


@pytest.mark.quick
@pytest.mark.status(NEXT)
def test_s001_07_decode() -> None:
    """PersistentKernel runs steps of decoding with fixed shapes; until it does, there is no such
    name."""
    assert "PersistentKernel" not in kernel_dispatch.__all__


@pytest.mark.quick
@pytest.mark.status(NEXT)
def test_s001_10_cutlass() -> None:
    """PersistentKernel takes `use_cutlass_kernel` on CUDA; Inductor's own setting for it is
    reachable today."""
    from kernel_dispatch.settings import resolve

    wish = {"inductor": {"max_autotune_gemm_backends": "ATEN,TRITON,CUTLASS"}}
    assert resolve(None, wish).inductor


@pytest.mark.quick
@pytest.mark.status("met, not run on hardware: no Mac here")
def test_s001_12_mps_needs_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac nothing has to be set: its provider is the first that is here."""
    pretend(monkeypatch, {"mps": {"device_count": 1, "features": ["macos14+", "apple7+"]}})
    assert "mps" in kernel_dispatch.get_available_backends()
    info = kernel_dispatch.get_backend_info("mps")
    assert (info["available"], info["target"], info["device_count"]) == (True, "mps", 1)


def test_s001_14_the_loop_over_all_backends() -> None:
    """Each provider that is here compiles and is timed in a loop; one that is not gives None."""

    def latency(name: str, calls: int = 20) -> float | None:
        backend = BackendRegistry.instance().get_backend(name)
        ctx = CompileContext(lambda x: (x @ x).relu(), (torch.ones(8, 8),), level="O1")
        if backend is None or not backend.compile(ctx) or ctx.compiled is None:
            return None
        began = time.perf_counter()
        for _ in range(calls):
            ctx.compiled(torch.ones(8, 8))
        assert ctx.report is not None
        assert ctx.report[0].runs == calls + 1
        return (time.perf_counter() - began) / calls

    here = kernel_dispatch.get_available_backends()
    for name in NAMES:
        assert (latency(name) is not None) == (name in here)


@pytest.mark.quick
@pytest.mark.status(NEXT)
def test_s001_16_pages_of_the_cache() -> None:
    """PersistentKernel divides a budget of memory into pages; the memory it divides is known."""
    info = kernel_dispatch.get_backend_info("cpu")
    assert info["max_memory"] // (16 * 2) > 0


@pytest.mark.quick
@pytest.mark.status(NEXT)
def test_s001_17_one_kernel_for_each_device() -> None:
    """PersistentKernel takes a rank as the device's index; how many devices there are is known."""
    assert kernel_dispatch.get_backend_info("cpu")["device_count"] == 1


@pytest.mark.quick
def test_s001_18_guidelines() -> None:
    """Guidelines and help for what is not available, slow or does not compile are documented, and
    linked from the page of providers."""
    page = (DOCS / "providers.md").read_text()
    for name in ("troubleshooting.md", "performance.md", "install.md"):
        assert (DOCS / name).is_file()
        assert f"({name}" in page
    text = (DOCS / "troubleshooting.md").read_text().lower()
    assert all(word in text for word in ("available", "slow", "compile"))
