"""DispatchConfig: the options of torch.compile as one value that is checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernel_dispatch.options import OPTIONS
from lowering.errors import unknown
from lowering.levels import Level

_PARSERS = {option.name: option.parse for option in OPTIONS}
_SOURCE = "DispatchConfig"


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Options for the models that a backend prepares.

    What is left at None is not set here: then `configure()`, the environment and the option's own
    default decide, as they do for torch.compile.
    """

    level: str | int | Level | None = None
    device: str | torch.device | None = None
    strict: bool | None = None
    disable: str | Iterable[str] | None = None
    provider: str | None = None
    config: str | os.PathLike[str] | None = None
    threads: int | None = None
    keep_memory: str | int | None = None
    tolerance: float | None = None
    buckets: str | bool | Iterable[int] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    calibration: str | None = None
    guards: str | None = None
    inductor: Mapping[str, Any] | None = None

    def __new__(cls, **values: Any) -> DispatchConfig:
        for name in values:
            if name not in _PARSERS:
                raise unknown("option", name, _PARSERS, _SOURCE)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.as_options().items():
            _PARSERS[name](value, _SOURCE)

    def as_options(self) -> dict[str, Any]:
        """What is set, as `torch.compile(..., options=...)` takes it."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


KernelPyTorchConfig = DispatchConfig  # its name in the documents that this API began with
