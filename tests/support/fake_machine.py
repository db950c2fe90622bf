"""A machine that is not this one, for whatever asks `kernel_dispatch.devices`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from kernel_dispatch import devices
from lowering import targets
from lowering.contract import Probe, Target
from lowering.targets.gpu import features_of


def gpu(architecture: str, cards: int = 1, memory: int = 80 << 30) -> dict[str, Any]:
    """What the probe of `cuda` or `rocm` tells of such cards."""
    card = {"name": f"a {architecture}", "arch": architecture, "memory_bytes": memory}
    return {
        "device_count": cards,
        "devices": [card] * cards,
        "features": sorted(features_of(architecture)),
    }


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    here: Mapping[str, Mapping[str, Any]],
    working: Collection[str] = (),
    missing: Collection[str] = (),
) -> None:
    """These targets are here, with these details; `working` are providers that say yes, `missing`
    such that say no. The CPU is this machine's own."""
    real, real_provider = devices.probe, devices.probe_provider

    def probe(target: Target) -> Probe:
        if target.name in here:
            return Probe.yes("fake", **here[target.name])
        return real(target)

    def probe_provider(name: str) -> Probe:
        if name in missing:
            return Probe.no("fake")
        return Probe.yes("fake") if name in working else real_provider(name)

    monkeypatch.setattr(devices, "probe", probe)
    monkeypatch.setattr(devices, "probe_provider", probe_provider)


def target(name: str) -> Target:
    found = targets.find(name)
    assert found is not None
    return found
