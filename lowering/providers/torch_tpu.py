"""XLA through torch_tpu: the device "tpu" of torch 2.11 and later, and its own compiler."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering import elsewhere
from lowering.contract import Compiled, Graph, Probe, Provider, Request
from lowering.targets import xla

_NO_TPU = "Run on a TPU machine; `ls /dev/accel* /dev/vfio/*` shows its chips"


def probe() -> Probe:
    """Loads torch_tpu, as `import torch` does by itself where it is installed, and counts TPUs."""
    installed = xla.torch_tpu()
    return _started(installed.version) if installed.available else installed


@functools.cache
def _started(version: str) -> Probe:
    try:
        importlib.import_module("torch_tpu")
        count = int(torch.tpu.device_count())  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001  (the runtime's word becomes the reason)
        return Probe.no(f"torch_tpu does not start: {type(error).__name__}: {error}", _NO_TPU)
    if not count:
        return Probe.no(f"torch_tpu {version} sees no TPU", _NO_TPU)
    return Probe.yes(version, device_count=count)


def compile(request: Request) -> Compiled:
    if request.only_plan is not None:
        return elsewhere.plan(request)
    if request.move_to is None:
        return Compiled(run=_by_torch_tpu(request.graph, request.example_inputs))
    there = elsewhere.There(torch.device(request.move_to), _by_torch_tpu, seed=_seed)
    return elsewhere.compile(request, there)


def _by_torch_tpu(
    module: fx.GraphModule, inputs: Sequence[Any], passing: frozenset[int] = frozenset()
) -> Graph:
    """The compiler that torch_tpu registers under the name of its device, which decides by itself
    what it overwrites."""
    from torch._dynamo import lookup_backend

    compile_graph: Any = lookup_backend("tpu")
    return compile_graph(module, list(inputs))


def _seed(number: int) -> None:
    torch.tpu.manual_seed(number)  # type: ignore[attr-defined]


PROVIDER = Provider(
    name="torch_tpu",
    summary="XLA: whole graphs for TPUs, training as well, under torch 2.11 and later",
    probe=probe,
    compile=compile,
    requires=("torch_tpu", "a TPU"),
    moves=True,
    plans=True,
)
