"""The layout contract of `lowering.ops`: row-major, and every other layout is told of.

`layout="copy"` copies an argument that lies otherwise, counts it, logs it once, and leaves a node
in a compiled graph, which its report names. `layout="refuse"` makes it an error. `"channels_last"`
is the tag for images that lie so on purpose; they are taken as they are.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lowering.errors import OperandError, unknown
from lowering.graphs import place

log = logging.getLogger(__name__)

LAYOUTS = ("copy", "refuse", "channels_last")

_lock = threading.Lock()
_copies: Counter[tuple[str, str]] = Counter()
_logged: set[tuple[str, str, tuple[int, ...]]] = set()


def copies() -> Mapping[tuple[str, str], int]:
    """(operation, argument) -> how often it was copied since the process began, compiled or not."""
    with _lock:
        return dict(_copies)


def laid_out(tensor: Tensor, op: str, argument: str, layout: str, images: bool = False) -> Tensor:
    """The tensor as the contract wants it. `images`: the operation takes the tag channels_last."""
    accepted = LAYOUTS if images else LAYOUTS[:2]
    if layout not in accepted:
        raise unknown("layout", layout, accepted, f"layout= of {op}")
    if tensor.is_contiguous():
        return tensor
    if layout == "channels_last" and tensor.dim() == 4:
        if tensor.is_contiguous(memory_format=torch.channels_last):
            return tensor
        raise _refusal(tensor, op, argument, "layout='channels_last' was given, and it is neither")
    if layout == "copy":
        return row_major(tensor, op, argument)
    raise _refusal(tensor, op, argument, f"layout={layout!r} takes row-major only")


def _refusal(tensor: Tensor, op: str, argument: str, why: str) -> OperandError:
    sizes, strides = tuple(tensor.shape), tensor.stride()
    is_image = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    name = "channels last" if is_image else "not row-major"
    return OperandError(
        f"{op}: {argument} of sizes {sizes} has strides {strides}, which is {name}; {why}. "
        f"Give {argument}.contiguous(), or layout='copy'."
    )


# An operator, and not .contiguous() alone: Dynamo keeps it whole, so that a compiled graph shows
# which argument of which operation is copied, and every copy is counted at every level.
@torch.library.custom_op("kernel_dispatch::row_major", mutates_args=())
def row_major(tensor: Tensor, op: str, argument: str) -> Tensor:
    _tell(op, argument, tuple(tensor.stride()))
    return tensor.clone(memory_format=torch.contiguous_format)


@row_major.register_fake
def _(tensor: Tensor, op: str, argument: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _gradient(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


row_major.register_autograd(_gradient)


def _tell(op: str, argument: str, strides: tuple[int, ...]) -> None:
    with _lock:
        _copies[op, argument] += 1
        known = (op, argument, strides) in _logged
        _logged.add((op, argument, strides))
    if not known:
        log.warning(
            "%s: %s has strides %s and is copied to row-major in every call; lay it out once, or "
            "give layout='refuse' to find the place",
            op,
            argument,
            strides,
        )


def copies_in(graph: fx.Graph) -> Iterator[str]:
    """A sentence for each copy that a graph makes, for its report."""
    for node in graph.nodes:
        if node.target is torch.ops.kernel_dispatch.row_major.default:
            tensor, op, argument = node.args
            value = tensor.meta.get("example_value", tensor.meta.get("val"))
            at = place(node)
            yield (
                f"layout-copied: {op}: {argument} has strides {tuple(value.stride())} and is "
                f"copied to row-major" + (f" [{at}]" if at else "")
            )
