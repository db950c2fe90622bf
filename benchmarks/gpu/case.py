"""What a case is: one kernel with its inputs, its meaning in torch, its rivals and its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
Inputs = tuple[Any, ...]
Function = Callable[..., Any]

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
FLOATS = ("bfloat16", "float16", "float32")
FLOAT8 = "float8"  # whichever of them the card multiplies
EIGHT_BITS = (FLOAT8, "int8")


class Absent(Exception):
    """A kernel or a rival that is not there (yet): a row that says so."""


@dataclass(frozen=True)
class Work:
    """The least that has to be done: every tensor moved once, and products."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Rival:
    """Somebody else's way to compute the same. `make` may import, compile, and raise `Absent`."""

    name: str
    make: Callable[[], Function]
    clones: bool = False  # it writes into its inputs, so it gets its own


@dataclass(frozen=True)
class Targets:
    """What would be good enough; None: no opinion. Shares are of rates measured on this card."""

    copy_share: float | None = None  # forward
    backward_copy_share: float | None = None
    least_bytes: float = 64 << 20  # below it, latency counts and not bandwidth
    rival: str | None = None  # the fastest that ours is compared with ...
    times_rival: float = 1.0  # ... and how many times its time ours may take
    milliseconds: float | None = None
    share_of_eagers_memory: float | None = None
    at: Shape | None = None  # the shape that the last two are for


@dataclass(frozen=True)
class Case:
    """One kernel. Functions take what `make` gave, in its order.

    Floats that require gradients are those that the backward is asked for. `own` is torch's eager
    meaning: in float64 it is the truth, in the dtype of the case it is what ours is judged by.
    """

    name: str
    kernel: str  # its public name in `triton_kernels`
    make: Callable[[Shape, torch.dtype, str], Inputs]
    ours: Function
    own: Function
    work: Callable[[Shape, int, str], Work]  # of a shape, bytes per number, direction
    shapes: tuple[Shape, ...]  # that are timed and tuned for: what users have
    odd: tuple[Shape, ...] = ()  # that are checked beside them
    tiny: Shape = ()  # for the interpreter
    huge: Shape | None = None  # of more than 2^31 elements
    rows_of: tuple[int, ...] = ()  # inputs that have a row for each row of the output: for `huge`
    dtypes: tuple[str, ...] = FLOATS
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    rivals: tuple[Rival, ...] = ()
    compiles: bool = True  # Inductor would do more than call what eager calls
    targets: Targets = Targets()
    layouts: tuple[str, ...] = ("plain", "sliced", "transposed")
    # What of the outputs is compared: 8-bit values times their scales, say.
    view: Callable[[Any], Any] = lambda outputs: outputs
    checks_usual: bool = True  # False: float64 of the usual shapes would not fit

    def dtypes_on(self, device: str) -> list[str]:
        """In the interpreter bfloat16 is wrong, and 8-bit floats lose a carry when rounded."""
        without = ("bfloat16", FLOAT8) if device == "cpu" else ()
        return [name for name in self.dtypes if name not in without]


def ours(name: str) -> Function:
    """A public function of `triton_kernels`, looked up when it is called."""

    def call(*inputs: Any, **settings: Any) -> Any:
        return kernel(name)(*inputs, **settings)

    return call


def kernel(name: str) -> Function:
    import triton_kernels

    if name not in triton_kernels.__all__:
        raise Absent(f"triton_kernels has no {name} (yet)")
    return getattr(triton_kernels, name)  # one that does not import is a failure, not an absence


def dtype_of(name: str, device: str) -> torch.dtype:
    if name != FLOAT8:
        return getattr(torch, name)
    from triton_kernels import architectures

    known = architectures.of(torch.device(device)).fp8
    if not known:
        raise Absent("the matrix units of this card have no 8-bit floats")
    return getattr(torch, known[0])


def half(device: str) -> torch.dtype:
    """The dtype that goes with 8-bit weights; the interpreter's bfloat16 is wrong."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def randn(
    *shape: int, dtype: torch.dtype, device: str, grad: bool = True, scale: float = 1.0
) -> torch.Tensor:
    drawn = torch.randn(shape, dtype=dtype, device=device)
    return (drawn if scale == 1.0 else drawn.mul_(scale)).requires_grad_(grad)


def numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
