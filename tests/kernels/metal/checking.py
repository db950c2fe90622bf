"""How every shader is judged: as Triton's kernels are, against float64, and under every order in
which the threads of a threadgroup may take their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernel_dispatch.numerics import to_reference
from tests.support import metal_shim
from tests.support.numerics import assert_bit_identical, assert_contract

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Tensor = torch.Tensor


def check(
    where: str,
    launch: Callable[..., Any],
    torchs_own: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    kernel: str,
) -> Any:
    """`launch(*inputs)` launches `kernel` once, and is as near to the truth as torch's own."""
    results = []
    before = [_copied(value) for value in inputs]
    for order in metal_shim.ORDERS:
        metal_shim.launched.clear()
        with metal_shim.threads_run(order):
            results.append(launch(*inputs))
        assert metal_shim.launched == [kernel], f"{where}: launched {metal_shim.launched}"
    for order, result in zip(metal_shim.ORDERS[1:], results[1:], strict=True):
        assert_bit_identical(result, results[0], f"{where}: threads run {order}")
    assert_bit_identical(list(inputs), before, f"{where}: inputs")
    own, truth = torchs_own(*inputs), torchs_own(*to_reference(list(inputs)))
    assert_contract(results[0], own, truth, where)
    return results[0]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def every_second(tensor: Tensor, dim: int = -1) -> Tensor:
    """The same numbers, in memory with others in between."""
    wide = torch.full_like(tensor, float("nan")).repeat_interleave(2, dim)
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(None, None, 2)
    wide[tuple(index)] = tensor
    return wide[tuple(index)]


def far_apart(tensor: Tensor) -> Tensor:
    """The same numbers, with more than 2^31 others between what the first dimension counts.

    The memory between is asked for and never touched, so it costs nothing.
    """
    distance = (1 << 31) + 64
    base = torch.empty(distance * (tensor.shape[0] - 1) + tensor[0].numel(), dtype=tensor.dtype)
    strides = (distance, *tensor[0].contiguous().stride())
    return base.as_strided(tensor.shape, strides).copy_(tensor)


def nonfinite(tensor: Tensor) -> Tensor:
    """NaN and both infinities, each in a row of its own."""
    rows = tensor.clone().reshape(-1, tensor.shape[-1])
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        rows[row, row] = value
    return rows.reshape(tensor.shape)


def same_nonfinite(got: Any, own: Any, where: str) -> None:
    for index, (ours, theirs) in enumerate(
        zip(pytree.tree_leaves(got), pytree.tree_leaves(own), strict=True)
    ):
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            same = torch.equal(kind(ours), kind(theirs))
            assert same, f"{where}: output {index}: {kind.__name__} differs"
