"""Convolutions behind each other in one call: `openmp_convolutions`, for several of the other.

The operator then sees both of a pair and need not write what is between them to memory, and a call
costs as much as half a layer of a small network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Arguments of `openmp_convolution`.
_TENSORS = slice(1, 7)
_EPS, _STRIDE, _PADDING, _DILATION, _GROUPS = range(7, 12)
_BESIDE = slice(12, 15)
_ACT, _A, _B, _WINOGRAD = range(15, 19)


def join(graph: fx.Graph) -> None:
    """Replace every chain in which each convolution has no user but the next one."""
    for node in list(graph.nodes):
        if _is_convolution(node):
            _take_padding(graph, node)
    for chain in list(_chains(graph)):
        last = chain[-1]
        with graph.inserting_before(last):
            new = graph.call_function(
                torch.ops.kernel_dispatch.openmp_convolutions.default,
                _arguments(chain),
                dict(last.kwargs),  # how the output lies
            )
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        for node in reversed(chain):
            graph.erase_node(node)


def sides(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Above and to the left, below and to the right: of one list for both, or of two."""
    return padding[:dims], padding[-dims:]


def _take_padding(graph: fx.Graph, node: fx.Node) -> None:
    """Zeros around the image that a node before adds: more below than above, as in TensorFlow."""
    args: Any = node.args
    padded, own, dims = args[0], args[_PADDING], len(args[_STRIDE])
    if padded.target is not aten.constant_pad_nd.default or len(padded.users) != 1:
        return
    image, more, value = (*padded.args, 0)[:3]
    if value != 0 or len(more) > 2 * dims or not all(type(n) is int and n >= 0 for n in more):
        return
    more = [*more, *[0] * (2 * dims - len(more))]  # (left, right, above, below)
    before, behind = sides(own, dims)
    node.update_arg(0, image)
    node.update_arg(
        _PADDING,
        [p + n for p, n in zip(before, more[-2::-2], strict=True)]
        + [p + n for p, n in zip(behind, more[-1::-2], strict=True)],
    )
    graph.erase_node(padded)


def _chains(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    of_chains: set[fx.Node] = set()
    for node in graph.nodes:
        if not _is_convolution(node) or node in of_chains:
            continue
        chain = [node]
        while (following := _behind(chain[-1])) is not None:
            chain.append(following)
        of_chains.update(chain)
        if len(chain) > 1:
            yield chain


def _is_convolution(node: fx.Node) -> bool:
    name = "kernel_dispatch::openmp_convolution"
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name


def _behind(node: fx.Node) -> fx.Node | None:
    """The convolution that alone reads what this one gives, and reads nothing of it but images."""
    if len(node.users) != 1 or any(part is not None for part in node.args[_BESIDE]):
        return None
    (user,) = node.users
    reads_images = _is_convolution(user) and user.args[0] is node
    return user if reads_images and _all_inputs(user).count(node) == 1 else None


def _all_inputs(node: fx.Node) -> list[Any]:
    return [part for part in node.args if isinstance(part, fx.Node)]


def _arguments(chain: Sequence[fx.Node]) -> tuple[Any, ...]:
    tensors: list[Any] = []
    integers: list[Any] = []
    numbers: list[Any] = []
    for node in chain:
        args: Any = node.args
        tensors += args[_TENSORS]
        before, behind = sides(args[_PADDING], len(args[_STRIDE]))
        for one in (args[_STRIDE], before, behind, args[_DILATION]):
            integers += [*one] * (2 // len(one))
        integers += [args[_GROUPS], args[_ACT], int(args[_WINOGRAD])]
        numbers += [args[_EPS], args[_A], args[_B]]
    return (chain[0].args[0], tensors, integers, numbers, *chain[-1].args[_BESIDE])
