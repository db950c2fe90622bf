"""The vendors by name: what `get_backend` and `BackendFactory.create` take."""

from __future__ import annotations

import enum

from lowering import targets
from lowering.errors import SettingError, unknown


class BackendType(str, enum.Enum):
    """A vendor; equal to its lower-case name. AUTO is the best one that is here."""

    AUTO = "auto"
    NVIDIA = "nvidia"
    AMD = "amd"
    TPU = "tpu"
    INTEL = "intel"
    MPS = "mps"
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: object) -> BackendType:
        """A vendor for its name, in any case, or for a name of its target: "cuda", "hip", "xla"."""
        word = str(name).strip().lower() if isinstance(name, str) else ""
        found = _BY_NAME.get(word) or cls.of_target(targets.resolve_name(word) or "")
        if found is None:
            raise unknown("backend", name, accepted())
        return found

    @classmethod
    def of_target(cls, target: str) -> BackendType | None:
        """Whose devices a target stands for; None for targets without a class of their own."""
        return next((one for one, its in TARGETS.items() if its == target), None)


# A vendor's name comes before an alias: the device `intel` may be a CPU, the vendor is the GPU.
_BY_NAME = {one.value: one for one in BackendType}
TARGETS = {
    BackendType.NVIDIA: "cuda",
    BackendType.AMD: "rocm",
    BackendType.TPU: "xla",
    BackendType.INTEL: "xpu",
    BackendType.MPS: "mps",
    BackendType.CPU: "cpu",
}


def accepted() -> list[str]:
    """Vendors, and the other names of their targets."""
    known = (targets.find(name) for name in TARGETS.values())
    others = {name for one in known if one is not None for name in (one.name, *one.aliases)}
    return sorted(others | {one.value for one in BackendType})


def without_class(target: str, source: str) -> SettingError:
    """A device that graphs can be compiled for and that has no backend class."""
    return SettingError(
        f"{target!r} (from {source}) has no backend class; it is a device of "
        f'torch.compile(model, backend="unified", options={{"device": "{target}"}}). '
        f"Backends: {', '.join(one.value for one in BackendType)}."
    )
