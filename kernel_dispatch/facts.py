"""Graph facts: what is in an FX graph, read off it without running anything.

The graph is Dynamo's: torch functions and methods, with a fake tensor for every value. Reading
adds no guard (sizes are looked at as hints) and touches no input.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowering import sizes_in_tensors, writing
from lowering.capability import Work
from lowering.graphs import first_place


@dataclass(frozen=True)
class TensorFact:
    """One tensor input of a graph. Sizes are ints, or the name of a symbol where they may vary."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    kind: str  # parameter, buffer or input
    requires_grad: bool


@dataclass(frozen=True)
class GraphFacts:
    """Everything that selection may know of a graph."""

    ops: tuple[tuple[str, int], ...]
    op_count: int
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    inputs: tuple[TensorFact, ...]
    parameters: int
    parameter_bytes: int
    dynamic: bool
    dynamic_dims: tuple[str, ...]
    training: bool
    written_inputs: tuple[int, ...]  # positions of inputs that the graph writes into
    random: bool
    negated: bool  # some input is a view that only says that it is negative: `z.conj().imag`
    subclasses: tuple[str, ...]
    flops: int
    bytes_moved: int
    bytes_at_boundary: int
    place: str

    def work(self) -> Work:
        """The question that a whole-graph capability row is asked."""
        return Work(
            dtypes=frozenset(self.dtypes),
            ops=frozenset(name for name, _ in self.ops),
            op_count=self.op_count,
            bytes_moved=self.bytes_moved,
            flops=self.flops,
            training=self.training,
            dynamic=self.dynamic,
            mutation=bool(self.written_inputs),
            random=self.random,
            negated=self.negated,
            subclasses=frozenset(self.subclasses),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ops": dict(self.ops)}


def nothing_known(place: str) -> GraphFacts:
    """For a graph that could not be read: the report still has a row for it."""
    empty: dict[str, Any] = dict.fromkeys(
        ("ops", "dtypes", "devices", "inputs", "dynamic_dims", "written_inputs", "subclasses"), ()
    )
    zero: dict[str, Any] = dict.fromkeys(
        ("op_count", "parameters", "parameter_bytes", "flops", "bytes_moved", "bytes_at_boundary"),
        0,
    )
    flags: dict[str, Any] = dict.fromkeys(("dynamic", "training", "random", "negated"), False)
    return GraphFacts(**empty, **zero, **flags, place=place)


# Nodes that move no data: they only look at, or rename, what is already there.
_FREE = frozenset(
    "getitem view view_as reshape transpose permute unsqueeze squeeze expand expand_as t mT detach "
    "size getattr _enter_autocast _exit_autocast _set_grad_enabled movedim swapaxes narrow alias "
    "unbind split chunk select".split()
)
_GATHERS = frozenset("getitem embedding gather index_select take take_along_dim".split())
_RANDOM = frozenset(
    "dropout feature_dropout alpha_dropout feature_alpha_dropout rand randn randint rand_like "
    "randn_like randint_like randperm bernoulli multinomial normal poisson rrelu native_dropout "
    "uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_ "
    "gumbel_softmax dropout1d dropout2d dropout3d".split()
)


def collect(module: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphFacts:
    """Walk the graph once and note what it holds."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [fact for node in placeholders for fact in _input_fact(node)]
    tensors = [t for node in module.graph.nodes for t in writing.tensors(_value(node))]
    boundary = {id(t): t for node in placeholders for t in writing.tensors(_value(node))}
    ops: Counter[str] = Counter()
    computing = flops = moved = 0
    random = False
    for graph in writing.graphs(module):
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method", "call_module"):
                continue
            name = op_name(node)
            ops[name] += 1
            if sizes_in_tensors.has_them(node):
                ops[sizes_in_tensors.KIND] += 1
            random |= _is_random(name, node)
            if not _is_free(name, node):
                computing += 1
                flops += _flops(name, node)
                moved += _moved(name, node)
    outputs = [t for node in module.graph.find_nodes(op="output") for t in _tensors_of_args(node)]
    dynamic_dims = _dynamic_dims(placeholders)
    written = _written_inputs(module, placeholders)
    # Under a no_grad of the graph's own, parameters want gradients and nothing passes them one.
    reached = tensors if written or not _all_known(module) else outputs
    return GraphFacts(
        ops=tuple(sorted(ops.items())),
        op_count=computing,
        dtypes=tuple(sorted({_dtype(t) for t in tensors})),
        devices=tuple(sorted({t.device.type for t in tensors} | _devices_named(module))),
        inputs=tuple(inputs),
        parameters=sum(fact.kind == "parameter" for fact in inputs),
        parameter_bytes=_bytes_of(
            t
            for node in placeholders
            for t in writing.tensors(_value(node))
            if isinstance(t, torch.nn.Parameter)
        ),
        dynamic=bool(dynamic_dims),
        dynamic_dims=dynamic_dims,
        training=torch.is_grad_enabled() and any(t.requires_grad for t in reached),
        written_inputs=written,
        random=random,
        negated=_any_negated(boundary.values()),
        subclasses=tuple(sorted({n for e in example_inputs for n in _subclass_name(e)})),
        flops=flops,
        bytes_moved=moved,
        bytes_at_boundary=_bytes_of(boundary.values()) + _bytes_of(outputs),
        place=first_place(module),
    )


def _is_free(name: str, node: fx.Node) -> bool:
    """Slices and numbers look at a tensor; with a tensor as its index, rows are gathered."""
    by_tensors = name == "getitem" and any(
        writing.tensors(_value(given)) for given in node.all_input_nodes[1:]
    )
    return name in _FREE and not by_tensors


def _moved(name: str, node: fx.Node) -> int:
    """All that is given and made, but of a table only the rows that are read."""
    given, made = _tensors_of_args(node), _bytes_of(writing.tensors(_value(node)))
    return 2 * made if name in _GATHERS else _bytes_of(given) + made


def _all_known(module: fx.GraphModule) -> bool:
    """Is it written down what every output is?"""
    ends = module.graph.find_nodes(op="output")
    return all(_value(given) is not None for end in ends for given in end.all_input_nodes)


def op_name(node: fx.Node) -> str:
    """The short name that users know: `linear`, `add`, `relu`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_module":
        owner = node.graph.owning_module
        return type(owner.get_submodule(str(node.target))).__name__ if owner else str(node.target)
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _tensors_of_args(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for arg in node.all_input_nodes for tensor in writing.tensors(_value(arg))]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Where functions that draw numbers in training only are told of it, and what holds if they are not.
_DROPOUTS = dict.fromkeys((name for name in _RANDOM if "dropout" in name), (2, True))
_TOLD_OF_TRAINING = {**_DROPOUTS, "rrelu": (3, False)}


def _is_random(name: str, node: fx.Node) -> bool:
    given: dict[int, Any] = dict(enumerate(node.args))
    if name == "scaled_dot_product_attention":
        return bool(given.get(4, node.kwargs.get("dropout_p", 0.0)) != 0.0)
    if name in _TOLD_OF_TRAINING:
        at, otherwise = _TOLD_OF_TRAINING[name]
        named = node.kwargs.get("train", node.kwargs.get("training", otherwise))
        return bool(given.get(at, named))
    return name in _RANDOM


def _input_fact(node: fx.Node) -> Iterator[TensorFact]:
    for tensor in writing.tensors(_value(node)):
        source = str(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type", ""))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        kind = "parameter" if is_parameter else "buffer" if source else "input"
        yield TensorFact(
            name=node.name,
            shape=tuple(d if isinstance(d, int) else str(d) for d in tensor.shape),
            dtype=_dtype(tensor),
            device=tensor.device.type,
            kind=kind,
            requires_grad=tensor.requires_grad,
        )


def _any_negated(tensors: Iterable[torch.Tensor]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return any(tensor.is_neg() for tensor in tensors)


def _subclass_name(value: Any) -> list[str]:
    plain = not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value)
    return [] if plain else [type(value).__name__]


def _dynamic_dims(placeholders: list[fx.Node]) -> tuple[str, ...]:
    return tuple(
        f"{node.name}[{index}]"
        for node in placeholders
        for tensor in writing.tensors(_value(node))
        for index, size in enumerate(tensor.shape)
        if not isinstance(size, int)
    )


def _devices_named(module: fx.GraphModule) -> set[str]:
    """Device types that only a factory call names: `torch.zeros(3, device="cuda")`."""
    found: set[str] = set()
    for node in module.graph.nodes:
        device = node.kwargs.get("device")
        if isinstance(device, (str, torch.device)):
            found.add(torch.device(device).type)
    return found


def _written_inputs(module: fx.GraphModule, placeholders: list[fx.Node]) -> tuple[int, ...]:
    """Inputs whose memory a node writes into. Fake storages tell which tensors share memory."""
    owners: dict[int, set[int]] = {}
    for index, node in enumerate(placeholders):
        for tensor in writing.tensors(_value(node)):
            if key := writing.storage(tensor):
                owners.setdefault(key, set()).add(index)
    written = {
        writing.storage(tensor)
        for graph in writing.graphs(module)
        for node in graph.nodes
        for target in writing.written_by(node)
        for tensor in writing.tensors(_value(target))
    }
    return tuple(sorted({i for key in written if key in owners for i in owners[key]}))


def _hint(size: Any) -> int:
    """A size as a number, without asking the shape environment (that would add a guard)."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def _shape(tensor: torch.Tensor) -> list[int]:
    return [_hint(size) for size in tensor.shape]


def _bytes_of(tensors: Any) -> int:
    return sum(math.prod(_shape(t)) * t.dtype.itemsize for t in tensors)


def _flops(name: str, node: fx.Node) -> int:
    """An estimate for planning: exact for products, one per output element for the rest."""
    outputs = writing.tensors(_value(node))
    if not outputs:
        return 0
    out = math.prod(_shape(outputs[0]))
    shapes = [_shape(tensor) for tensor in _tensors_of_args(node)]
    if name in ("linear", "matmul", "mm", "bmm", "__matmul__", "__rmatmul__") and shapes[0]:
        return 2 * out * shapes[0][-1]
    if name in ("addmm", "baddbmm") and len(shapes) >= 3:
        return 2 * out * shapes[1][-1]
    if name.startswith("conv") and len(shapes) >= 2 and shapes[1]:
        per_output = math.prod(shapes[1][1:])
        transposed = name.startswith("conv_transpose")
        return 2 * (math.prod(shapes[0]) if transposed else out) * per_output
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and shapes[0]:
        matrices = [math.prod(shape) for shape in shapes[1:] if len(shape) == 2]
        return 2 * math.prod(shapes[0][:-1]) * sum(matrices)
    if name == "scaled_dot_product_attention" and len(shapes) >= 3:
        keys = shapes[1][-2]
        return 2 * math.prod(shapes[0][:-1]) * keys * (shapes[0][-1] + shapes[2][-1])
    return out
