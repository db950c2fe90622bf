"""Each target's probe on machines that are not this one. No probe may raise or import a vendor."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lowering.capability import GRAPH
from lowering.levels import Level
from lowering.targets import cuda, mps, neuron, rocm, xla, xpu

pytestmark = pytest.mark.quick

MODULES = (cuda, rocm, xpu, xla, mps, neuron)
OF_TARGETS = ("intel-extension-for-pytorch", "torch_xla", "torch_tpu", "torch-neuronx")
Distribution = Callable[..., None]


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Distribution:
    """Install a distribution by its metadata, with a module that must not be imported. What this
    environment really has for a target (a lane has) is hidden."""
    really, added = metadata.version, set[str]()

    def version(name: str) -> str:
        if name in OF_TARGETS and name not in added:
            raise metadata.PackageNotFoundError(name)
        return really(name)

    monkeypatch.setattr(metadata, "version", version)

    def add(name: str, version: str, requires: tuple[str, ...] = ()) -> None:
        added.add(name)
        folder = tmp_path / name
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n\n")
        if name != "torch":
            poison = f"raise AssertionError('{name} was imported')\n"
            (folder / f"{name.replace('-', '_')}.py").write_text(poison)
        monkeypatch.syspath_prepend(folder)

    return add


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch look as if it were built otherwise."""

    def pretend(version: str, **kinds: str) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        for kind in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, kind, kinds.get(kind), raising=False)

    pretend("2.13.0+cpu")
    return pretend


def gpus(monkeypatch: pytest.MonkeyPatch, *properties: SimpleNamespace) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])


H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=40 << 30)
MI300 = SimpleNamespace(
    name="NVIDIA-sounding name", gcnArchName="gfx942:sramecc+:xnack-", total_memory=192 << 30
)


def test_cuda_box(monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]) -> None:
    build("2.13.0+cu130", cuda="13.0")
    gpus(monkeypatch, H100, H100)
    found = cuda.probe()
    assert found.available
    assert found.version == "13.0"
    assert found.details["device_count"] == 2
    assert found.details["features"] == ["fp8", "sm80+", "sm89+", "sm90", "sm90+"]
    assert found.details["devices"][0]["memory_bytes"] == 80 << 30
    assert not rocm.probe().available


def test_mixed_gpus_promise_what_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]
) -> None:
    build("2.13.0+cu130", cuda="13.0")
    gpus(monkeypatch, H100, A100)
    details = cuda.probe().details
    assert details["features"] == ["sm80+"]
    assert [one["arch"] for one in details["devices"]] == ["sm90", "sm80"]


def test_cuda_build_without_gpu(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]
) -> None:
    build("2.13.0+cu130", cuda="13.0")
    gpus(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = cuda.probe()
    assert "built for CUDA 13.0" in found.reason
    assert "CUDA_VISIBLE_DEVICES=''" in found.reason
    assert "nvidia-smi" in found.fix


def test_a_driver_that_raises_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]
) -> None:
    build("2.13.0+cu130", cuda="13.0")
    gpus(monkeypatch, H100)

    def fail(index: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert "forked subprocess" in cuda.probe().reason


def test_rocm_is_told_by_the_build_not_by_the_name(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]
) -> None:
    build("2.13.0+rocm7.2", hip="7.2.1", cuda="")
    gpus(monkeypatch, MI300)
    found = rocm.probe()
    assert found.available
    assert found.details["features"] == ["cdna", "fp8", "gfx942"]
    assert "ROCm build" in cuda.probe().reason


def test_rocm_build_without_gpu(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]
) -> None:
    build("2.13.0+rocm7.2", hip="7.2.1")
    gpus(monkeypatch)
    assert "built for ROCm 7.2.1" in rocm.probe().reason
    assert "/dev/kfd" in rocm.probe().fix


ROCM_TORCH = ("triton-rocm==3.6.0; platform_system == 'Linux'", "filelock", "x (>=1); extra == 'y'")


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"triton-rocm": "3.6.0"}, []),
        ({"triton-rocm": "3.6.0+rocm7.2"}, []),
        ({"triton-rocm": "3.5.0"}, ["triton-rocm==3.6.0", "3.5.0 is installed"]),
        ({"triton": "3.6.0"}, ["triton-rocm==3.6.0", "triton is installed"]),
        ({"triton": "3.6.0", "triton-rocm": "3.6.0"}, ["overwrite", "pip uninstall -y triton`"]),
    ],
)
def test_triton_flavour(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[..., None],
    distribution: Distribution,
    installed: dict[str, str],
    told: list[str],
) -> None:
    monkeypatch.setattr(cuda, "_TRITONS", ("triton", "triton-rocm"))
    build("2.13.0+rocm7.2", hip="7.2.1")
    gpus(monkeypatch, MI300)
    distribution("torch", "2.13.0", ROCM_TORCH)
    monkeypatch.setattr(cuda, "distribution_version", lambda name: installed.get(name, ""))
    notes = " ".join(rocm.probe().details["notes"])
    assert bool(notes) == bool(told)
    for words in told:
        assert words in notes


def test_xpu_laptop(monkeypatch: pytest.MonkeyPatch, build: Callable[..., None]) -> None:
    build("2.13.0+xpu", xpu="20250301")
    arc = SimpleNamespace(
        name="Intel Arc", total_memory=16 << 30, has_fp64=False, sub_group_sizes=[8, 16, 32]
    )
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: arc)
    found = xpu.probe()
    assert found.available
    assert found.details["features"] == []
    assert found.details["devices"][0]["sub_group_sizes"] == [8, 16, 32]
    arc.has_fp64 = True
    assert xpu.probe().details["features"] == ["fp64"]
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert "built for XPU" in xpu.probe().reason


def test_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 34, raising=False)
    found = mps.probe()
    assert found.version == "macOS 15.1"
    assert found.details["devices"][0]["memory_bytes"] == 1 << 34
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "no Metal device" in mps.probe().reason
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert "built without MPS" in mps.probe().reason


def test_mps_off_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    assert "needs macOS" in mps.probe().reason


@pytest.mark.parametrize(
    ("torch_version", "installed", "provider", "told"),
    [
        ("2.9.1+cpu", {"torch_xla": "2.9.0"}, "torch_xla", ""),
        ("2.13.0+cpu", {"torch_xla": "2.9.0"}, "", "needs torch 2.9 exactly, not 2.13.0"),
        ("2.10.0+cpu", {"torch_xla": "2.1.0"}, "", "needs torch 2.1 exactly"),
        ("2.13.0+cpu", {"torch_tpu": "0.2.0"}, "torch_tpu", ""),
        ("2.9.1+cpu", {"torch_tpu": "0.2.0"}, "", "needs torch 2.11 or newer, not 2.9.1"),
        ("2.13.0+cpu", {"torch_tpu": "0.2.0", "torch_xla": "2.9.0"}, "torch_tpu", "torch_xla 2.9"),
        ("2.9.1+cpu", {"torch_tpu": "0.2.0", "torch_xla": "2.9.0"}, "torch_xla", "torch_tpu 0.2"),
        ("2.13.0+cpu", {}, "", "neither torch_tpu nor torch_xla"),
    ],
)
def test_tpu_vm(
    build: Callable[..., None],
    distribution: Distribution,
    torch_version: str,
    installed: dict[str, str],
    provider: str,
    told: str,
) -> None:
    build(torch_version)
    for name, version in installed.items():
        distribution(name, version)
    before = set(sys.modules)  # in a lane, another test may have had a use for it
    found = xla.probe()
    assert found.available is bool(provider)
    assert found.details.get("provider", "") == provider
    assert told in " ".join([found.reason, *found.details.get("notes", [])])
    if not provider:
        assert "torch_tpu" in found.fix
        assert "torch==2.9.*" in found.fix
    assert not {"torch_xla", "torch_tpu"} & (set(sys.modules) - before)


def test_neuron(
    monkeypatch: pytest.MonkeyPatch, distribution: Distribution, build: Callable[..., None]
) -> None:
    build("2.9.1+cpu")
    monkeypatch.setattr(neuron, "_devices", list)
    assert "not installed" in neuron.probe().reason
    distribution("torch-neuronx", "2.9.0")
    assert "/dev/neuron" in neuron.probe().reason
    monkeypatch.setattr(neuron, "_devices", lambda: ["/dev/neuron0", "/dev/neuron1"])
    found = neuron.probe()
    assert (found.available, found.version) == (True, "2.9.0")
    assert found.details["device_count"] == 2
    assert found.details["features"] == ["traced"]
    build("2.13.0+cpu")
    assert "needs torch 2.9 exactly, not 2.13.0" in neuron.probe().reason
    assert "torch_neuronx" not in sys.modules


def test_neuron_survives_a_half_made_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(__spec__=None))
    assert not neuron.probe().available


@pytest.mark.parametrize("module", [cuda, rocm, xpu])
def test_cpu_build_names_the_command_for_the_same_torch(
    module: ModuleType, build: Callable[..., None]
) -> None:
    build("2.9.1+cpu")
    found = module.probe()
    assert not found.available
    assert "CPU build (2.9.1+cpu)" in found.reason
    index = {cuda: "cu130", rocm: "rocm6.4", xpu: "xpu"}[module]
    assert found.fix == (
        f'pip install "torch==2.9.1+{index}" --index-url https://download.pytorch.org/whl/{index}'
    )


def test_a_development_build_names_no_version_that_does_not_exist(
    build: Callable[..., None],
) -> None:
    build("2.14.0a0+gitabc")
    assert "2.14.0a0" not in cuda.probe().fix
    assert "--force-reinstall torch --index-url" in cuda.probe().fix


# --- the records ----------------------------------------------------------------------------------


def test_records() -> None:
    records = {module.TARGET.name: module.TARGET for module in MODULES}
    assert {name: one.device_types for name, one in records.items()} == {
        "cuda": ("cuda",),
        "rocm": ("cuda",),
        "xpu": ("xpu",),
        "xla": ("xla", "tpu"),
        "mps": ("mps",),
        "neuron": ("neuron",),
    }
    assert {name: one.priority for name, one in records.items()} == {
        "cuda": 60,
        "rocm": 60,
        "xla": 50,
        "xpu": 40,
        "neuron": 35,
        "mps": 30,
    }
    names = [alias for one in records.values() for alias in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    for one in records.values():
        assert one.proven_on, one.name


def test_who_lowers_what() -> None:
    graphs = {m: [row for row in m.TARGET.rows if row.region == GRAPH] for m in MODULES}
    rows = {m.TARGET.name: {(r.provider, r.level) for r in graphs[m]} for m in MODULES}
    assert rows["cuda"] == rows["rocm"] == {("inductor", Level.O2), ("eager", Level.O0)}
    assert rows["xla"] == {
        ("torch_tpu", Level.O1),
        ("torch_xla", Level.O1),
        ("eager", Level.O0),
    }
    for module in MODULES:
        assert all(row.why for row in module.TARGET.rows)
    assert all("float64" in row.refused_dtypes for row in graphs[mps])


@pytest.mark.parametrize("target", [cuda.TARGET, rocm.TARGET])
def test_cuda_graphs_only_at_o3(target: SimpleNamespace) -> None:
    assert all(target.inductor_config(level) == {} for level in (Level.O0, Level.O1, Level.O2))
    o3 = target.inductor_config(Level.O3)
    assert o3["max_autotune"]
    assert o3["triton.cudagraphs"]
    assert o3["triton.cudagraph_skip_dynamic_graphs"]


def test_importing_starts_nothing() -> None:
    code = (
        "import sys; from lowering import libraries, machine, toolchain\n"
        "from triton_kernels import availability\n"
        "from lowering.targets import cuda, rocm, xpu, xla, mps, neuron; import torch\n"
        "heavy = {'triton', 'torch_xla', 'torch_tpu', 'torch._inductor', 'torch._dynamo'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
