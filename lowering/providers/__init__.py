"""Every provider that this installation knows. A provider is one file with one record."""

from __future__ import annotations

import functools
import importlib

from lowering import targets
from lowering.capability import CapabilityRow
from lowering.contract import Provider, RegionMaker

MODULES = (
    *("eager", "inductor", "mkldnn", "openmp", "mha", "mkl", "nnpack", "opt_einsum", "ipex"),
    "xeon",
    *("triton", "metal", "cudnn", "cusparselt", "torch_xla", "torch_tpu", "nki"),
)


def ours() -> tuple[Provider, ...]:
    """The providers that come with this package."""
    records = (importlib.import_module(f"lowering.providers.{name}").PROVIDER for name in MODULES)
    return tuple(records)


@functools.cache
def known() -> dict[str, Provider]:
    """name -> provider: ours, and the ones that third-party targets bring along."""
    brought = [provider for target in targets.known() for provider in target.providers]
    return {provider.name: provider for provider in [*brought, *ours()]}


def names() -> list[str]:
    return sorted(known())


def get(name: str) -> Provider:
    return known()[name]


def maker(row: CapabilityRow) -> RegionMaker:
    """How the row's provider computes the row's region."""
    provider = get(row.provider)
    return (provider.early_regions if row.early else provider.regions)[row.region]
