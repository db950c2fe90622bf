"""A graph whose tensors live here, computed on a device there: for training as well.

AOTAutograd sees the caller's graph with the caller's tensors, so gradients, writes into inputs and
aliases are torch's business. Only what it makes of them travels: the functional graphs run there,
their results come home, and what a backward needs of its forward stays where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lowering import strided_memory
from lowering.contract import Compiled, Graph, Request
from lowering.fixed_sizes import demand_known_sizes, symbolic_dimensions
from lowering.graphs import clone
from lowering.packing import PackedWeights
from lowering.reasons import Reason

# Parameters and buffers that have moved, for all graphs of the process.
_residents = PackedWeights()
# XLA records what happens to its tensors in any thread, and a recording ends by dropping all of it.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class There:
    """A device, and who computes a functional graph on it."""

    device: torch.device
    # (graph, its inputs on the device, which of them nobody else will need) -> what computes it;
    # asked again for other sizes.
    compile: Callable[[fx.GraphModule, Sequence[Any], frozenset[int]], Graph]
    decompositions: Callable[[], dict[Any, Any]] = dict
    # Called with a number drawn from this device's generator, before a graph that draws others.
    seed: Callable[[int], None] | None = None


def compile(request: Request, there: There) -> Compiled:
    """The request's graph as a callable that takes and gives tensors of the caller's device."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # Without the inputs of the first call, which would live as long as the graph.
    journey = _Journey(replace(request, example_inputs=()), there)
    results: list[int] = []  # of the forward that is about to be compiled: what the user sees of it

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        results.append(int(kwargs["num_fwd_outputs"]))
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def forward(module: fx.GraphModule, inputs: Any) -> Graph:
        demand_known_sizes(module)
        strided_memory.demand_plain_memory(module)
        return journey.part(module, results.pop() if results else None)

    def backward(module: fx.GraphModule, inputs: Any) -> Graph:
        return journey.part(module, None, or_at_home=True)

    compile_graph = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        partition_fn=partition,
        decompositions=there.decompositions(),
    )
    with _whole_attention_apart():
        run = compile_graph(request.graph, list(request.example_inputs))
    return Compiled(run=journey.from_outside(run), notes=journey.notes)


def plan(request: Request) -> Compiled:
    """The functional graphs as they would be handed over, for a device that is not here."""

    def nobody(module: fx.GraphModule, inputs: Sequence[Any], passing: frozenset[int]) -> Graph:
        raise AssertionError("a plan is not run")

    return compile(request, There(torch.device("cpu"), nobody))


def _whole_attention_apart() -> Any:
    """The CPU's own attention operator exists nowhere else: its plain form goes everywhere."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


@dataclass
class _Journey:
    """What the forward and the backward of one graph share."""

    request: Request
    there: There
    notes: list[str] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)  # ids of parameters and buffers

    def from_outside(self, run: Graph) -> Graph:
        """Notes which of the arguments are parameters: only out here they can be told apart."""
        stays = self.request.stays
        known = self._known

        def compiled(*args: Any) -> Any:
            known.update(id(args[i]) for i in stays)
            return run(*args)

        return compiled if self.request.move_to is not None else run

    def part(self, module: fx.GraphModule, results: int | None, or_at_home: bool = False) -> Graph:
        """One functional graph: a forward, or a backward, which has no eager to fall back to."""
        from torch._functorch._aot_autograd.utils import make_boxed_func

        if self.request.only_plan is not None:
            self.request.only_plan(module, or_at_home)
            return make_boxed_func(module.forward)
        inference = results is None and not or_at_home
        return make_boxed_func(
            self._in_buckets(module, inference) or _Part(self, module, results, or_at_home)
        )

    def _in_buckets(self, module: fx.GraphModule, inference: bool) -> Graph | None:
        """The graph with its sizes rounded up, where the user wants that and it is safe."""
        if self.request.buckets is None or not symbolic_dimensions(module):
            return None
        from lowering import bucketing  # sympy, which it needs, takes its time to load

        found = (
            bucketing.plan(module)
            if inference
            else Reason("training-unsupported", "no buckets for graphs that need gradients")
        )
        if isinstance(found, Reason):
            self.notes.append(f"compiled for each size: {found}")
            return None
        of_bucket = lambda graph, padded: _Part(self, graph, None, False)  # noqa: E731
        return bucketing.Bucketed(found, of_bucket, self.request.buckets or None)

    def passes(self, value: Any) -> bool:
        """Does it go there for one call only?"""
        return self._travels(value) and id(value) not in self._known

    def _travels(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type != self.there.device.type

    def to_there(self, value: Any, passing: bool) -> Any:
        if not self._travels(value):
            return value
        if passing:
            return self._move(value)
        return _residents.get((value,), self.there.device, lambda: self._move(value))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.request.transferred(1)
        with torch.no_grad():
            return tensor.detach().to(self.there.device)

    def home(self, value: Any, device: torch.device | None) -> Any:
        if device is None or not isinstance(value, torch.Tensor) or value.device == device:
            return value
        self.request.transferred(1)
        return value.to(device)


class _Part:
    """A functional graph that is compiled when its first inputs are there, once for their sizes."""

    def __init__(
        self, journey: _Journey, module: fx.GraphModule, results: int | None, or_at_home: bool
    ) -> None:
        self._journey, self._module, self._or_at_home = journey, module, or_at_home
        self._homes, self._dtypes = _homes(module, results), _dtypes(module)
        self._orders = _orders(module)
        self._casts: list[tuple[int, Any]] | None = None
        self._random = draws_random_numbers(module)
        self._dynamic = symbolic_dimensions(module)
        self._moved: fx.GraphModule | None = None
        self._passing: frozenset[int] | None = None  # what a program may overwrite
        self._given_up = or_at_home and not _takes_as_strided(module, journey.request.failed_later)
        self._travels = _leaves(module, journey.there.device.type)
        self._by_sizes: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, *args: Any) -> Any:
        if self._given_up:
            return self._at_home(args)
        try:
            if not self._travels:
                return self._in_dtypes(self._for(args)(*args))
            with torch.no_grad(), _one_at_a_time:
                return self._there_and_back(args)
        except Exception as error:
            failed_later = self._journey.request.failed_later
            if not self._or_at_home or failed_later is None:
                raise
            failed_later(error)
            self._given_up = True
            return self._at_home(args)

    def _there_and_back(self, args: Sequence[Any]) -> Any:
        journey = self._journey
        if (passing := self._passing) is None:
            passing = frozenset(i for i, arg in enumerate(args) if journey.passes(arg))
            self._passing = passing
        inputs = [journey.to_there(arg, i in passing) for i, arg in enumerate(args)]
        run = self._for(inputs)
        if self._random and journey.there.seed is not None:
            journey.there.seed(int(torch.randint(2**62, ())))
        outputs = self._in_dtypes(run(*inputs))
        return [
            strided_memory.laid_out(journey.home(value, home), order)
            for value, home, order in zip(outputs, self._homes, self._orders, strict=True)
        ]

    def _in_dtypes(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """As the graph says: XLA gives some indices in 32 bits, the same ones at each call."""
        if self._casts is None:
            self._casts = [
                (position, dtype)
                for position, (value, dtype) in enumerate(zip(outputs, self._dtypes, strict=True))
                if isinstance(value, torch.Tensor) and dtype not in (None, value.dtype)
            ]
        if self._casts:
            outputs = list(outputs)
            for position, dtype in self._casts:
                outputs[position] = outputs[position].to(dtype)
        return outputs

    def _for(self, inputs: Sequence[Any]) -> Graph:
        sizes = tuple([value for value in inputs if not isinstance(value, torch.Tensor)])
        if self._dynamic:
            sizes += tuple(inputs[position].shape[dim] for position, dim in self._dynamic)
        if (found := self._by_sizes.get(sizes)) is None:
            with _one_at_a_time:
                found = self._by_sizes.get(sizes) or self._compiled(inputs)
                self._by_sizes[sizes] = found
        return found

    def _compiled(self, inputs: Sequence[Any]) -> Graph:
        there = self._journey.there
        if self._moved is None:  # not before: AOTAutograd, where we come from, fakes all tensors
            self._moved = retarget(self._module, there.device)
        return there.compile(clone(self._moved), inputs, self._passing or frozenset())

    def _at_home(self, args: Sequence[Any]) -> Any:
        """Op by op on the caller's device, for a backward: no eager can take over from it."""
        home = next(filter(None, self._homes), None)
        with torch.no_grad():
            return self._module.forward(*(self._journey.home(value, home) for value in args))


def _values(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return [
        value.meta.get("val") if isinstance(value, fx.Node) else None for value in output.args[0]
    ]


def _homes(module: fx.GraphModule, visible: int | None) -> list[torch.device | None]:
    """Where each output belongs; None for what stays there for the backward."""
    return [
        value.device
        if isinstance(value, torch.Tensor) and (visible is None or position < visible)
        else None
        for position, value in enumerate(_values(module))
    ]


def _orders(module: fx.GraphModule) -> list[tuple[int, ...] | None]:
    """For each output that is not laid out row by row: its dimensions, outermost first."""
    return [
        strided_memory.order_of(value) if isinstance(value, torch.Tensor) else None
        for value in _values(module)
    ]


def _leaves(module: fx.GraphModule, device_type: str) -> bool:
    """Is any tensor that goes in or comes out of another device?"""
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    tensors = [one for one in (*inputs, *_values(module)) if isinstance(one, torch.Tensor)]
    return any(one.device.type != device_type for one in tensors)


def _takes_as_strided(
    module: fx.GraphModule, failed_later: Callable[[Exception], None] | None
) -> bool:
    """For a backward: nobody may raise out of its compilation."""
    try:
        strided_memory.demand_plain_memory(module)
    except NotImplementedError as error:
        if failed_later is not None:
            failed_later(error)
        return False
    return True


def _dtypes(module: fx.GraphModule) -> list[torch.dtype | None]:
    return [getattr(value, "dtype", None) for value in _values(module)]


def draws_random_numbers(module: fx.GraphModule) -> bool:
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in module.graph.nodes
    )


def retarget(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The same graph with every device that it names, or leaves to the default, replaced."""
    result = clone(gm)
    for node in result.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        named = [arg for arg in (*node.args, *node.kwargs.values()) if _is_device(arg)]
        node.args = tuple(device if _is_device(arg) else arg for arg in node.args)
        node.kwargs = {k: device if _is_device(v) else v for k, v in node.kwargs.items()}
        if not named and _makes_a_tensor(node):
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


def _makes_a_tensor(node: fx.Node) -> bool:
    """Out of nothing, so on the default device: `torch.ones(3)`, `aten.arange`."""
    from torch.utils._device import _device_constructors

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target in _device_constructors()
    takes = {argument.name: str(argument.type) for argument in schema.arguments}
    return "device" in takes and not any("Tensor" in kind for kind in takes.values())
