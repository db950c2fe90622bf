"""In which dtypes a provider computes: what its capability rows and the probe's features say."""

from __future__ import annotations

import torch

from kernel_dispatch.registry.policy import stands_apart
from kernel_dispatch.registry.table import BackendInfo
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Target
from lowering.errors import SettingError, unknown

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_OTHERS = ("int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
COMMON = (*sorted(_FLOATS), *_OTHERS, *EIGHT_BITS)


def name_of(dt: torch.dtype | str) -> str:
    """ "float32" for torch.float32, "float32" and "torch.float32"; anything else is an error."""
    name = str(dt).removeprefix("torch.")
    known = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    if not isinstance(dt, (torch.dtype, str)):
        raise SettingError(f"supports_data_type({dt!r}): give a torch.dtype or its name.")
    if name not in known:
        raise unknown("dtype", dt, known)
    return str(getattr(torch, name)).removeprefix("torch.")  # "half" is float16


def supported(info: BackendInfo, target: Target, features: frozenset[str]) -> tuple[str, ...]:
    """Of the common ones."""
    return tuple(name for name in COMMON if supports(info, target, features, name))


def supports(info: BackendInfo, target: Target, features: frozenset[str], dtype: str) -> bool:
    apart = stands_apart(info)
    rows = [row for row in target.rows if not apart or row.provider in info.providers]
    if not apart:
        rows = [row for row in rows if row.region == GRAPH]
    return any(_takes(row, dtype, features) for row in rows)


def _takes(row: CapabilityRow, dtype: str, features: frozenset[str]) -> bool:
    if not row.features <= features or dtype in row.refused_dtypes:
        return False
    needed = {feature for name, feature in row.dtype_features if name == dtype}
    if not needed <= features:
        return False
    if dtype in EIGHT_BITS:  # torch stores them anywhere, and computes where the hardware does
        return "fp8" in features and (row.region == GRAPH or "fp8" in row.features)
    if row.dtypes is not None:
        return dtype in row.dtypes
    # A region is a product, a convolution or attention, whatever else torch would take.
    return row.region == GRAPH or dtype in _FLOATS
