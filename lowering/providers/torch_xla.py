"""XLA through torch_xla: whole graphs, forward and backward, for TPUs and what else PJRT runs on.

torch_xla replaces parts of torch when it is imported, so nothing here imports it before a graph is
meant for it, and then torch gets back what CPUs need.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from lowering import elsewhere, strided_memory, xla_graph
from lowering.contract import Compiled, Graph, Probe, Provider, Request
from lowering.fixed_sizes import with_sizes
from lowering.graphs import place
from lowering.reasons import Reason
from lowering.targets import xla


def probe() -> Probe:
    """Imports torch_xla and asks PJRT for its device; the answer holds for the process."""
    installed = xla.torch_xla()
    return _started() if installed.available else installed


@functools.cache
def _started() -> Probe:
    asked = os.environ.get("PJRT_DEVICE")
    try:
        torch_xla = _imported()
        from torch_xla import runtime

        device = torch_xla.device()
        kind = str(runtime.device_type())
    except Exception as error:  # noqa: BLE001  (the runtime's word becomes the reason)
        return Probe.no(
            f"torch_xla does not start: {type(error).__name__}: {error}",
            "Set PJRT_DEVICE to what is here: TPU, CUDA or CPU",
        )
    notes = [] if asked or kind == "TPU" else [f"PJRT found no TPU and computes on its {kind}"]
    return Probe.yes(torch_xla.__version__, device=str(device), pjrt=kind, notes=notes)


def _imported() -> Any:
    """torch_xla, with torch's own GRU and clipping where nobody but us wanted it.

    Those that it puts in their place know XLA's tensors only: a GRU made after that fails on a CPU.
    """
    users = "torch_xla" in sys.modules
    import torch_xla

    if not users:
        for owner, name in ((nn, "GRU"), (nn.utils, "clip_grad_norm_")):
            replaced = getattr(owner, name)
            setattr(owner, name, getattr(replaced, "_orig", replaced))
    return torch_xla


def compile(request: Request) -> Compiled:
    if request.only_plan is not None:
        return elsewhere.plan(request)
    import torch_xla

    _keep_compilations(request.cache_folder)
    there = elsewhere.There(
        torch_xla.device(),
        functools.partial(_compile_graph, request.left_to_eager),
        decompositions=_decompositions,
        seed=torch_xla.manual_seed if request.move_to is not None else None,
    )
    compiled = elsewhere.compile(request, there)
    compiled.notes += _started().details.get("notes", ())
    return compiled


_cache = threading.Lock()


def _keep_compilations(folder: str | None) -> None:
    """XLA's own cache on disk, unless the user has one.

    It has to be named before XLA's first computation: later, torch_xla ignores it, and so do we.
    PJRT's CPU device writes programs that it cannot read back, and complains about each.
    """
    import torch_xla
    from torch_xla import runtime

    with _cache:
        users = "XLA_PERSISTENT_CACHE_PATH" in os.environ
        too_late = torch_xla._XLAC._xla_computation_cache_is_initialized()
        if folder is None or users or too_late or _started().details["pjrt"] == "CPU":
            return
        path = Path(folder) / f"xla-{torch_xla.__version__}"
        path.mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(str(path))


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Rules for operators that XLA has no kernel for and that are made of some that it has."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    rules = {**core_aten_decompositions(), **get_decompositions([*_NOT_FIT])}
    lacking = {op: rule for op, rule in rules.items() if not _has_kernel(op)}
    return {**lacking, **strided_memory.RULES}


# XLA's kernels of batch norm update the running variance without Bessel's correction, and their
# backward asks for saved statistics, which there are none of in evaluation mode.
_aten = torch.ops.aten
_NOT_FIT = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten.native_batch_norm_backward.default,
    }
)


def _has_kernel(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or op in _NOT_FIT:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "XLA")


def _compile_graph(
    left_to_eager: Callable[[Reason], None],
    module: fx.GraphModule,
    inputs: Sequence[Any],
    passing: frozenset[int],
) -> Graph:
    static, tensors = with_sizes(module, inputs)

    def left_out(node: fx.Node) -> None:
        text = f"XLA has no kernel for {node.target}; torch computes it on the CPU"
        left_to_eager(Reason("op-unsupported", text, place(node)))

    donated = [inputs[position] for position in passing]
    run = xla_graph.compile(static, tensors, donated, left_out)
    if len(tensors) == len(inputs):
        return run
    return lambda *args: run(*(arg for arg in args if isinstance(arg, torch.Tensor)))


PROVIDER = Provider(
    name="torch_xla",
    summary="XLA: whole graphs for TPUs and what else PJRT runs on, training as well",
    probe=probe,
    compile=compile,
    requires=("torch_xla of torch's own minor version",),
    moves=True,
    plans=True,
)
