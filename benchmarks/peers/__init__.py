"""Other tools, each run as its own documentation says. Importing this imports none of them."""

from __future__ import annotations

from benchmarks.peers import (
    inductor_modes,
    ipex_backend,
    onnx_runtime,
    openvino_backend,
    xla_backend,
    zentorch_backend,
)
from kernel_dispatch.bench import Contender

PEERS: tuple[Contender, ...] = (
    *inductor_modes.PEERS,
    *openvino_backend.PEERS,
    *onnx_runtime.PEERS,
    *zentorch_backend.PEERS,
    *ipex_backend.PEERS,
    *xla_backend.PEERS,
)

__all__ = ["PEERS"]
