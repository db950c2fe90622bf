"""A forced device that is not where the tensors are: move them, run there, bring results back.

Parameters and buffers move once and stay, keyed by the tensor and its version, so that an update
after compilation is seen. Inputs and outputs move on every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kernel_dispatch.reporting import GraphReport
from lowering import targets
from lowering.contract import Compiled, Graph
from lowering.graphs import clone

CompileOnTarget = Callable[[fx.GraphModule, Sequence[Any], GraphReport], tuple[str, Compiled]]


class _Resident:
    """Tensors that stay on the target: moved again only when they changed."""

    def __init__(self, move: Callable[[torch.Tensor], torch.Tensor], record: GraphReport) -> None:
        self._move = move
        self._record = record
        self._kept: dict[int, tuple[Callable[[], Any], tuple[int, int], torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        key, state = id(tensor), (_version(tensor), tensor.data_ptr())
        found = self._kept.get(key)
        if found is not None and found[0]() is tensor and found[1] == state:
            return found[2]
        moved = self.once(tensor)
        self._kept[key] = (weakref.ref(tensor), state, moved)
        _residents.add(self)
        return moved

    def once(self, tensor: torch.Tensor) -> torch.Tensor:
        self._record.transfers += 1
        with torch.no_grad():
            return self._move(tensor.detach())

    def forget(self) -> None:
        self._kept.clear()


_residents: weakref.WeakSet[_Resident] = weakref.WeakSet()


def forget() -> None:
    """Drop what is kept on devices; it moves again when it is needed."""
    for resident in list(_residents):
        resident.forget()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def place(gm: fx.GraphModule, record: GraphReport, compile_on_target: CompileOnTarget) -> Graph:
    """The graph as a callable that takes and gives tensors on the caller's device."""
    device = record.plan.move_to
    assert device is not None
    target = targets.find(record.plan.target)
    assert target is not None
    custom = target.to_target
    resident = _Resident(custom or (lambda tensor: tensor.to(device)), record)
    give_back = target.from_target or (lambda tensor, home: tensor.to(home))
    stays = [fact.kind != "input" for fact in record.facts.inputs]
    names = {fact.name: stay for fact, stay in zip(record.facts.inputs, stays, strict=True)}
    keep = [names.get(node.name, False) for node in gm.graph.find_nodes(op="placeholder")]
    homes = [_home(value) for value in _outputs(gm)]
    moved_graph = clone(gm) if custom else retarget(gm, torch.device(device))

    def compile_there(inner: fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        record.provider, there = compile_on_target(inner, inputs, record)
        record.regions = there.regions
        return there.run

    # Not the module itself: Dynamo skips GraphModule's own __call__ inside a compiled call.
    compiled = torch.compile(
        lambda *args: moved_graph.forward(*args), backend=compile_there, fullgraph=True
    )

    def run(*args: Any) -> tuple[Any, ...]:
        there = [
            arg
            if not isinstance(arg, torch.Tensor)
            else (resident(arg) if stay else resident.once(arg))
            for arg, stay in zip(args, keep, strict=True)
        ]
        results = compiled(*there)
        record.transfers += sum(isinstance(result, torch.Tensor) for result in results)
        return tuple(
            give_back(result, home) if isinstance(result, torch.Tensor) and home else result
            for result, home in zip(results, homes, strict=True)
        )

    return run


def _outputs(gm: fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return [
        value.meta.get("example_value") if isinstance(value, fx.Node) else value
        for value in output.args[0]
    ]


def _home(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) else None


def retarget(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The same graph with every device that it names, or leaves to the default, replaced."""
    from torch.utils._device import _device_constructors

    result = clone(gm)
    for node in result.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        named = [arg for arg in (*node.args, *node.kwargs.values()) if _is_device(arg)]
        node.args = tuple(device if _is_device(arg) else arg for arg in node.args)
        node.kwargs = {k: device if _is_device(v) else v for k, v in node.kwargs.items()}
        if not named and node.target in _device_constructors():
            node.kwargs = {**node.kwargs, "device": device}
    for name, tensor in [*result.named_parameters(), *result.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        holder = result.get_submodule(owner)
        moved = tensor.detach().to(device)
        if isinstance(tensor, torch.nn.Parameter):
            holder.register_parameter(leaf, torch.nn.Parameter(moved, requires_grad=False))
        else:
            holder.register_buffer(leaf, moved)
    result.recompile()
    return result


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda", "xpu", "mps", "xla")
