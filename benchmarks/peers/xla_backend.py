"""torch_xla on the CPU, in an interpreter of its own: its last release needs torch 2.9.

Weights move to the XLA device once; inputs and outputs move in every call, as they have to for a
caller whose tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.peers.evidence import (
    PartlyEager,
    PeerError,
    dynamo_graphs,
    left_to_eager,
    one_clear_line,
    watched,
)
from benchmarks.peers.installation import OwnInterpreter, versions
from kernel_dispatch.bench import Case, Contender

_INTERPRETER = OwnInterpreter("xla", "torch_xla", "2.9")
_COMPILED = "DynamoExtractCompiledGraph"


def judge(counters: Sequence[str], fallbacks: Sequence[str]) -> None:
    """`counters`: the names of what XLA counted during the call."""
    if _COMPILED not in counters:
        raise PeerError("XLA compiled no graph of it: its operators ran one by one")
    if fallbacks:
        warnings.warn(left_to_eager("XLA", fallbacks), PartlyEager, stacklevel=2)


@contextlib.contextmanager
def _watch() -> Iterator[None]:
    import torch_xla.debug.metrics as metrics

    metrics.clear_all()
    with dynamo_graphs():
        yield
    judge(metrics.counter_names(), metrics.executed_fallback_ops())


def _moved(tree: Any, device: Any) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, tree)


def _prepare(case: Case) -> Callable[..., Any]:
    with one_clear_line():
        import torch_xla

        device = torch_xla.device()
        fn: Any = case.fn
        if isinstance(fn, torch.nn.Module):
            fn = copy.deepcopy(fn).to(device)  # the caller's weights stay where they are
        compiled: Callable[..., Any] = torch.compile(fn, backend="openxla")

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _moved((args, kwargs), device)
        return _moved(compiled(*args, **kwargs), "cpu")  # which waits for the device

    return watched(run, _watch)


PEERS = (
    Contender(
        "torch_xla",
        'PJRT_DEVICE=CPU, torch.compile(model.to("xla"), backend="openxla"), inputs moved there '
        "and outputs back in every call",
        _prepare,
        missing=_INTERPRETER.missing,
        version=partial(versions, "torch", "torch_xla"),
        environment={"PJRT_DEVICE": "CPU"},
        python=_INTERPRETER.python,
        trains=False,
    ),
)
