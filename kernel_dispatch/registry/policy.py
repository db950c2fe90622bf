"""What choosing a provider does to a graph: on its targets, others that compute regions are off.

Graphs on other targets are left alone. What the provider does not take goes where it would go
anyway: to Inductor, or to eager below O2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernel_dispatch.registry.table import BY_NAME, BackendInfo
from lowering import targets
from lowering.capability import GRAPH, CapabilityRow
from lowering.levels import Level


def stands_apart(info: BackendInfo) -> bool:
    """Does it compute regions of its own? A whole target keeps all that it has."""
    return any(
        row.provider in info.providers and row.region != GRAPH
        for target in targets.ours()
        for row in target.rows
    )


def switched_off(info: BackendInfo, target: str) -> frozenset[str]:
    """Providers that do not compute regions of this target while `info` is chosen."""
    record = targets.find(target)
    if record is None or target not in info.targets or not stands_apart(info):
        return frozenset()
    whole = {row.provider for row in record.rows if row.region == GRAPH}
    regions = {row.provider for row in record.rows if row.region != GRAPH}
    return frozenset(regions - whole - set(info.providers))


@functools.cache
def effect(provider: str | None, target: str) -> frozenset[str]:
    """As `switched_off`, by name; no choice switches nothing off."""
    return switched_off(BY_NAME[provider], target) if provider is not None else frozenset()


def as_chosen(row: CapabilityRow, provider: str | None) -> CapabilityRow:
    """Who was chosen does not have to show first that he is the fastest."""
    if provider is None or row.provider not in BY_NAME[provider].providers:
        return row
    return replace(row, only_if_measured=False)


def inductor_config(provider: str | None, target: str, level: Level) -> Mapping[str, Any]:
    """What Inductor is told beside the target's own wishes."""
    if provider == "triton" and target in BY_NAME[provider].targets and level >= Level.O3:
        return {
            "max_autotune_gemm_backends": "TRITON"
        }  # products too are Triton's, not a library's
    return {}
