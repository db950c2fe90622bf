"""How every Triton kernel is judged: against the same computation in float64.

    err(kernel) <= 2 * err(torch's own at that dtype) + 4 * eps(dtype)

with the errors of `kernel_dispatch.numerics`; NaN and infinities stand where torch has them; and
every gradient is judged in the same way, under an incoming gradient that is random, not uniform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from kernel_dispatch.numerics import to_reference
from tests.support.numerics import assert_contract
from triton_kernels import architectures, cross_compiling, launching, tuning
from triton_kernels.architectures import Architecture
from triton_kernels.availability import interpreting
from triton_kernels.cross_compiling import Binary
from triton_kernels.launching import Launch

Tensor = torch.Tensor

# A GPU where there is one, else the CPU, where Triton interprets. Bfloat16 needs a GPU: in the
# interpreter its arithmetic is wrong.
DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]

ON_A_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nobody looks at numbers before")

# --- numbers ---------------------------------------------------------------------------


def check(
    where: str,
    kernel: Callable[..., Any],
    torchs_own: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    launches: Iterable[str] | None = None,
) -> None:
    """`kernel(*inputs)` against `torchs_own(*inputs)`, which in float64 is the truth as well.

    Gradients are compared for the inputs that require them. `launches`: the names of the kernels
    that have to run, forward and backward; numbers alone would also be right if the plain meaning
    had been computed. None: any, but at least one.
    """
    with launching.watched() as names:
        got, got_gradients = _run(kernel, inputs)
    assert names if launches is None else sorted(names) == sorted(launches), (
        f"{where}: the kernels that ran are {sorted(names)}"
    )
    own, own_gradients = _run(torchs_own, inputs)
    truth, true_gradients = _run(torchs_own, to_reference(list(inputs)))
    assert_contract(got, own, truth, where)
    assert_contract(got_gradients, own_gradients, true_gradients, f"{where}: gradients")


def _run(compute: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, list[Tensor]]:
    """What it gives, and the gradients of the inputs that want one."""
    fresh = [_leaf(value) for value in inputs]
    wanted = [v for v in fresh if isinstance(v, Tensor) and v.requires_grad]
    outputs = compute(*fresh)
    differentiable = [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not wanted or not differentiable:
        return pytree.tree_map(_detached, outputs), []
    incoming = [_incoming(leaf, seed) for seed, leaf in enumerate(differentiable)]
    with torch.autograd.set_multithreading_enabled(False):  # launches are watched on this thread
        gradients = torch.autograd.grad(differentiable, wanted, incoming, allow_unused=True)
    found = [
        torch.zeros_like(into) if gradient is None else gradient
        for into, gradient in zip(wanted, gradients, strict=True)
    ]
    return pytree.tree_map(_detached, outputs), found


def _leaf(value: Any) -> Any:
    """The same memory layout, without history: gradients are asked anew for each run."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _incoming(output: Tensor, seed: int) -> Tensor:
    """The same numbers for every dtype: exact in float16."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(output.shape, generator=generator, device="cpu")
    return drawn.half().to(output)


# --- for an absent GPU ----------------------------------------------------------------------------


def compiled(
    call: Callable[[], Any], architecture: Architecture
) -> Iterator[tuple[Launch, Binary]]:
    """Every kernel that `call` launches, in every candidate configuration, as compiled for there.

    `call` uses a launcher on tensors of the device "meta": nothing is computed.
    """
    with architectures.assume(architecture):
        with tuning.asking() as asked, launching.recorded() as found:
            call()
        for nth in range(1, max((len(candidates) for _, candidates in asked), default=1)):
            with tuning.taking(nth), launching.recorded() as more:
                call()
            found += more
    seen = set()
    for launch in found:
        binary = cross_compiling.compile(launch, architecture)
        if id(binary) not in seen:
            seen.add(id(binary))
            yield launch, binary


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def assert_compiles_everywhere(
    call: Callable[[Architecture], Any], architecture_name: str, *, products: bool = False
) -> None:
    """Compiles, fits into shared memory, spills nothing; with `products` uses matrix units."""
    architecture = architectures.named(architecture_name)
    found = list(compiled(functools.partial(call, architecture), architecture))
    assert found, "nothing was launched"
    for launch, binary in found:
        where = f"{launch.name} on {architecture_name} with {launch.config}"
        assert not binary.fits(), f"{where}: {binary.fits()}"
        if products:
            has = architecture.matrix_instruction in binary.assembly
            assert has, f"{where}: no {architecture.matrix_instruction}"
