"""A functional graph of XLA tensors as one XLA program, or as several around what XLA lacks.

torch_xla's bridge turns a graph into a program by running it once on lazy tensors. Two things are
taken off its hands: it returns too few results where one of them is an input as it came (or a copy
of it), and it splits graphs with operators that XLA lacks into parts of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

Program = Callable[..., Sequence[Any]]
LeftOut = Callable[[fx.Node], None]

_aten = torch.ops.aten
_SAME_VALUE = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default})


def compile(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    donated: Sequence[torch.Tensor],
    left_out: LeftOut,
) -> Program:
    """`donated`: inputs whose memory the program may take for its results, at every call.

    `left_out` is told each node that torch computes on the CPU, because XLA cannot.
    """
    import torch_xla
    from torch_xla._dynamo import dynamo_bridge

    dynamo_bridge.XLAConstructorMoverPass()(module.graph)
    try:
        lacking = _lacking(module, inputs)
        for node in lacking:
            left_out(node)
            node.meta[_LACKING] = True
        return _split(module) if lacking else _Program(module).extracted(inputs, donated)
    finally:
        # Whatever was recorded on the way, and was never meant to be computed.
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))


def _lacking(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[fx.Node]:
    """Nodes that torch_xla hands to the CPU, found by recording each one: some kernels of XLA's
    decide by their arguments."""
    import torch_xla

    lacking = []

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            if _foreign(node):
                lacking.append(node)
                args, kwargs = self.fetch_args_kwargs_from_env(node)
                return _on_cpu(node.target, args, kwargs)
            before = _handed_over()
            result = super().run_node(node)
            if node.op == "call_function" and (_handed_over() != before or _off_device(result)):
                lacking.append(node)
            return result

    with torch_xla.experimental.eager_mode_context(False):
        torch_xla.sync(reset_scope=False)
        Recorder(module).run(*inputs)
    return lacking


def _foreign(node: fx.Node) -> bool:
    """An operator of somebody else, which may do anything: look into its data, keep count. Recorded
    once and never called again, it would do that once."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "XLA")


def _on_cpu(target: Any, args: Any, kwargs: Any) -> Any:
    """What `target` gives for these on the CPU, on XLA's device again."""
    import torch_xla

    there, here = torch_xla.device(), torch.device("cpu")

    def to_here(value: Any) -> Any:
        if isinstance(value, torch.device):
            return here if value.type == "xla" else value
        return value.to(here) if isinstance(value, torch.Tensor) else value

    args, kwargs = pytree.tree_map(to_here, (args, kwargs))
    return pytree.tree_map_only(
        torch.Tensor, lambda value: value.to(there), target(*args, **kwargs)
    )


def _handed_over() -> tuple[int, int]:
    """How often this process let the CPU compute an operator, and fetched values to look at them:
    an operator that does either cannot be part of a program."""
    from torch_xla.debug import metrics

    fetched = metrics.metric_data("TransferFromDeviceTime")
    by_cpu = sum(metrics.counter_value(name) for name in metrics.executed_fallback_ops())
    return by_cpu, fetched[0] if fetched else 0


def _off_device(result: Any) -> bool:
    values = result if isinstance(result, (list, tuple)) else (result,)
    return any(isinstance(one, torch.Tensor) and one.device.type != "xla" for one in values)


_LACKING = "xla_lacks_it"  # the partitioner puts copies in the place of nodes, with their meta


def _split(module: fx.GraphModule) -> Program:
    """The same graph with everything between the lacking nodes in programs of its own."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import create_op_support

    supported = create_op_support(
        lambda _, node: node.op == "call_function" and _LACKING not in node.meta
    )
    partitioner = CapabilityBasedPartitioner(module, supported, allows_single_node_partition=True)
    whole = partitioner.partition_and_fuse()
    for node in whole.graph.nodes:
        if node.op == "call_module":
            setattr(whole, node.target, _InGraph(_Program(getattr(whole, node.target))))
        elif _LACKING in node.meta:
            node.args = (node.target, node.args, node.kwargs)
            node.kwargs, node.target = {}, _on_cpu
    whole.recompile()
    return whole.forward


class _Program:
    """One XLA program, compiled at the latest when it first runs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._run: Callable[..., Any] | None = None
        (output,) = module.graph.find_nodes(op="output")
        returned = output.args[0]
        self.single = isinstance(returned, fx.Node)
        returned = (returned,) if self.single else tuple(returned)
        self._passed = _passed_through(module, returned)
        computed = [
            value
            for position, value in enumerate(returned)
            if position not in self._passed and isinstance(value, fx.Node)
        ]
        self._computed = list(dict.fromkeys(computed))
        self._order = [
            self._computed.index(value) if value in self._computed else None for value in returned
        ]
        self._constants = {
            position: value
            for position, value in enumerate(returned)
            if not isinstance(value, fx.Node)
        }
        self._as_they_come = self._order == list(range(len(returned)))
        output.args = (tuple(self._computed),)
        module.graph.eliminate_dead_code()
        module.recompile()
        self._module = module

    def __call__(self, *args: Any) -> Sequence[Any]:
        run = self._run or self.extracted(args)._run
        assert run is not None
        results = run(*args)
        results = [results] if isinstance(results, torch.Tensor) else results
        if self._as_they_come:
            return results
        return [
            results[place] if place is not None else self._otherwise(position, args)
            for position, place in enumerate(self._order)
        ]

    def extracted(self, args: Sequence[Any], donated: Sequence[torch.Tensor] = ()) -> _Program:
        """Compiled, by recording what the graph does to these."""
        import torch_xla
        from torch_xla._dynamo import dynamo_bridge

        if not self._computed:
            self._run = lambda *args: ()
            return self
        passed = {id(args[index]) for index, _ in self._passed.values()}
        for tensor in donated:
            if id(tensor) not in passed and tensor.dim():  # XLA makes constants of some 0-d ones
                torch_xla._XLAC._set_buffer_donation(tensor, True)
        self._module.xla_args = [*map(_stand_in, args)]  # type: ignore[assignment]  # how the bridge takes them
        with torch_xla.experimental.eager_mode_context(False):
            self._run = dynamo_bridge.extract_internal(self._module)
        return self

    def _otherwise(self, position: int, args: Sequence[Any]) -> Any:
        if position in self._constants:
            return self._constants[position]
        index, copied = self._passed[position]
        return args[index].clone() if copied else args[index]


def _stand_in(value: Any) -> Any:
    """To record with in place of a scalar: torch_xla keeps scalars that it uploaded by their value,
    so that one may be taken for a constant of the graph, or for another one, that is equal now."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    import torch_xla

    alone = value.detach().cpu().reshape(1).to(value.device).reshape(()).clone()
    torch_xla._XLAC._xla_sync_multi([alone], [], True, False)
    return alone


def _passed_through(module: fx.GraphModule, returned: Sequence[Any]) -> dict[int, tuple[int, bool]]:
    """Results that are an input: position -> (which, is it a copy)."""
    inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    found: dict[int, tuple[int, bool]] = {}
    for position, value in enumerate(returned):
        copied = False
        while isinstance(value, fx.Node) and value.target in _SAME_VALUE:
            copied |= value.target is _aten.clone.default
            value = value.args[0]
        if value in inputs:
            found[position] = (inputs[value], copied)
    return found


class _InGraph(torch.nn.Module):
    """A program as a part of a larger graph, which unpacks several results only."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self._program = program

    def forward(self, *args: Any) -> Any:
        results = self._program(*args)
        return results[0] if self._program.single else tuple(results)
