"""Kernels as torch operators: `torch.ops.triton_kernels.<name>`, the same for eager and compiled.

Each operator has a launcher (GPUs; the CPU too when Triton interprets), a meaning in plain torch
(every other device and dtype), a fake implementation and, if it is differentiable, a backward.
They are opaque operators, not `torch.library.triton_op`s: a launcher reads real sizes at run time,
so that one compiled graph with dynamic shapes still launches what suits each size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triton_kernels import architectures
from triton_kernels._triton import ABSENT, INTERPRETED
from triton_kernels.errors import demand
from triton_kernels.launching import Launch, recorded

NAMESPACE = "triton_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_DEVICES = frozenset({"cpu", "cuda"} if INTERPRETED else {"cuda"})

Implementation = Callable[..., Any]
LAUNCHERS: dict[str, Implementation] = {}  # by operator name, for dry runs and tuning


def operator(
    name: str, *, launcher: Implementation, meaning: Implementation, fake: Implementation
) -> Any:
    """Register one operator; its schema is read from the launcher's annotations."""
    schema = torch.library.infer_schema(launcher, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    # In a trace of plain torch operators (export, another backend) it stays one operator.
    _LIBRARY.impl(name, _laid_out(meaning, fake), "CompositeExplicitAutograd")
    if not ABSENT:
        _LIBRARY.impl(name, launcher, "CUDA")
    if INTERPRETED:
        _LIBRARY.impl(name, launcher, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    LAUNCHERS[name] = launcher
    return getattr(getattr(torch.ops, NAMESPACE), name).default


class OnPaper(TorchDispatchMode):
    """Our operators, called on tensors of the device "meta": `launches` has what they would launch.

    Backwards count that run on this thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == NAMESPACE:
            with recorded() as launches:
                LAUNCHERS[str(func._schema.name).partition("::")[2]](*args, **(kwargs or {}))
            self.launches += launches
        return func(*args, **(kwargs or {}))


def _laid_out(meaning: Implementation, fake: Implementation) -> Implementation:
    """The meaning with results that lie in memory as the fake implementation promised."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        found, promised = meaning(*args, **kwargs), fake(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return _as_promised(found, promised)
        return tuple(map(_as_promised, found, promised))

    return compute


def _as_promised(found: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    return found if found.stride() == promised.stride() else promised.copy_(found)


def differentiable(name: str, *, backward: Implementation, saves: Implementation) -> None:
    """Give an operator its gradient. `saves(ctx, inputs, output)` keeps what `backward` needs."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=saves, lib=_LIBRARY
    )


def kernels_take(*tensors: torch.Tensor | None, dtypes: frozenset[torch.dtype] = _FLOATS) -> bool:
    """Do kernels run on these tensors? If not, the public functions compute the plain meaning.

    They do on any device while an architecture is assumed: then a graph is planned for it. Where
    they do not, the meaning is made of torch's own operators, which torch.compile fuses anywhere.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    for other in given:
        demand(other.device == device, lambda: _apart(given))
    here = not ABSENT and device.type in _DEVICES
    return (here or architectures.is_assumed()) and all(tensor.dtype in dtypes for tensor in given)


def _apart(given: list[torch.Tensor]) -> str:
    devices = sorted({str(tensor.device) for tensor in given})
    return f"all tensors are on one device, not on {' and '.join(devices)}"
