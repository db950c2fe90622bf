"""S002-07 to 09, 13 to 18, 31 to 33, 38 to 40: what every backend has, and what it tells."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from kernel_dispatch import devices
from kernel_dispatch.backends import (
    BackendFactory,
    BaseBackend,
    CPUBackend,
    DeviceInfo,
    NVIDIABackend,
    TPUBackend,
    get_backend,
    get_optimizer,
)
from kernel_dispatch.backends.cpu import CPUOptimizer
from kernel_dispatch.config import DispatchConfig
from lowering import machine
from lowering.errors import BackendNotAvailableError, SettingError
from tests.api.vendors import HERE, machine_with
from tests.conftest import Python

ABSTRACT = """_setup_environment _check_availability _get_device_info prepare_model
optimize_for_inference optimize_for_training""".split()
VENDORS = [*HERE, "cpu"]


def absent(kind: type[BaseBackend], config: DispatchConfig | None = None) -> Any:
    """Made directly, as code of earlier days does, which says so."""
    with pytest.warns(DeprecationWarning, match="is the old way"):
        return kind(config)


@pytest.mark.quick
def test_s002_07_an_incomplete_backend_cannot_be_made() -> None:
    """A backend must have the six methods of the interface, `_setup_environment` among them: a
    class that lacks one cannot be made. Making one changes nothing of the process."""
    assert BaseBackend.__abstractmethods__ == frozenset(ABSTRACT)
    for lacking in ABSTRACT:
        body = {name: lambda self, *args: None for name in ABSTRACT if name != lacking}
        incomplete = type("Incomplete", (BaseBackend,), body)
        with pytest.raises(TypeError, match=lacking):
            incomplete()
    type("Complete", (BaseBackend,), {name: lambda self, *args: None for name in ABSTRACT})()


def test_s002_07_making_backends_changes_nothing_of_the_process(python: Python) -> None:
    """In a process of its own, where nothing has asked the machine anything yet."""
    python(
        """
import importlib.util, logging, os, torch
def state():
    loggers = {n: logging.getLogger(n).level for n in ("torch", "kernel_dispatch")}
    return (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            torch.is_grad_enabled(), torch.initial_seed(), loggers, logging.root.level)
before = state()
from kernel_dispatch.backends import BackendFactory, get_backend, get_optimizer
from kernel_dispatch.backends import NVIDIABackend, AMDBackend, TPUBackend, IntelBackend, MPSBackend
import warnings
warnings.simplefilter("ignore")
get_backend("cpu"), get_optimizer("cpu"), NVIDIABackend().get_device_info()
for kind in (NVIDIABackend, AMDBackend, TPUBackend, IntelBackend, MPSBackend):
    kind()
if not any(map(importlib.util.find_spec, ("torch_xla", "torch_tpu"))):  # started, these change it
    get_backend(), TPUBackend().get_device_info(), BackendFactory.get_all_backend_info()
assert state() == before, (before, state())
"""
    )


@pytest.mark.quick
@pytest.mark.status("met, not run on hardware: no GPU here, builds of torch are made up")
def test_s002_08_the_build_of_torch_decides_not_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a vendor's device is here is asked of the build of torch and of the driver: on a ROCm
    build AMD is available and NVIDIA is not, whatever the device calls itself."""
    card = SimpleNamespace(name="NVIDIA-like", gcnArchName="gfx942:xnack-", total_memory=1 << 36)
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    devices.forget()
    try:
        assert not BackendFactory.is_available("nvidia")
        assert BackendFactory.is_available("amd")
        info = get_backend().get_device_info()
        assert (info.backend, info.device_type) == ("amd", "cuda:0")
        assert info.properties["architecture"] == "gfx942"
        with pytest.raises(BackendNotAvailableError, match="ROCm build"):
            get_backend("nvidia")
    finally:
        devices.forget()


@pytest.mark.quick
def test_s002_09_device_information_is_what_the_system_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a backend tells of a device comes from torch's device properties and the operating
    system, never from a list of models."""
    facts = machine.cpu()
    info = get_backend("cpu").get_device_info()
    assert info.device_name == facts.model
    assert info.total_memory_bytes == facts.memory_bytes
    assert info.properties["isa"] == sorted(facts.isa)
    machine_with(monkeypatch, "nvidia", "intel")
    cards = get_backend("nvidia")
    assert [cards.get_device_info(n).device_name for n in (0, 1)] == ["NVIDIA H100", "NVIDIA A100"]
    assert [cards.get_device_info(n).compute_capability for n in (0, 1)] == ["9.0", "8.0"]
    assert get_backend("intel").get_device_info().driver_version == "1.6.3"


@pytest.mark.quick
def test_s002_13_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend has `device`, `is_available`, `device_count` and `BACKEND_NAME`."""
    machine_with(monkeypatch, *HERE)
    expected = {
        "nvidia": ("cuda:0", 2),
        "amd": ("cuda:0", 1),
        "tpu": ("xla:0", 1),
        "intel": ("xpu:0", 1),
        "mps": ("mps:0", 1),
        "cpu": ("cpu", 1),
    }
    for name, (device, count) in expected.items():
        backend = get_backend(name)
        assert backend.is_available is True
        assert (str(backend.device), backend.device_count) == (device, count)
        assert name == backend.BACKEND_NAME
    machine_with(monkeypatch)
    gone = absent(NVIDIABackend)
    assert (gone.is_available, gone.device_count, str(gone.device)) == (False, 0, "cuda:0")


@pytest.mark.quick
def test_s002_14_get_device_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_device_info(device_id)` is asked of the machine once; a number without a device is an
    error that tells how many there are."""
    machine_with(monkeypatch, "nvidia")
    backend = get_backend()
    asked: list[int] = []
    really = backend._get_device_info
    monkeypatch.setattr(backend, "_get_device_info", lambda n: (asked.append(n), really(n))[1])
    assert backend.get_device_info(1) is backend.get_device_info(1)
    assert asked == [1]
    for wrong in (2, -1, "0", True, None):
        with pytest.raises(SettingError, match="device_id="):
            backend.get_device_info(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nvidia has 2 device\(s\), numbered from 0"):
        backend.get_device_info(2)


@dataclasses.dataclass(frozen=True)
class _Batch:
    x: torch.Tensor
    length: int


_Pair = namedtuple("_Pair", "a b")


class _OnMeta(CPUBackend):
    """The device "meta" shows what was moved, on any machine."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


@pytest.mark.quick
def test_s002_15_to_device() -> None:
    """`to_device` moves a tensor, a module, or every tensor in nested lists, tuples, mappings and
    dataclasses, which keep their types and whatever else they hold."""
    backend = absent(_OnMeta)
    x = torch.ones(2)
    nested = {
        "list": [x, None, 3, "text"],
        "pair": _Pair(x, (x,)),
        "batch": _Batch(x, 7),
        "ordered": OrderedDict(a=x),
    }
    moved = backend.to_device(nested)
    assert moved["list"][0].is_meta
    assert moved["list"][1:] == [None, 3, "text"]
    assert type(moved["pair"]) is _Pair
    assert moved["pair"].a.is_meta
    assert moved["pair"].b[0].is_meta
    assert moved["batch"].x.is_meta
    assert moved["batch"].length == 7
    assert type(moved["ordered"]) is OrderedDict
    assert moved["ordered"]["a"].is_meta
    assert not x.is_meta
    assert not nested["batch"].x.is_meta  # type: ignore[attr-defined]
    packed = backend.to_device(pack_sequence([x, x]))
    assert type(packed) is PackedSequence
    assert packed.data.is_meta
    assert not packed.batch_sizes.is_meta
    model = nn.Linear(2, 2)
    assert backend.to_device(model) is model
    assert model.weight.is_meta


@pytest.mark.quick
def test_s002_15_tensors_stay_at_home_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs carry them over; see docs/backends.md."""
    machine_with(monkeypatch, "tpu")
    assert get_backend("tpu").to_device(torch.ones(2)).device.type == "cpu"


@pytest.mark.quick
def test_s002_16_synchronize_and_empty_cache_do_no_harm_on_a_cpu() -> None:
    """`synchronize` waits for the device and `empty_cache` gives memory back that torch keeps
    there; on a CPU both have nothing to do."""
    backend = get_backend("cpu")
    x = torch.ones(3)
    backend.synchronize()
    backend.empty_cache()
    assert x.sum() == 3


@pytest.mark.quick
@pytest.mark.status("met, not run on hardware: no GPU here, torch's functions are watched")
@pytest.mark.parametrize(("vendor", "module"), [("nvidia", "cuda"), ("intel", "xpu"), ("mps",) * 2])
def test_s002_16_they_are_torchs_own_for_the_device(
    vendor: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, vendor)
    calls: list[Any] = []
    of_torch = getattr(torch, module)
    monkeypatch.setattr(of_torch, "synchronize", lambda *given: calls.append(("wait", *given)))
    monkeypatch.setattr(of_torch, "empty_cache", lambda: calls.append("empty"))
    backend = get_backend(vendor)
    backend.synchronize()
    backend.empty_cache()
    waited = ("wait",) if vendor == "mps" else ("wait", backend.device)
    assert calls == [waited, "empty"]


@pytest.mark.quick
def test_s002_17_set_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_device` changes the backend's device for later calls; a number without a device raises.
    torch's own current device stays what it is."""
    machine_with(monkeypatch, "nvidia")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("global state"))
    backend = get_backend()
    backend.set_device(1)
    assert backend.device == torch.device("cuda", 1)
    for wrong in (-1, 2):
        with pytest.raises(SettingError, match=f"device_id={wrong}"):
            backend.set_device(wrong)
    assert backend.device == torch.device("cuda", 1)
    assert get_backend("nvidia", DispatchConfig(device="cuda:1")).device.index == 1
    with pytest.raises(BackendNotAvailableError, match="has 2, numbered from 0"):
        get_backend("nvidia", DispatchConfig(device="cuda:2"))


@pytest.mark.quick
def test_s002_18_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend is a context manager: it empties its cache at the end, whatever happens, and lets
    exceptions through."""
    cleared: list[str] = []
    monkeypatch.setattr(CPUBackend, "empty_cache", lambda self: cleared.append("empty"))
    backend = get_backend("cpu")
    with backend as entered:
        assert entered is backend
        assert cleared == []
    assert cleared == ["empty"]
    with pytest.raises(KeyError, match="users"), backend:
        raise KeyError("users")
    assert cleared == ["empty", "empty"]


@pytest.mark.quick
def test_s002_31_fields_of_device_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DeviceInfo` has the document's nine fields in its order; `compute_capability` is a text such
    as "9.0"."""
    names = """backend device_type device_id device_name compute_capability total_memory_bytes
    driver_version is_available properties"""
    assert [one.name for one in dataclasses.fields(DeviceInfo)] == names.split()
    machine_with(monkeypatch, "nvidia")
    info = get_backend().get_device_info()
    assert dataclasses.astuple(info)[:8] == (
        *("nvidia", "cuda:0", 0, "NVIDIA H100", "9.0", 80 << 30, "1.0", True),
    )
    gone = get_backend("cpu")
    assert gone.get_device_info().compute_capability is None


@pytest.mark.quick
def test_s002_32_memory_and_to_dict() -> None:
    """`total_memory_gb` and `_mb` count in 1024; `to_dict()` has all fields, as JSON carries
    them."""
    odd = {"set": {2, 1}, "tuple": (1, torch.float32), 3: {"deep": torch.device("cpu")}}
    info = DeviceInfo("nvidia", "cuda:0", 0, "a card", "9.0", 3 << 30, None, True, odd)
    assert (info.total_memory_gb, info.total_memory_mb) == (3.0, 3072.0)
    told = json.loads(json.dumps(info.to_dict()))
    assert list(told) == [one.name for one in dataclasses.fields(DeviceInfo)]
    assert told["properties"] == {
        "set": [1, 2],
        "tuple": [1, "torch.float32"],
        "3": {"deep": "cpu"},
    }
    json.dumps(get_backend("cpu").get_device_info().to_dict())


@pytest.mark.quick
@pytest.mark.status("met, not run on hardware: no GPU and no TPU here, probes are made up")
def test_s002_33_properties_of_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's and AMD's properties say whether the device has 8-bit floats, a TPU's its version
    and topology; both as the hardware tells, not a configuration."""
    machine_with(monkeypatch, "nvidia", "amd", "tpu")
    fp8 = [get_backend("nvidia").get_device_info(n).properties["fp8_supported"] for n in (0, 1)]
    assert fp8 == [True, False]
    assert get_backend("amd").get_device_info().properties["fp8_supported"] is True
    from kernel_dispatch.backends import tpu

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    told = [{"name": f"TPU:{n}", "coords": list(at)} for n, at in enumerate(places)]
    monkeypatch.setattr(tpu, "_attributes", lambda found: told)
    monkeypatch.setattr(tpu, "_version", lambda: "v4")
    info = get_backend("tpu").get_device_info()
    assert info.device_name == "TPU:0"
    assert info.properties["version"] == "v4"
    assert info.properties["topology"] == "2x2x1"
    monkeypatch.setattr(tpu, "_attributes", lambda found: [{"name": "CPU:0"}])
    assert get_backend("tpu").get_device_info().properties["topology"] is None


@pytest.mark.quick
def test_s002_38_old_pattern() -> None:
    """Code of the first version still runs: classes called directly, information read as a dict,
    the configuration from its old place. Each says what to use now, with a DeprecationWarning."""
    backend = absent(CPUBackend, DispatchConfig())
    info = backend.get_device_info()
    with pytest.warns(DeprecationWarning, match="no longer a dict"):
        assert info["device_name"] == info.device_name
    with pytest.warns(DeprecationWarning, match="get_device_info_dict"):
        assert info.get("total_memory_gb") == info.total_memory_gb
    with pytest.warns(DeprecationWarning):
        assert info.get("speed", 3) == 3
    with pytest.warns(DeprecationWarning), pytest.raises(KeyError, match="'device_name'"):
        info["device_nam"]


@pytest.mark.quick
def test_s002_38_an_absent_device_is_never_the_cpu_in_disguise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch)
    backend = absent(NVIDIABackend, DispatchConfig())
    model = nn.Linear(2, 2)
    info = backend.get_device_info()
    assert info.is_available is False
    assert info.properties["reason"] == "no cuda in this test"
    for use in (
        lambda: backend.prepare_model(model),
        lambda: backend.optimize_for_inference(model),
        lambda: backend.optimize_for_training(model),
        lambda: backend.to_device(torch.ones(1)),
        backend.synchronize,
        backend.empty_cache,
        backend.__enter__,
    ):
        with pytest.raises(BackendNotAvailableError, match="no cuda in this test"):
            use()
    assert model.training
    assert model.weight.device.type == "cpu"


@pytest.mark.quick
def test_s002_38_the_old_place_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kernel_dispatch.core.config", raising=False)
    with pytest.warns(DeprecationWarning, match=r"kernel_dispatch\.config import DispatchConfig"):
        old = importlib.import_module("kernel_dispatch.core.config")
    assert old.KernelPyTorchConfig is DispatchConfig


@pytest.mark.quick
@pytest.mark.parametrize("vendor", VENDORS)
def test_s002_39_renamed_methods_are_on_all_of_them(
    vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every backend has `get_device_info_dict()`, and every optimizer `optimize_legacy()`, which
    gives the model only and a DeprecationWarning."""
    machine_with(monkeypatch, *HERE)
    backend = get_backend(vendor)
    assert backend.get_device_info_dict() == backend.get_device_info().to_dict()
    optimizer = get_optimizer(vendor)
    model, prepared = nn.Linear(2, 2), nn.Linear(2, 2)
    monkeypatch.setattr(type(optimizer), "optimize", lambda self, *given: (prepared, given))
    with pytest.warns(DeprecationWarning, match="gives the model only"):
        assert optimizer.optimize_legacy(model, "O1") is prepared


def test_s002_39_optimize_legacy_compiles() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.warns(DeprecationWarning):
        compiled = CPUOptimizer().optimize_legacy(model, "O0", x)
    assert isinstance(compiled, nn.Linear)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.quick
def test_s002_40_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's total memory is a whole number of bytes, and 0 where the system does not tell."""
    total = get_backend("cpu").get_device_info().total_memory_bytes
    assert isinstance(total, int)
    assert total > os.sysconf("SC_PAGE_SIZE")
    silent = dataclasses.replace(machine.cpu(), memory_bytes=0)
    monkeypatch.setattr(machine, "cpu", lambda: silent)
    info = get_backend("cpu").get_device_info()
    assert (info.total_memory_bytes, info.total_memory_gb) == (0, 0.0)


@pytest.mark.quick
def test_s002_13_a_tpu_answers_only_where_its_runtime_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, "tpu")
    from lowering.contract import Probe

    monkeypatch.setattr(devices, "probe_provider", lambda name: Probe.no("no TPU answers"))
    assert absent(TPUBackend).is_available is False
    with pytest.raises(BackendNotAvailableError, match="no TPU answers"):
        get_backend("tpu")


def test_s002_38_device_information_still_reads_like_a_dict() -> None:
    info = get_backend("cpu").get_device_info()
    with pytest.warns(DeprecationWarning, match="no longer a dict"):
        assert "device_name" in info
        assert dict(info) == info.to_dict()
        assert list(info) == list(info.keys())
        assert dict(info.items()) == dict(zip(info, info.values(), strict=True))
