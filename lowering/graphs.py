"""Copies of FX graphs, and where their nodes come from in the user's source."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import fx


def clone(module: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule with a graph of its own that shares every tensor with the original.

    Inductor takes ownership of what it compiles, while the minifier, DDP and our own fallback
    need the caller's graph as it was. A deep copy would duplicate weights; this copies nodes.
    """
    result = fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    result.meta = copy.copy(module.meta)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(result, name, clone(child))
    for name, value in module.__dict__.items():
        # What Dynamo and AOTAutograd hang onto the module (parameter sources, subgraph names).
        if name not in result.__dict__:
            result.__dict__[name] = value
    for old, new in zip(module.graph.nodes, result.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):  # AOTAutograd reads it from placeholders
            new._dynamo_source = old._dynamo_source
        # Dynamo drops it from its own nodes when it is done: it holds weak references to weights,
        # and `torch.utils.swap_tensors` refuses a tensor that has one. See `capture_of`.
        new.meta.pop("grapharg", None)
    return result


_captured: ContextVar[Mapping[str, Any]] = ContextVar("captured")


@contextmanager
def capture_of(module: fx.GraphModule) -> Iterator[None]:
    """Inside, `captured` knows what Dynamo captured this graph with; copies do not keep it."""
    placeholders = module.graph.find_nodes(op="placeholder")
    token = _captured.set({node.name: node.meta.get("grapharg") for node in placeholders})
    try:
        yield
    finally:
        _captured.reset(token)


def captured(node: fx.Node) -> Any:
    """The input that a placeholder stood for when the graph was captured, or None. Asked of the one
    that is wanted only: Dynamo raises for an input that is gone by now."""
    return getattr(_captured.get({}).get(node.name), "example", None)


# Where Dynamo keeps what a checkpoint saves and what it computes again, if the user said so.
CHECKPOINT_CONTEXT = "_checkpoint_context_fn"


def lean(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of our own, to keep for as long as the graph lives: drops fake tensors and the shape
    environment."""
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            child.meta = {k: v for k, v in child.meta.items() if k == CHECKPOINT_CONTEXT}
            for node in child.graph.nodes:
                node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        module.__dict__.pop(name, None)
    return module


def dump(module: fx.GraphModule, folder: str) -> None:
    """Write a graph as it is handed to its executor: after_0.py, after_1.py (backward) ..."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    number = len(list(path.glob("after_*.py")))
    (path / f"after_{number}.py").write_text(module.print_readable(print_output=False))


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HERE = Path(__file__).parent
# Files of ours that the user's code calls, as it calls torch, or that call the user's code.
_BETWEEN = {
    str(file).replace("\\", "/")
    for file in (
        _HERE / "ops.py",
        _HERE / "layouts.py",
        _HERE.parent / "kernel_dispatch" / "backends" / "preparing.py",
    )
}


def place(node: fx.Node) -> str:
    """The user's own `file:line` of a node: the innermost frame outside of torch and of ours."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [(file.replace("\\", "/"), file, line) for file, line in found]
    frames = [frame for frame in frames if frame[0] not in _BETWEEN]
    for name, file, line in reversed(frames):
        if "/torch/" not in name:
            return f"{file}:{line}"
    return ":".join(frames[-1][1:]) if frames else ""


def first_place(module: fx.GraphModule) -> str:
    """Where a graph starts in the user's source."""
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output") and (found := place(node)):
            return found
    return ""


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Equal whatever the dynamic sizes turn out to be; asks without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def hint(size: Any) -> int:
    """A size, or what a dynamic size was when the graph was traced."""
    known = _hint(size)
    return 1 if known is None else known


def is_known(size: Any) -> bool:
    """Is it a number, or was it one when the graph was traced? What depends on the data was not,
    and cannot be compared."""
    return _hint(size) is not None


def _hint(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    known = getattr(getattr(size, "node", None), "hint", None)
    return known if isinstance(known, int) else None


def only_first_output(node: fx.Node) -> fx.Node | None:
    """The first of several outputs, where nothing else is used of them."""
    used = [user for user in node.users if user.users]
    if len(used) != 1 or used[0].target is not operator.getitem or used[0].args[1] != 0:
        return None
    return used[0]


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def erase_dead(graph: fx.Graph, last: fx.Node) -> None:
    """What has become dead behind a region must not count as a user of the next one's nodes."""
    dead = [last]
    while dead:
        node = dead.pop()
        if not node.users and node.op == "call_function" and node.graph is graph:
            inputs = [other for other in node.all_input_nodes if other not in dead]
            graph.erase_node(node)
            dead += inputs


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node of an ATen graph that knows its value, as traced ones do."""
    node = graph.call_function(target, args, kwargs)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    node.meta["val"] = target(*args, **kwargs)
    return node
