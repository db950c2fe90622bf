"""ONNX Runtime on the CPU: exported by torch.onnx, then a session, fed with NumPy views.

A session has no place for Python values: those in the inputs and outputs are taken from the
example inputs and stay as they were.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.peers.evidence import PeerError, one_clear_line, watched
from benchmarks.peers.installation import absent, versions
from kernel_dispatch.bench import Case, Contender

_NEEDS = ("onnxruntime", "onnx", "onnxscript")
_PLAIN = (type(None), bool, int, float, complex, str)


class Tree:
    """Nested arguments or outputs as a list of tensors, and back."""

    def __init__(self, example: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(example)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaf in self._constants:
            if not isinstance(leaf, _PLAIN):
                raise PeerError(f"an ONNX model cannot take or return {type(leaf).__name__}")

    def tensors(self, value: Any) -> Sequence[torch.Tensor]:
        leaves = pytree.tree_leaves(value)
        return [leaves[place] for place in self._places]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self._spec.is_leaf():
            return tensors[0]
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


class _Flat(torch.nn.Module):
    """The case as a module from tensors to tensors: names and order of ONNX values are ours."""

    def __init__(self, fn: Callable[..., Any], inputs: Tree, outputs: Tree) -> None:
        super().__init__()
        self.fn, self._inputs, self._outputs = fn, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._inputs.rebuild(tensors)
        return tuple(self._outputs.tensors(self.fn(*args, **kwargs)))


def _prepare(case: Case) -> Callable[..., Any]:
    with one_clear_line(), torch.no_grad():
        given = (tuple(case.args), dict(case.kwargs))
        inputs, outputs = Tree(given), Tree(_example_output(case))
        names = [f"input_{i}" for i in range(len(inputs.tensors(given)))]
        flat = _Flat(case.fn, inputs, outputs).eval()
        session = _session(flat, tuple(inputs.tensors(given)), names)
    return watched(_caller(session, inputs, outputs, names), contextlib.nullcontext)


def _example_output(case: Case) -> Any:
    """The exporter drops writes into inputs and buffers, so a session would do less than asked."""
    fn: Any = case.fn
    kept = pytree.tree_leaves((case.args, dict(case.kwargs)))
    kept += list(fn.buffers()) if isinstance(fn, torch.nn.Module) else []
    tensors = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    output = fn(*case.args, **case.kwargs)
    if before != [tensor._version for tensor in tensors]:
        raise PeerError("it writes into its inputs or buffers, which an ONNX model cannot do")
    return output


def _session(flat: torch.nn.Module, tensors: tuple[torch.Tensor, ...], names: list[str]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:  # the weights may lie in a second file beside it
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(flat, tensors, path, input_names=names, dynamo=True, verbose=False)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _caller(session: Any, inputs: Tree, outputs: Tree, names: list[str]) -> Callable[..., Any]:
    taken = {one.name for one in session.get_inputs()}  # the exporter drops what nobody reads
    places = [(name, place) for place, name in enumerate(names) if name in taken]

    def run(*args: Any, **kwargs: Any) -> Any:
        # Its users hand over tensors one by one; only nested arguments cost them more than that.
        flat = not kwargs and all(type(value) is torch.Tensor for value in args)
        tensors = args if flat else inputs.tensors((args, kwargs))
        feed = {name: tensors[place].detach().numpy() for name, place in places}
        return outputs.rebuild([torch.from_numpy(array) for array in session.run(None, feed)])

    return run


PEERS = (
    Contender(
        "onnxruntime",
        "torch.onnx.export(model, dynamo=True), onnxruntime.InferenceSession on the CPU",
        _prepare,
        missing=partial(absent, *_NEEDS),
        version=partial(versions, "onnxruntime"),
        trains=False,
        compiles_with_dynamo=False,
    ),
)
