"""Attention that a model spells out becomes torch's own operator, which kernels of ours compute.

Two products with a softmax between them, scaled and masked: as transformers' "eager" attention and
many hand-written layers have it. Inductor knows some spellings by their exact steps; here the chain
is followed from the softmax outwards, in whatever order and by whatever function its steps come, in
the graph as Dynamo captured it.

What was one tensor in rows is one in rows again, and nothing that is read may have been written
between the two products: the graph is as the user wrote it, with writes and aliases.

A row whose keys are all at minus infinity is not a number when spelled out, and zeros by torch's
operator: such a row's mask is not a number here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowering import einsum_products, unequal_heads, writing
from lowering.attention_in_four import InFour, method, shared_leading
from lowering.graphs import same_sizes
from lowering.regions.calls import (
    SAME_VALUE,
    arguments,
    is_no_dropout,
    keeps_value,
    name_of,
    value_of,
)

_HIDES = -1e30  # from here on a number takes every bit of a score that is added to it
_PRODUCTS = ("matmul", "bmm", "__matmul__")
_RESHAPES = ("view", "reshape")
_GREATEST = ("amax", "max", "getitem", "detach")
_STEPS = {
    **dict.fromkeys(("add", "add_", "iadd", "__add__", "__radd__", "__iadd__"), "add"),
    **dict.fromkeys(("mul", "mul_", "imul", "multiply", "__mul__", "__rmul__"), "multiply"),
    **dict.fromkeys(("div", "div_", "truediv", "itruediv", "divide", "true_divide"), "divide"),
    **dict.fromkeys(("masked_fill", "masked_fill_"), "hide"),
    "where": "keep",
    **dict.fromkeys(("sub", "sub_", "isub", "subtract", "__sub__"), "subtract"),
    **dict.fromkeys(SAME_VALUE, "same"),
    **dict.fromkeys(_RESHAPES, "reshape"),
}


@dataclass
class _Mask:
    """What is added to the scores: a tensor, or a number where a tensor of truth values says so."""

    node: fx.Node
    number: float | None = None
    negated: bool = False
    reshaped: list[tuple[torch.Size, torch.Size]] = field(default_factory=list)  # (from, to)


@dataclass
class _Scores:
    """What stands between the first product and the softmax, read from the softmax inwards."""

    scale: float = 1.0
    # One number for all pairs, or for those of a head, and whether it multiplies or divides.
    factors: list[tuple[str, fx.Node]] = field(default_factory=list)
    masks: list[_Mask] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    greatest: list[fx.Node] = field(default_factory=list)  # what is taken away from all of a row
    product: fx.Node | None = None

    @property
    def is_scaled(self) -> bool:
        return self.scale != 1.0 or bool(self.factors)


def join(graph: fx.Graph) -> int:
    """Returns how many were found."""
    return sum(_found(graph, node) for node in list(graph.nodes) if name_of(node) == "softmax")


def _found(graph: fx.Graph, softmax: fx.Node) -> bool:
    """The products may be einsums."""
    products = [
        written
        for einsum in dict.fromkeys(_einsums_around(softmax))
        if (written := einsum_products.write(graph, einsum)) is not None
    ]
    found = _join(graph, softmax)
    for product in () if found else reversed(products):
        product.take_back()
    return found


def _einsums_around(softmax: fx.Node) -> Iterator[fx.Node]:
    node = softmax
    while len(node.users) == 1 and not einsum_products.is_einsum(node):
        (node,) = node.users
    if einsum_products.is_einsum(node):
        yield node
    before = list(softmax.all_input_nodes)
    while before:
        node = before.pop()
        if einsum_products.is_einsum(node):
            yield node
        elif name_of(node) in _STEPS:
            before.extend(node.all_input_nodes)


def _join(graph: fx.Graph, softmax: fx.Node) -> bool:
    steps, product = _behind(softmax)
    scores = _Scores()
    if product is None or not _is_over_keys(softmax) or not _read(softmax, scores):
        return False
    assert scores.product is not None
    (query, keys), values = scores.product.args, product.args[1]
    leading = _leading(query, keys, values, value_of(product.args[0]))
    if leading is None:
        return False
    four = InFour(graph, leading)
    if not all(_takes_mask(four, mask) for mask in scores.masks):
        return False
    if _is_written_between(scores.product, product, besides=scores.nodes):
        return False
    with graph.inserting_before(product):
        new = _Writer(graph, four).attention(query, keys, values, scores)
        if unequal_heads.shows_layout(product):
            new = graph.call_method("contiguous", (new,))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)
    for node in (product, *reversed(steps), softmax, *scores.nodes):
        if not node.users:
            graph.erase_node(node)
    return True


def _behind(softmax: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """The steps that change nothing, and the product with the values; None where there is none."""
    steps: list[fx.Node] = []
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if name_of(user) in _PRODUCTS:
            fits = _is_of_two(user) and user.args[0] is node and user.args[1] is not node
            return steps, user if fits else None
        if not (_keeps_rows(user) or keeps_value(user) or is_no_dropout(user)):
            break
        steps.append(user)
        node = user
    return steps, None


def _is_of_two(node: fx.Node) -> bool:
    return len(node.args) == 2 and not node.kwargs


def _keeps_rows(node: fx.Node) -> bool:
    if name_of(node) not in _RESHAPES or not node.args:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    return (
        before is not None and after is not None and same_sizes(before.shape[-2:], after.shape[-2:])
    )


def _is_over_keys(softmax: fx.Node) -> bool:
    given, value = arguments(softmax, ("input", "dim"), {}), value_of(softmax)
    over = value is not None and given["dim"] in (-1, value.dim() - 1)
    return over and value.dtype == torch.float32


def _is_written_between(first: fx.Node, last: fx.Node, besides: Sequence[fx.Node]) -> bool:
    node = first.next
    while node is not last:
        if node not in besides and (writing.is_opaque(node) or writing.written_by(node)):
            return True
        node = node.next
    return False


def _read(softmax: fx.Node, scores: _Scores) -> bool:
    """Follow the scores down to their product; what else is met goes into `scores`."""
    node, reader = arguments(softmax, ("input",), {})["input"], softmax
    while name_of(node) not in _PRODUCTS:
        scores.nodes.append(node)
        inner = _through(node, scores) if _is_read_by(node, reader, scores) else None
        if inner is None or value_of(inner) is None or value_of(inner).dtype != torch.float32:
            return False
        if _STEPS[name_of(node)] != "reshape" and not _same_shape(inner, node):
            return False
        node, reader = inner, node
    scores.nodes.append(node)
    scores.product = node
    return _is_read_by(node, reader, scores) and _is_of_two(node)


def _is_read_by(node: Any, reader: fx.Node, scores: _Scores) -> bool:
    """And by nothing else that stays."""
    users = set(getattr(node, "users", ()))
    return reader in users and users <= {reader, *scores.greatest}


def _same_shape(one: Any, other: Any) -> bool:
    return same_sizes(value_of(one).shape, value_of(other).shape)


def _through(node: fx.Node, scores: _Scores) -> Any:
    """The operand that holds the scores, the other one noted; None: no attention as known here."""
    step = _STEPS.get(name_of(node), "")
    if step == "same":
        return node.args[0] if keeps_value(node) else None
    if step == "reshape":
        return _through_reshape(node, scores)
    if not step or node.kwargs or len(node.args) != (3 if step in ("hide", "keep") else 2):
        return None
    if step in ("multiply", "divide"):
        return _through_scale(step, node, scores)
    if step == "subtract":
        return _through_difference(node, scores)
    if scores.is_scaled:  # what is added before scaling is scaled as well
        return None
    if step == "add":
        return _through_sum(node, scores)
    inner: Any
    where: Any
    inner, where, number = node.args if step == "hide" else (node.args[1], *node.args[::2])
    if not isinstance(number, (int, float)) or number > _HIDES:
        return None
    return inner if _note(scores, _Mask(where, float(number), step == "keep")) else None


def _through_sum(node: fx.Node, scores: _Scores) -> Any:
    inner: Any
    other: Any
    inner, other = node.args if _leads_to_product(node.args[0]) else node.args[::-1]
    nothing = isinstance(other, (int, float)) and other == 0
    return inner if nothing or _note(scores, _Mask(other)) else None


def _through_difference(node: fx.Node, scores: _Scores) -> Any:
    """Without their greatest, scores have the same softmax: the softmax takes it away itself."""
    inner: Any
    other: Any
    inner, other = node.args
    found: list[Any] = []
    while name_of(other) in _GREATEST and other.args and len(other.users) == 1:
        found.append(other)
        other = other.args[0]
    names = [name_of(one) for one in found]
    if other is not inner or names[-1:] not in (["amax"], ["max"]):
        return None
    given = arguments(found[-1], ("input", "dim", "keepdim"), {"keepdim": False})
    first = [one.args[1] for one in found if name_of(one) == "getitem"]
    if given["dim"] not in (-1, value_of(node).dim() - 1) or given["keepdim"] is not True:
        return None
    if first != ([0] if names[-1] == "max" else []) or names.count("amax") + names.count("max") > 1:
        return None
    scores.greatest.extend(found)
    scores.nodes.extend(found)
    return inner


def _through_reshape(node: fx.Node, scores: _Scores) -> Any:
    if not node.args:
        return None
    inner, after = value_of(node.args[0]), value_of(node)
    if inner is None or after is None:
        return None
    if any(not isinstance(size, int) for size in (*inner.shape, *after.shape)):
        return None
    for mask in scores.masks:
        mask.reshaped.append((after.shape, inner.shape))
    by_head = any(not _is_one_number(value_of(factor)) for _, factor in scores.factors)
    return None if by_head else node.args[0]


def _through_scale(step: str, node: fx.Node, scores: _Scores) -> Any:
    inner: Any
    factor: Any
    inner, factor = node.args
    if step == "multiply" and not _leads_to_product(inner):
        inner, factor = factor, inner
    if isinstance(factor, (int, float)) and factor:
        scores.scale *= factor if step == "multiply" else 1 / factor
        return inner
    value = value_of(factor)
    if value is None or not (_is_one_number(value) or _is_one_for_each_head(value)):
        return None
    scores.factors.append(("mul" if step == "multiply" else "div", factor))
    return inner


def _is_one_number(value: torch.Tensor | None) -> bool:
    """A temperature, or the root of a size, that changes no dtype."""
    if value is None or value.is_complex():
        return False
    return not value.dim() or (value.dtype == torch.float32 and same_sizes(value.shape, (1,)))


def _is_one_for_each_head(value: torch.Tensor) -> bool:
    of_heads = value.dim() > 2 and same_sizes(value.shape[-2:], (1, 1))
    return of_heads and value.dtype == torch.float32


def _note(scores: _Scores, mask: _Mask) -> bool:
    value = value_of(mask.node)
    wanted = torch.float32 if mask.number is None else torch.bool
    if value is None or value.dtype != wanted:
        return False
    scores.masks.append(mask)
    return True


def _leads_to_product(node: Any) -> bool:
    """Of two that are added, the scores are the one that was a product a few steps before."""
    while name_of(node) in _STEPS:
        step, args = _STEPS[name_of(node)], node.args
        if step in ("add", "multiply"):
            return any(map(_leads_to_product, args))
        node = next(iter(args[1:] if step == "keep" else args), None)
    return name_of(node) in _PRODUCTS


def _leading(query: Any, keys: Any, values: Any, weights: torch.Tensor) -> tuple[Any, ...] | None:
    """The sizes of heads and texts, or None for what torch's kernel for CPUs, which is looked for
    behind it, does not take. `keys` are transposed."""
    known = [value_of(node) for node in (query, keys, values)]
    if any(value is None or value.dtype != torch.float32 or value.dim() < 2 for value in known):
        return None
    q, k, v = known
    if not (isinstance(q.shape[-1], int) and isinstance(v.shape[-1], int)):
        return None
    of_weights = shared_leading([q.shape, k.shape])
    if of_weights is None or not same_sizes((*of_weights, q.shape[-2], k.shape[-1]), weights.shape):
        return None
    return shared_leading([q.shape, k.shape, v.shape])


def _takes_mask(four: InFour, mask: _Mask) -> bool:
    shapes = [value_of(mask.node).shape, *(before for before, _ in mask.reshaped)]
    return len(four.leading) < 3 or (len(shapes) == 1 and four.takes_mask(shapes[0]))


class _Writer:
    """Puts torch's operator into a graph."""

    def __init__(self, graph: fx.Graph, four: InFour) -> None:
        self.graph = graph
        self.four = four

    def function(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def attention(self, query: Any, keys: Any, values: Any, scores: _Scores) -> fx.Node:
        for step, factor in scores.factors:
            query = method(self.graph, step, query, factor)
        inputs = (query, method(self.graph, "transpose", keys, -2, -1), values)
        new = unequal_heads.call(
            self.graph,
            [self.four.operand(node) for node in inputs],
            (value_of(keys).shape[-2], value_of(values).shape[-1]),
            {"attn_mask": self.mask(scores.masks), "scale": scores.scale},
        )
        return self.four.result(new)

    def mask(self, masks: Sequence[_Mask]) -> fx.Node | None:
        """What was added first is added first: what hides takes the place of all before it."""
        whole: fx.Node | None = None
        for mask in reversed(masks):
            tensor = self.spread(mask)
            if mask.number is None:
                whole = tensor if whole is None else self.function(torch.add, whole, tensor)
                continue
            before = self.no_mask(tensor) if whole is None else whole
            kept, hidden = (before, mask.number) if mask.negated else (mask.number, before)
            whole = self.function(torch.where, tensor, kept, hidden)
        if whole is None:
            return None
        nearest = self.graph.call_method("amax", (whole, -1, True))
        far = self.graph.call_method("eq", (nearest, -math.inf))
        return self.graph.call_method("masked_fill", (whole, far, math.nan))

    def no_mask(self, like: fx.Node) -> fx.Node:
        kind: Any = {"dtype": torch.float32}
        return self.graph.call_function(torch.zeros_like, (like,), kind)

    def spread(self, mask: _Mask) -> fx.Node:
        """In the shape that the scores have where the operator meets them, in four dimensions."""
        node, shape = mask.node, list(value_of(mask.node).shape)
        for before, after in mask.reshaped:
            wide, shape = _broadcast(shape, list(before), list(after))
            node = method(self.graph, "expand", node, wide)
            node = method(self.graph, "reshape", node, shape)
        return self.four.mask(node)


def _broadcast(
    mask: Sequence[int], before: list[int], after: list[int]
) -> tuple[list[int], list[int]]:
    """To which sizes a mask is expanded and then reshaped, where scores go from one shape to the
    other. A mask for all heads stays one."""
    padded = [1] * (len(before) - len(mask)) + list(mask)
    if padded[-3:-2] == [1] and before[-3:] == after[-3:]:
        before[-3] = after[-3] = 1
    return before, after
