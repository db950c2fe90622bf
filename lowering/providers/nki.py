"""AWS Neuron: inference graphs through torch_neuronx's own compilers.

The native package is handed the graph as torch.compile would hand it over. The older one traces a
module: its weights are kept apart from the compiled artifact, stay on the device, and are replaced
there when one of them changed. Nothing here imports torch_neuronx before a graph is meant for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowering import elsewhere
from lowering.contract import Compiled, Graph, Provider, Request
from lowering.packing import PackedWeights
from lowering.targets import neuron


def compile(request: Request) -> Compiled:
    if request.only_plan is not None:
        return elsewhere.plan(request)
    if neuron.compiler() is None:
        return _by_tracing(request)
    if request.move_to is None:
        return Compiled(run=_by_its_backend(request.graph, request.example_inputs))
    _backend()  # torch knows the device once the package is loaded
    there = elsewhere.There(torch.device(request.move_to), _by_its_backend)
    return elsewhere.compile(request, there)


# --- the native package ---------------------------------------------------------------------------


def _by_its_backend(
    module: fx.GraphModule, inputs: Sequence[Any], passing: frozenset[int] = frozenset()
) -> Graph:
    """What it cannot compile has to raise: a fallback of its own would go unseen."""
    run: Graph = _backend()(module, list(inputs), options={"fallback_execution": False})
    return run


def _backend() -> Any:
    registered = neuron.compiler()
    assert registered is not None
    return registered.load()


# --- the package on top of torch_xla --------------------------------------------------------------

# Traced modules take and give CPU tensors and do the moving themselves.
_HOME = torch.device("cpu")
# The compiler multiplies float32 in bfloat16 unless it is told not to.
_FULL_PRECISION = ["--auto-cast", "none"]


def _by_tracing(request: Request) -> Compiled:
    known = {id(request.example_inputs[i]) for i in request.stays}
    core, transferred = _core(request.move_to), request.transferred

    def compile_graph(
        module: fx.GraphModule, inputs: Sequence[Any], passing: frozenset[int]
    ) -> Graph:
        stays = [i for i, value in enumerate(inputs) if id(value) in known]
        return _Traced(module, stays, core, transferred, inputs)

    return elsewhere.compile(request, elsewhere.There(_HOME, compile_graph))


def _core(move_to: str | None) -> int:
    """The number in "neuron:1"."""
    _, _, index = (move_to or "").partition(":")
    return int(index or 0)


class _Traced:
    """A graph as an artifact of the device; one for each set of weights that it is called with."""

    def __init__(
        self,
        module: fx.GraphModule,
        stays: Sequence[int],
        core: int,
        transferred: Callable[[int], None],
        inputs: Sequence[Any],
    ) -> None:
        if elsewhere.draws_random_numbers(module):
            raise NotImplementedError("torch_neuronx.trace would freeze the random numbers")
        self._stays, self._core, self._transferred = frozenset(stays), core, transferred
        self._module = _WithWeights(module, self._stays)
        self._weights = PackedWeights()
        self._first: Any = None  # the artifact that was compiled; others are copies of it
        self._loaded = torch.utils.weak.WeakTensorKeyDictionary()  # first weight -> its artifact
        self._artifact(*_split(inputs, self._stays))

    def __call__(self, *args: Any) -> Any:
        weights, inputs = _split(args, self._stays)
        results = self._artifact(weights, inputs)(*inputs)
        if isinstance(results, torch.Tensor):
            results = (results,)
        self._transferred(len(inputs) + len(results))
        return results

    def _artifact(self, weights: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        """The one that holds these weights as they are now."""
        if not weights:
            self._first = self._first or self._trace(inputs)
            return self._first
        return self._weights.get(tuple(weights), self._core, lambda: self._load(weights, inputs))

    def _load(self, weights: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        import torch_neuronx

        self._transferred(len(weights))
        self._module.take(weights)
        if self._first is None:
            self._first = found = self._trace(inputs)
        else:
            found = self._loaded.get(weights[0])
            found = copy.deepcopy(self._first) if found is None else found
            torch_neuronx.replace_weights(found, self._module.state_dict())
            torch_neuronx.move_trace_to_device(found, self._core)
        self._module.take(())  # the artifact has them; here they would outlive the user's model
        self._loaded[weights[0]] = found
        return found

    def _trace(self, inputs: Sequence[Any]) -> Any:
        import torch_neuronx

        artifact = torch_neuronx.trace(
            self._module,
            tuple(inputs),
            compiler_args=list(_FULL_PRECISION),
            inline_weights_to_neff=False,
        )
        torch_neuronx.move_trace_to_device(artifact, self._core)
        return artifact


def _split(values: Sequence[Any], stays: frozenset[int]) -> tuple[list[Any], list[Any]]:
    return (
        [value for i, value in enumerate(values) if i in stays],
        [value for i, value in enumerate(values) if i not in stays],
    )


class _WithWeights(torch.nn.Module):
    """A graph whose weights are its module's own, so that they can be kept apart and replaced."""

    def __init__(self, graph: fx.GraphModule, stays: frozenset[int]) -> None:
        super().__init__()
        self.graph, self._stays = _with_constants_held(graph), sorted(stays)
        self.take(())
        self.eval()

    def take(self, weights: Sequence[torch.Tensor]) -> None:
        held = [torch.nn.Parameter(one.detach(), requires_grad=False) for one in weights]
        self.weights = torch.nn.ParameterList(held)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args: list[torch.Tensor] = list(inputs)
        for position, weight in zip(self._stays, self.weights, strict=True):
            args.insert(position, weight)
        return tuple(self.graph(*args))


def _with_constants_held(graph: fx.GraphModule) -> fx.GraphModule:
    """Tensors that the graph makes out of nothing become buffers: `aten.arange(device="cpu")` would
    stay on the CPU while the rest is traced on the device."""
    for number, node in enumerate(list(graph.graph.nodes)):
        makes = node.op == "call_function" and not node.all_input_nodes
        if not makes or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        name = f"constant_{number}"
        graph.register_buffer(name, node.target(*node.args, **node.kwargs))
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(name))
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


PROVIDER = Provider(
    name="nki",
    summary="AWS Neuron: inference graphs of fixed sizes, through torch_neuronx",
    probe=neuron.probe,
    compile=compile,
    requires=("torch-neuronx", "a trn or inf2 instance"),
    moves=True,
    plans=True,
)
