"""OpenVINO through torch.compile: as it is, with AOTAutograd's graphs, and those held to float32.

Its backend catches what goes wrong and hands the graph to Inductor, or the operators to eager, and
says so at DEBUG level only; so its log and its partitions are read after the first call. As it is,
openvino 2026.4.1 raises under torch 2.13 for most graphs with a view or a convolution;
`aot_autograd`, an option of its documentation, takes another way and does not.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.peers.evidence import (
    PartlyEager,
    PeerError,
    dynamo_graphs,
    left_to_eager,
    shortened,
    watched,
)
from benchmarks.peers.installation import absent, versions
from kernel_dispatch.bench import Case, Contender

_PACKAGE = "openvino.frontend.pytorch.torchdynamo"
_FALLBACKS = ("Failed in OpenVINO execution", "OpenVINO execution failed")


def judge(graphs: Iterable[torch.nn.Module], complaints: Iterable[str]) -> None:
    """`graphs`: what its partitioner made; `complaints`: what it said while it fell back."""
    for complaint in complaints:
        raise PeerError(f"OpenVINO did not run all of it: {shortened(complaint)}")
    modules = [module for graph in graphs for module in graph.modules()]
    partitions = [module for module in modules if hasattr(module, "perm_fallback")]
    if not partitions:
        raise PeerError("OpenVINO took no operator of it (it takes none alone): all ran eagerly")
    if any(module.perm_fallback for module in partitions):
        raise PeerError("OpenVINO did not run all of it: a partition failed and ran eagerly")
    outside = [name for graph in graphs for name in _operators(graph)]
    if outside:
        warnings.warn(left_to_eager("OpenVINO", outside), PartlyEager, stacklevel=2)


def _operators(graph: torch.nn.Module) -> Iterator[str]:
    """What a partitioned graph computes outside its partitions."""
    assert isinstance(graph, torch.fx.GraphModule)
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield str(node.target)


@contextlib.contextmanager
def _watch() -> Iterator[None]:
    from openvino.frontend.pytorch.torchdynamo import execute

    known = set(execute.partitioned_modules)
    with dynamo_graphs(), _complaints() as complaints:
        yield
    made = [graph for key, graph in execute.partitioned_modules.items() if key not in known]
    judge(made, complaints)


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """What OpenVINO's backend logs about falling back; its levels are put back afterwards."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(_FALLBACKS):
                found.append(record.getMessage())

    collector = Collector()
    loggers = [logging.getLogger(f"{_PACKAGE}.{name}") for name in ("backend", "execute")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(collector)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield found
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(collector)
            logger.setLevel(level)
            logger.propagate = propagate


def _prepare(
    case: Case, options: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[..., Any]:
    import openvino.torch  # noqa: F401  (registers the backend)
    from openvino.frontend.pytorch.torchdynamo import execute

    execute.clear_caches()  # they hold the models of the cases before this one
    execute.req_cache.clear()
    # As many threads as everyone else; its own default is one per core.
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    chosen = {**options, "config": {**threads, **config}}
    return watched(torch.compile(case.fn, backend="openvino", options=chosen), _watch)


def _peer(
    name: str,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    tolerance: float | None,
) -> Contender:
    shown = {**options, **({"config": config} if config else {})}
    more = f", options={shown}".replace("'", '"') if shown else ""
    return Contender(
        name,
        f'torch.compile(model, backend="openvino"{more})',
        partial(_prepare, options=options, config=config),
        missing=partial(absent, "openvino"),
        version=partial(versions, "openvino"),
        tolerance=tolerance,
        trains=False,
    )


_AOT = {"aot_autograd": True}
_BFLOAT16 = 1e-2  # which it computes in, unasked, where the CPU has it

PEERS = (
    _peer("openvino", {}, {}, _BFLOAT16),
    _peer("openvino-aot", _AOT, {}, _BFLOAT16),
    _peer("openvino-f32", _AOT, {"INFERENCE_PRECISION_HINT": "f32"}, None),
)
