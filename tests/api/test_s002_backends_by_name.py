"""S002-01 to 06 and 19 to 24: which backends there are, and how one is chosen."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import backends, default_backend
from kernel_dispatch.backends import (
    AMDBackend,
    BackendFactory,
    BackendType,
    BaseBackend,
    BaseOptimizer,
    CPUBackend,
    CPUOptimizer,
    DeviceInfo,
    IntelBackend,
    MPSBackend,
    NVIDIABackend,
    TPUBackend,
    detect_best_backend,
    get_backend,
    get_optimizer,
    list_available_backends,
)
from kernel_dispatch.config import DispatchConfig, KernelPyTorchConfig
from kernel_dispatch.settings import list_options
from lowering.errors import BackendNotAvailableError, RegistrationError, SettingError
from tests.api.vendors import machine_with

CLASSES = {
    "nvidia": NVIDIABackend,
    "amd": AMDBackend,
    "tpu": TPUBackend,
    "intel": IntelBackend,
    "mps": MPSBackend,
    "cpu": CPUBackend,
}
ORDER = list(CLASSES)


@pytest.mark.quick
def test_s002_01_every_name_of_the_document_is_there() -> None:
    """`kernel_dispatch.backends` has every name of the document, and `kernel_dispatch` those that
    most programs need."""
    names = """BackendFactory BackendType get_backend detect_best_backend list_available_backends
    get_optimizer OptimizationLevel DeviceInfo OptimizationResult OptimizationStrategy BaseBackend
    BaseOptimizer"""
    for name in names.split():
        assert hasattr(backends, name), name
        if not name.startswith("Base"):
            assert getattr(kernel_dispatch, name) is getattr(backends, name)
    assert set(names.split()) <= set(backends.__all__)


@pytest.mark.quick
def test_s002_02_get_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_backend()` gives the best backend that is here, `get_backend(name, config)` that one."""
    machine_with(monkeypatch, "amd")
    assert type(get_backend()) is AMDBackend
    config = DispatchConfig(level="O1")
    backend = get_backend("cpu", config)
    assert type(backend) is CPUBackend
    assert backend.config is config


@pytest.mark.quick
@pytest.mark.parametrize("given", ["nvidia", "NVIDIA", " cuda ", BackendType.NVIDIA])
def test_s002_03_create_takes_members_names_and_aliases(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`BackendFactory.create` takes a `BackendType`, a name in any case, or an alias of the device;
    anything else is a ValueError that names what is accepted."""
    machine_with(monkeypatch, "nvidia")
    assert type(BackendFactory.create(given)) is NVIDIABackend


@pytest.mark.quick
@pytest.mark.parametrize("given", ["nvidea", "", "neuron", 3])
def test_s002_03_create_refuses_what_is_unknown(given: Any) -> None:
    with pytest.raises(ValueError, match="unknown backend") as caught:
        BackendFactory.create(given)
    assert isinstance(caught.value, SettingError)
    assert repr(given) in str(caught.value)
    assert "nvidia" in str(caught.value)
    assert given != "nvidea" or "Did you mean 'nvidia'?" in str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in ORDER if name != "cpu"])
def test_s002_03_named_and_absent_is_an_error_that_lists_what_is_here(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch)
    with pytest.raises(BackendNotAvailableError) as caught:
        BackendFactory.create(name)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    text = str(caught.value)
    assert f"the backend {name!r} was asked for" in text
    assert f"no {CLASSES[name].TARGET} in this test" in text
    assert "Available: cpu." in text
    assert "To get it: buy a" in text


@pytest.mark.quick
def test_s002_04_members() -> None:
    """`BackendType` has AUTO, NVIDIA, AMD, TPU, INTEL, CPU and MPS, equal to their lower-case
    names."""
    members = {member.name: member for member in BackendType}
    assert set(members) == {"AUTO", "NVIDIA", "AMD", "TPU", "INTEL", "MPS", "CPU"}
    for name, member in members.items():
        assert member == name.lower() == member.value == str(member) == f"{member}"


@pytest.mark.quick
def test_s002_05_a_class_for_each_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each vendor has a backend class under `BaseBackend`, with its name in `BACKEND_NAME`."""
    machine_with(monkeypatch, *(name for name in ORDER if name != "cpu"))
    for name, kind in CLASSES.items():
        assert issubclass(kind, BaseBackend)
        assert name == kind.BACKEND_NAME
        assert type(BackendFactory.create(name)) is kind


@pytest.mark.quick
def test_s002_06_an_optimizer_for_each_vendor() -> None:
    """`get_optimizer(name)` gives the vendor's own class under `BaseOptimizer`, also where its
    device is absent; there it lists strategies, and refuses to optimize."""
    for name, kind in CLASSES.items():
        optimizer = get_optimizer(name)
        assert type(optimizer).__name__ == kind.__name__.replace("Backend", "Optimizer")
        assert isinstance(optimizer, BaseOptimizer)
    absent = next(name for name in ORDER if name not in list_available_backends())
    with pytest.raises(BackendNotAvailableError):
        get_optimizer(absent).optimize(nn.Linear(2, 2), sample_input=torch.ones(1, 2))


@pytest.mark.quick
def test_s002_19_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BackendFactory.is_available(type)` says whether that backend can be created here."""
    machine_with(monkeypatch, "intel")
    told = {name: BackendFactory.is_available(name) for name in ORDER}
    assert told == {name: name in ("intel", "cpu") for name in ORDER}
    assert BackendFactory.is_available(BackendType.INTEL)
    assert BackendFactory.is_available(BackendType.AUTO)
    with pytest.raises(SettingError, match="unknown backend 'inetl'"):
        BackendFactory.is_available("inetl")


@pytest.mark.quick
def test_s002_20_list_available_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`list_available_backends()` is a sorted list of names, and the CPU is always among them."""
    assert "cpu" in list_available_backends()
    machine_with(monkeypatch, "nvidia")
    found = list_available_backends()
    assert found == ["cpu", "nvidia"]
    assert all(type(name) is str for name in found)


@pytest.mark.quick
def test_s002_21_detect_best_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`detect_best_backend()` is the member, which is equal to its name."""
    machine_with(monkeypatch)
    assert detect_best_backend() == "cpu"
    assert detect_best_backend() is BackendType.CPU
    machine_with(monkeypatch, "mps")
    assert detect_best_backend() is BackendType.MPS


@pytest.mark.quick
def test_s002_22_get_all_backend_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_all_backend_info()` tells of every vendor whether it is here, its class, and why not;
    one broken probe stops nobody else."""
    machine_with(monkeypatch, "nvidia")

    def broken(self: Any) -> bool:
        raise OSError("the driver is gone")

    monkeypatch.setattr(AMDBackend, "_check_availability", broken)
    info = BackendFactory.get_all_backend_info()
    assert list(info) == ORDER
    assert {name: told["class"] for name, told in info.items()} == {
        name: kind.__name__ for name, kind in CLASSES.items()
    }
    assert info["nvidia"]["available"] is True
    assert info["nvidia"]["device_count"] == 2
    assert info["amd"]["available"] is False
    assert info["amd"]["reason"] == "asking for it raised OSError: the driver is gone"
    assert info["mps"]["reason"] == "no mps in this test"


@pytest.mark.quick
def test_s002_23_order_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO takes NVIDIA, then AMD, TPU, Intel, MPS, then the CPU: the first that is here, in every
    combination of them."""
    devices_of = [name for name in ORDER if name != "cpu"]
    for size in range(len(devices_of) + 1):
        for here in itertools.combinations(devices_of, size):
            machine_with(monkeypatch, *here)
            expected = here[0] if here else "cpu"
            assert detect_best_backend() == expected, here
            assert expected == get_backend().BACKEND_NAME


@pytest.mark.quick
def test_s002_23_auto_leaves_xla_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, "tpu", pjrt="CPU")
    assert detect_best_backend() is BackendType.CPU
    assert list_available_backends() == ["cpu", "tpu"]
    assert get_backend("tpu").get_device_info().properties["runtime"] == "CPU"


@pytest.mark.quick
def test_s002_23_what_is_forced_comes_before_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, "nvidia")
    with kernel_dispatch.configure(device="cpu"):
        assert detect_best_backend() is BackendType.CPU
    monkeypatch.setenv("UNIFIED_DEVICE", "cuda:1")
    assert get_backend().device == torch.device("cuda", 1)
    monkeypatch.setenv("UNIFIED_DEVICE", "cpu")
    assert type(get_backend()) is CPUBackend
    monkeypatch.setenv("UNIFIED_DEVICE", "rocm")
    with pytest.raises(BackendNotAvailableError, match="'amd'"):
        get_backend()
    monkeypatch.setenv("UNIFIED_DEVICE", "neuron")
    with pytest.raises(
        SettingError, match=r"'neuron' \(from UNIFIED_DEVICE\) has no backend class"
    ):
        get_backend()


@pytest.mark.quick
def test_s002_23_the_chosen_default_comes_before_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, "nvidia", "mps")
    try:
        for chosen, expected in {"mkl": "cpu", "mps": "mps", "triton": "nvidia"}.items():
            default_backend.choose(chosen)
            assert detect_best_backend() == expected
        default_backend.choose("nki")
        with pytest.raises(SettingError, match=r"'neuron'.*has no backend class"):
            get_backend()
    finally:
        default_backend.choose(None)


@pytest.mark.quick
def test_s002_24_the_configuration_is_checked_when_it_is_made() -> None:
    """A `DispatchConfig` (also called `KernelPyTorchConfig`) has torch.compile's options as fields,
    checks them when it is made, and reaches every model that the backend prepares."""
    assert KernelPyTorchConfig is DispatchConfig
    fields = set(DispatchConfig.__dataclass_fields__)
    assert fields == set(list_options())
    assert DispatchConfig().as_options() == {}
    with pytest.raises(SettingError, match=r"'levle' \(from DispatchConfig\).*'level'"):
        DispatchConfig(levle="O1")
    with pytest.raises(SettingError, match=r"'O9' \(from DispatchConfig\)"):
        DispatchConfig(level="O9")
    with pytest.raises(SettingError, match="threads=0"):
        DispatchConfig(threads=0)
    with pytest.raises(SettingError, match="DispatchConfig"):
        get_backend("cpu", config={"level": "O1"})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no device of the backend 'cpu'"):
        get_backend("cpu", DispatchConfig(device="cuda"))


def test_s002_24_the_configuration_reaches_the_models() -> None:
    config = DispatchConfig(level="conservative", threads=1, disable=["mkldnn"])
    model = get_backend("cpu", config).prepare_model(nn.Linear(4, 4))
    model(torch.ones(2, 4))
    (graph,) = kernel_dispatch.report(model)
    shown = graph.settings.as_dict()
    assert shown["level"] == {"value": "O1", "source": "options="}
    assert shown["threads"] == {"value": 1, "source": "options="}
    assert shown["disable"] == {"value": ["mkldnn"], "source": "options="}
    assert shown["strict"]["source"] == "default"


@pytest.mark.quick
def test_s002_24_a_file_that_switches_a_target_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with(monkeypatch, "nvidia")
    file = tmp_path / "config.cmake"
    file.write_text("set(USE_CPU ON)\n")
    config = DispatchConfig(config=file)
    assert not BackendFactory.is_available("amd")
    assert type(get_backend(config=config)) is CPUBackend
    with pytest.raises(BackendNotAvailableError, match=r"config\.cmake"):
        get_backend("nvidia", config)


# --- a backend of somebody else's -----------------------------------------------------------------


class _Chip(BaseBackend):
    BACKEND_NAME = "chip"
    here = True

    def _setup_environment(self) -> None: ...

    def _check_availability(self) -> bool:
        return self.here

    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        return DeviceInfo("chip", "cpu", device_id, "a chip", None, 0, None, self.here, {})

    def prepare_model(self, model: nn.Module, optimization_level: Any = None) -> nn.Module:
        return model

    def optimize_for_inference(
        self, model: nn.Module, sample_input: Any = None, dtype: Any = None
    ) -> nn.Module:
        return model.eval()

    def optimize_for_training(
        self, model: nn.Module, optimizer: Any = None, dtype: Any = None
    ) -> Any:
        return model if optimizer is None else (model, optimizer)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_dispatch.backends import factory

    monkeypatch.setattr(factory, "_registered", {})
    BackendFactory.register_backend("chip", _Chip)


@pytest.mark.quick
@pytest.mark.usefixtures("registered")
def test_s002_03_a_registered_backend_is_created_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(get_backend("Chip")) is _Chip
    assert "chip" in list_available_backends()
    assert detect_best_backend() != "chip"
    with pytest.raises(SettingError, match="without an optimizer"):
        get_optimizer("chip")
    with pytest.raises(RegistrationError, match="override=True"):
        BackendFactory.register_backend("chip", _Chip)
    BackendFactory.register_backend("chip", _Chip, CPUOptimizer, override=True)
    assert type(get_optimizer("chip")) is CPUOptimizer
    monkeypatch.setattr(_Chip, "here", False)
    with pytest.raises(BackendNotAvailableError, match=r"'chip'.*Available: .*cpu"):
        get_backend("chip")


@pytest.mark.quick
def test_s002_03_what_cannot_be_registered() -> None:
    for name, kind in {"cpu": _Chip, "no name": _Chip, "base": BaseBackend, "int": int}.items():
        with pytest.raises(RegistrationError):
            BackendFactory.register_backend(name, kind)  # type: ignore[arg-type]


def test_s002_23_a_broken_driver_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Any) -> bool:
        raise OSError("driver broke")

    monkeypatch.setattr(AMDBackend, "_check_availability", breaks)
    assert detect_best_backend() == "cpu"
    assert get_backend().BACKEND_NAME == "cpu"
    with pytest.raises(BackendNotAvailableError, match="'amd' was asked for"):
        get_backend("amd")


def test_s002_02_no_name_is_auto() -> None:
    assert detect_best_backend() == get_backend(None).BACKEND_NAME


def test_s002_24_a_file_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CONFIG", "/nowhere/config.cmake")
    with pytest.raises(ValueError, match=r"/nowhere/config\.cmake"):
        list_available_backends()
