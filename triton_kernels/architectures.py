"""GPU architectures as data: what a kernel may use on each, and what the hardware can do at most.

Figures are the makers' data sheets for the card that is named; they are upper limits for
estimates. What a program really gets is measured (`benchmarks/gpu`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from triton_kernels.errors import UnknownArchitectureError


@dataclass(frozen=True)
class Architecture:
    """One family of GPUs, as compilers name it."""

    name: str
    backend: str  # Triton's word for the vendor: "cuda" or "hip"
    card: str  # whose data sheet the figures are from
    lanes: int  # threads that run in step: a warp, a wavefront
    shared_bytes: int  # most that one program may use
    shared_bytes_per_unit: int
    registers_per_unit: int  # 32-bit registers of an SM; vector registers x lanes of a CU
    lanes_per_unit: int  # most threads that an SM or CU keeps in flight
    registers_per_lane: int  # most that one thread may have
    units: int  # SMs or CUs of the card
    bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    fp8: tuple[str, ...] = ()  # torch dtypes of 8-bit floats that its matrix units multiply
    matrix_instruction: str = ""  # how a product of tiles reads in its assembly

    @property
    def target(self) -> int | str:
        """As `triton.backends.compiler.GPUTarget` takes it."""
        return int(self.name[2:]) if self.backend == "cuda" else self.name

    @property
    def device(self) -> str:
        """As this project names it on a command line."""
        return ("cuda:" if self.backend == "cuda" else "rocm:") + self.name


_T = 1e12
_KB = 1 << 10
_FN, _FNUZ, _E5 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"


def _nvidia(name: str, card: str, shared: int, **more: object) -> Architecture:
    fixed = {"lanes": 32, "registers_per_unit": 65536, "registers_per_lane": 255}
    shared_per_unit = (shared + 1) * _KB
    known = {**fixed, "lanes_per_unit": 2048, "shared_bytes_per_unit": shared_per_unit, **more}
    return Architecture(name, "cuda", card, shared_bytes=shared * _KB, **known)  # type: ignore[arg-type]


def _amd(name: str, card: str, shared: int, **more: object) -> Architecture:
    fixed = {"lanes": 64, "registers_per_unit": 131072, "registers_per_lane": 512}
    shared_bytes = {"shared_bytes": shared * _KB, "shared_bytes_per_unit": shared * _KB}
    known = {**fixed, "lanes_per_unit": 2048, **shared_bytes, **more}
    return Architecture(name, "hip", card, **known)  # type: ignore[arg-type]


KNOWN = (
    _nvidia(
        "sm80", "A100 SXM 80 GB", 163, units=108, bytes_per_second=2.04 * _T,
        flops_per_second={"float32": 19.5 * _T, "tf32": 156 * _T, "bfloat16": 312 * _T,
                          "float16": 312 * _T, "int8": 624 * _T},
        matrix_instruction="mma.sync",
    ),
    _nvidia(
        "sm86", "RTX A6000", 99, units=84, bytes_per_second=0.768 * _T, lanes_per_unit=1536,
        flops_per_second={"float32": 38.7 * _T, "tf32": 77 * _T, "bfloat16": 155 * _T,
                          "float16": 155 * _T, "int8": 310 * _T},
        matrix_instruction="mma.sync",
    ),
    _nvidia(
        "sm89", "L40S", 99, units=142, bytes_per_second=0.864 * _T, lanes_per_unit=1536,
        flops_per_second={"float32": 91.6 * _T, "tf32": 183 * _T, "bfloat16": 362 * _T,
                          "float16": 362 * _T, "int8": 733 * _T, _FN: 733 * _T, _E5: 733 * _T},
        fp8=(_FN, _E5), matrix_instruction="mma.sync",
    ),
    _nvidia(
        "sm90", "H100 SXM", 227, units=132, bytes_per_second=3.35 * _T,
        flops_per_second={"float32": 67 * _T, "tf32": 495 * _T, "bfloat16": 989 * _T,
                          "float16": 989 * _T, "int8": 1979 * _T, _FN: 1979 * _T, _E5: 1979 * _T},
        fp8=(_FN, _E5), matrix_instruction="wgmma",
    ),
    _nvidia(
        "sm100", "B200", 227, units=148, bytes_per_second=8.0 * _T,
        flops_per_second={"float32": 75 * _T, "tf32": 1125 * _T, "bfloat16": 2250 * _T,
                          "float16": 2250 * _T, "int8": 4500 * _T, _FN: 4500 * _T, _E5: 4500 * _T},
        fp8=(_FN, _E5), matrix_instruction="tcgen05.mma",
    ),
    _nvidia(
        "sm120", "RTX 5090", 99, units=170, bytes_per_second=1.79 * _T, lanes_per_unit=1536,
        flops_per_second={"float32": 105 * _T, "tf32": 105 * _T, "bfloat16": 210 * _T,
                          "float16": 210 * _T, "int8": 838 * _T, _FN: 419 * _T, _E5: 419 * _T},
        fp8=(_FN, _E5), matrix_instruction="mma.sync",
    ),
    _amd(
        "gfx90a", "MI250X, one of its two dies", 64, units=110, bytes_per_second=1.64 * _T,
        flops_per_second={"float32": 23.9 * _T, "bfloat16": 191.5 * _T, "float16": 191.5 * _T,
                          "int8": 191.5 * _T},
        matrix_instruction="v_mfma",
    ),
    _amd(
        "gfx942", "MI300X", 64, units=304, bytes_per_second=5.3 * _T,
        flops_per_second={"float32": 163 * _T, "bfloat16": 1307 * _T, "float16": 1307 * _T,
                          "int8": 2615 * _T, _FNUZ: 2615 * _T},
        fp8=(_FNUZ,), matrix_instruction="v_mfma",
    ),
    _amd(
        "gfx950", "MI355X", 160, units=256, bytes_per_second=8.0 * _T,
        flops_per_second={"float32": 157 * _T, "bfloat16": 2500 * _T, "float16": 2500 * _T,
                          "int8": 5000 * _T, _FN: 5000 * _T, _E5: 5000 * _T},
        fp8=(_FN, _E5), matrix_instruction="v_mfma",
    ),
    _amd(
        "gfx1100", "RX 7900 XTX", 64, units=96, bytes_per_second=0.96 * _T, lanes=32,
        registers_per_unit=196608, registers_per_lane=256,
        flops_per_second={"float32": 61 * _T, "bfloat16": 123 * _T, "float16": 123 * _T,
                          "int8": 123 * _T},
        matrix_instruction="v_wmma",
    ),
)  # fmt: skip
# For these, every shipped configuration is compiled by the tests.
SHIPPED = ("sm80", "sm90", "sm100", "gfx90a", "gfx942", "gfx950", "gfx1100")

_BY_NAME = {one.name: one for one in KNOWN}


def named(name: str) -> Architecture:
    """The architecture of that exact name."""
    if name not in _BY_NAME:
        raise UnknownArchitectureError.of(name, _BY_NAME)
    return _BY_NAME[name]


def nearest(backend: str, name: str) -> Architecture:
    """The record of that architecture, or of the newest older one of its maker."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    kin = [one for one in KNOWN if one.backend == backend]
    older = [one for one in kin if _order(one.name) <= _order(name)]
    return older[-1] if older else kin[0]


def _order(name: str) -> int:
    digits = "".join(letter for letter in name if letter in "0123456789abcdef")
    return int(digits or "0", 16)


_assumed: contextvars.ContextVar[Architecture | None] = contextvars.ContextVar(
    "assumed", default=None
)


@contextlib.contextmanager
def assume(architecture: Architecture) -> Iterator[None]:
    """Choose configurations as on that architecture, whatever is here."""
    token = _assumed.set(architecture)
    try:
        yield
    finally:
        _assumed.reset(token)


def is_assumed() -> bool:
    return _assumed.get() is not None


# As torch.compiler.assume_constant_result does it, which would import the compiler: Dynamo calls
# the function while it traces instead of looking into it.
is_assumed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def of(device: torch.device) -> Architecture:
    """The architecture that kernels for tensors on this device are configured for."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type != "cuda":  # Triton's interpreter: any configuration will do
        return _BY_NAME["sm90"]
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_gpu(index: int) -> Architecture:
    if torch.version.hip:
        gfx = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
        return nearest("hip", gfx)
    major, minor = torch.cuda.get_device_capability(index)
    return nearest("cuda", f"sm{major}{minor}")
