"""Devices that a dry run can name: GPUs by their architecture, other targets by their name or by a
machine that their record describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_dispatch import devices
from kernel_dispatch.selection import Machine
from lowering import targets
from lowering.contract import Probe, Target
from lowering.errors import SettingError, nearest
from lowering.targets.gpu import features_of
from triton_kernels import architectures
from triton_kernels.architectures import Architecture

_BY_ARCHITECTURE = {"cuda": "cuda", "hip": "rocm"}  # what Triton calls the maker -> target


@dataclass(frozen=True)
class ImaginedDevice:
    """A device to plan for: the target, and what its probe would find there."""

    name: str
    target: Target
    details: Mapping[str, Any] = field(default_factory=dict)
    absent: str = ""  # why the target is not on this machine; empty: it is
    architecture: Architecture | None = None
    real: bool = False  # the device of this machine, with what is installed beside it

    @property
    def torch_device(self) -> str:
        """Where tensors are when a graph is planned for it."""
        if self.forced:
            return "cpu"
        return str(self.details.get("device", self.target.device_types[0]))

    @property
    def forced(self) -> bool:
        """No tensor lives there: it computes for the CPU's where its user forces it."""
        return self.details.get("tensors") == "cpu"

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(self.details.get("features", ()))

    def machine(self) -> Machine:
        """One with that device; imagined ones have everything that their providers need."""
        there = Probe.yes(self.architecture.card if self.architecture else "", **self.details)
        elsewhere = Probe.no(f"this plan is for {self.name}")

        def probe(other: Target) -> Probe:
            if self.forced and other.name == "cpu":
                return devices.probe(other)
            return there if other.name == self.target.name else elsewhere

        return Machine(targets.known(), probe, devices.absent if self.real else lambda _: "")


def names() -> list[str]:
    """Everything that a dry run takes, aliases aside."""
    found = [one.device for one in architectures.KNOWN]
    for target in targets.known():
        if target.name not in _BY_ARCHITECTURE.values():
            found += [target.name, *(f"{target.name}:{variant}" for variant in target.on_paper)]
    return found


def parse_device(device: str) -> ImaginedDevice:
    """The device in "cuda:sm90", "rocm:gfx942", "mps", "xpu:client" ... An index means nothing."""
    known = names()
    alias, _, variant = str(device).lower().partition(":")
    target = targets.resolve_name(alias) or alias
    bare = not variant or (target in known and variant.isdigit())
    wanted = target if bare else f"{target}:{variant}"
    if wanted not in known:
        near = nearest(wanted, known)
        hint = f" Did you mean {near!r}?" if near else ""
        raise SettingError(
            f"device={str(device)!r} is none that a dry run knows: one of {', '.join(known)}.{hint}"
        )
    by_architecture = {one.device: one for one in architectures.KNOWN}
    if wanted in by_architecture:
        return _gpu(by_architecture[wanted])
    record = targets.find(target)
    assert record is not None
    return _described(record, "" if bare else variant)


def _gpu(architecture: Architecture) -> ImaginedDevice:
    target = targets.find(_BY_ARCHITECTURE[architecture.backend])
    assert target is not None
    details = {"features": sorted(features_of(architecture.name))}
    absent = devices.probe(target).reason
    return ImaginedDevice(architecture.device, target, details, absent, architecture)


def _described(target: Target, variant: str) -> ImaginedDevice:
    found = devices.probe(target)
    if found.available and not variant:
        return ImaginedDevice(target.name, target, found.details, real=True)
    variant = variant or next(iter(target.on_paper), "")
    name = f"{target.name}:{variant}" if variant else target.name
    details = target.on_paper[variant] if variant else _all_features(target)
    return ImaginedDevice(name, target, details, found.reason)


def _all_features(target: Target) -> dict[str, Any]:
    """A machine that has whatever some row of the target asks for."""
    return {"features": sorted({name for row in target.rows for name in row.features})}


def is_imagined(device: str) -> bool:
    """Does this name a kind of device, and not one of this machine (`cuda:1`, `mps`)?"""
    _, _, name = device.partition(":")
    return bool(name) and not name.isdigit()


def is_elsewhere(device: str) -> bool:
    """Is this the bare name of a target that a dry run takes and that is not on this machine?"""
    alias, _, index = device.strip().lower().partition(":")
    name = targets.resolve_name(alias)
    target = targets.find(name) if name is not None else None
    if target is None or target.name in _BY_ARCHITECTURE.values() or (index and index != "0"):
        return False
    return not devices.probe(target).available
