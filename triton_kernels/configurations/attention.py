"""Attention: how many queries by how many keys a program works on at a time.

By kind of architecture and by head size, the best guess first. Nothing spills with any kind of
mask; where there is no entry, the kernel is not used and the operator computes its plain meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config

Table = Mapping[int, tuple[Config, ...]]  # by head size: 64 is for all up to it


def _of(rows: int, columns: int, warps: int, stages: int, waves: int | None = None) -> Config:
    return Config({"ROWS": rows, "COLUMNS": columns}, warps, stages, waves)


# Sixteen bits.
_FORWARD: Mapping[str, Table] = {
    "ampere": {
        64: (_of(128, 64, 8, 3), _of(64, 64, 4, 3)),
        128: (_of(128, 64, 8, 3), _of(64, 64, 4, 2)),
        256: (_of(64, 64, 8, 2),),
    },
    "small": {  # as Ampere, with little shared memory
        64: (_of(128, 64, 8, 3), _of(64, 64, 4, 3)),
        128: (_of(128, 32, 8, 2), _of(64, 64, 4, 2)),
        256: (_of(64, 32, 8, 2),),
    },
    "hopper": {
        64: (_of(128, 128, 8, 2), _of(128, 64, 8, 3), _of(64, 64, 4, 3)),
        128: (_of(128, 128, 8, 2), _of(128, 64, 8, 3), _of(64, 64, 4, 3)),
        256: (_of(128, 32, 8, 2), _of(64, 64, 8, 2)),
    },
    "blackwell": {
        64: (_of(128, 128, 8, 2), _of(64, 64, 4, 3)),
        128: (_of(128, 64, 8, 3), _of(64, 64, 4, 3)),
        256: (_of(128, 32, 8, 2), _of(64, 64, 8, 2)),
    },
    "cdna": {
        64: (_of(128, 64, 8, 2), _of(64, 32, 4, 2)),
        128: (_of(128, 32, 4, 2, 2), _of(64, 32, 4, 2)),
        256: (_of(64, 32, 4, 2),),
    },
    "rdna": {
        64: (_of(128, 32, 8, 2), _of(64, 32, 8, 2)),
        128: (_of(128, 16, 8, 1), _of(64, 16, 4, 1)),
    },
}
_QUERY_BACKWARD: Mapping[str, Table] = {
    "ampere": {
        64: (_of(128, 64, 8, 2), _of(64, 32, 4, 2)),
        128: (_of(128, 32, 8, 2), _of(64, 32, 4, 2)),
        256: (_of(64, 32, 8, 1),),
    },
    "small": {
        64: (_of(128, 64, 8, 2), _of(64, 32, 4, 2)),
        128: (_of(64, 32, 4, 2),),
        256: (_of(64, 32, 8, 1),),
    },
    "hopper": {
        64: (_of(128, 64, 8, 2), _of(64, 64, 4, 2)),
        128: (_of(128, 64, 8, 2), _of(64, 64, 4, 2)),
        256: (_of(64, 64, 8, 2),),
    },
    "blackwell": {
        64: (_of(128, 64, 8, 2), _of(64, 64, 4, 2)),
        128: (_of(128, 64, 8, 2), _of(64, 64, 4, 2)),
        256: (_of(128, 32, 8, 2),),
    },
    "cdna": {
        64: (_of(128, 32, 4, 1), _of(64, 32, 4, 1)),
        128: (_of(64, 32, 4, 1), _of(64, 16, 4, 1)),
        256: (_of(64, 16, 4, 1),),
    },
    "rdna": {64: (_of(64, 16, 4, 1),)},
}
_KEY_BACKWARD: Mapping[str, Table] = {
    "ampere": {
        64: (_of(32, 128, 8, 1), _of(16, 64, 4, 2)),
        128: (_of(32, 64, 8, 2),),
        256: (_of(16, 64, 8, 1), _of(16, 32, 8, 2)),
    },
    "small": {
        64: (_of(32, 128, 8, 1), _of(16, 64, 4, 2)),
        128: (_of(32, 64, 8, 2),),
        256: (_of(16, 32, 8, 1),),
    },
    "hopper": {
        64: (_of(64, 128, 8, 2), _of(32, 64, 4, 2)),
        128: (_of(32, 64, 8, 2), _of(16, 64, 8, 2)),
        256: (_of(16, 64, 8, 2), _of(16, 32, 8, 2)),
    },
    "blackwell": {
        64: (_of(32, 128, 8, 2), _of(32, 64, 4, 2)),
        128: (_of(32, 64, 8, 1), _of(16, 64, 8, 2)),
        256: (_of(16, 64, 8, 1), _of(16, 32, 8, 2)),
    },
    "cdna": {
        64: (_of(32, 64, 8, 1, 2), _of(16, 64, 4, 1)),
        256: (_of(16, 64, 4, 1),),
    },
    "rdna": {64: (_of(16, 64, 8, 1),)},
}
# Float32 without TF32: no matrix units on NVIDIA, so tiles have to be small.
_EXACT_FORWARD: Mapping[str, Table] = {
    "cuda": {64: (_of(32, 32, 4, 1),), 256: (_of(16, 32, 4, 1),)},
    "cdna": {256: (_of(16, 32, 4, 1),)},
}
_EXACT_QUERY_BACKWARD: Mapping[str, Table] = {
    "cuda": {64: (_of(32, 16, 4, 1),), 128: (_of(16, 16, 8, 1),)},
    "cdna": {256: (_of(32, 16, 4, 1),)},
}
_EXACT_KEY_BACKWARD: Mapping[str, Table] = {
    "cuda": {256: (_of(16, 16, 4, 1),)},
    "cdna": {256: (_of(16, 16, 4, 1),)},
}

FEW = 16  # queries that one tile holds


def forward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype, precision: str
) -> tuple[Config, ...]:
    """Tile ROWS x COLUMNS of queries by keys; `size` is the larger of the two head sizes."""
    found = _found(_FORWARD, _EXACT_FORWARD, architecture, size, dtype, precision)
    if queries <= FEW and dtype is not torch.float32:
        return tuple(_of(FEW, min(32, one["COLUMNS"]), 4, one.stages) for one in found[-1:])
    return found[-1:] if queries <= 64 else found


def query_backward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype, precision: str
) -> tuple[Config, ...]:
    """For the gradient of the queries, which goes along the keys as the forward does."""
    return _found(_QUERY_BACKWARD, _EXACT_QUERY_BACKWARD, architecture, size, dtype, precision)


def key_backward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype, precision: str
) -> tuple[Config, ...]:
    """For the gradients of keys and values, which goes along the queries: two tiles of sums."""
    return _found(_KEY_BACKWARD, _EXACT_KEY_BACKWARD, architecture, size, dtype, precision)


def beside_a_mask(candidates: tuple[Config, ...]) -> tuple[Config, ...]:
    """Where masks lie takes registers: the smallest tile is the one that has some left."""
    return candidates[-1:]


def _found(
    half: Mapping[str, Table],
    exact: Mapping[str, Table],
    architecture: Architecture,
    size: int,
    dtype: torch.dtype,
    precision: str,
) -> tuple[Config, ...]:
    kind = _kind(architecture)
    if dtype is not torch.float32:
        return _at(half.get(kind, {}), size)
    if precision == "tf32" and 2 * size <= 256:  # as many bytes as a head twice as large
        return _at(half.get(kind, {}), 2 * size)
    return _at(exact.get("cuda" if architecture.backend == "cuda" else kind, {}), size)


def _at(table: Table, size: int) -> tuple[Config, ...]:
    return next((configs for largest, configs in table.items() if size <= largest), ())


def _kind(architecture: Architecture) -> str:
    if architecture.backend == "hip":
        return "cdna" if architecture.lanes == 64 else "rdna"
    if architecture.name in ("sm90", "sm100"):
        return "hopper" if architecture.name == "sm90" else "blackwell"
    return "ampere" if architecture.shared_bytes > 128 << 10 else "small"
