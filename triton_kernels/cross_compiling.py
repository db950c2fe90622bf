"""Compiles recorded launches for any architecture, without a GPU: Triton brings the assemblers.

What comes back is what the real compiler says: the code, registers, spills, shared memory.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triton_kernels.architectures import Architecture
from triton_kernels.launching import Launch

_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.float64: "*fp64", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e4m3fnuz: "*fp8e4b8", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip

# (type, constant or None, is a multiple of 16), or one such for each of a tuple of arguments.
_Argument = tuple[Any, ...]


@dataclass(frozen=True)
class Binary:
    """One compiled kernel. `spills` is in bytes for each thread."""

    architecture: Architecture
    assembly: str  # PTX or AMD assembly
    ir: str  # Triton's own
    code: bytes  # cubin or hsaco
    warps: int
    registers: int
    spills: int
    shared_bytes: int

    @property
    def suffix(self) -> str:
        return ".ptx" if self.architecture.backend == "cuda" else ".amdgcn"

    @property
    def code_suffix(self) -> str:
        return ".cubin" if self.architecture.backend == "cuda" else ".hsaco"

    @property
    def occupancy(self) -> float:
        """The part of an SM's or CU's threads that can be in flight, by registers and memory."""
        arch, lanes = self.architecture, self.warps * self.architecture.lanes
        by_lanes = arch.lanes_per_unit // lanes
        by_registers = arch.registers_per_unit // max(1, _granule(self.registers) * lanes)
        by_shared = arch.shared_bytes_per_unit // max(1, self.shared_bytes)
        return min(by_lanes, by_registers, by_shared) * lanes / arch.lanes_per_unit

    def fits(self) -> str:
        """Why it could not run there, or would run badly; empty if neither."""
        if self.shared_bytes > self.architecture.shared_bytes:
            return f"{self.shared_bytes} bytes of shared memory of {self.architecture.shared_bytes}"
        return f"{self.spills} bytes of registers spill" if self.spills else ""


def _granule(registers: int) -> int:
    """Registers are handed out in eights."""
    return -(-registers // 8) * 8


def compile(launch: Launch, architecture: Architecture) -> Binary:
    """The machine code that this launch would run there."""
    from triton_kernels._triton import ABSENT, INTERPRETED

    if ABSENT:
        raise RuntimeError(ABSENT)
    if INTERPRETED:
        raise RuntimeError("kernels are defined for Triton's interpreter: unset TRITON_INTERPRET")
    key = _specialised(launch)
    options = tuple(sorted(launch.config.options(architecture).items()))
    return _compiled(_function(launch.kernel), key, options, architecture.name)


def _function(kernel: Any) -> Any:
    """A kernel as the compiler takes it; Triton's interpreter keeps kernels in another form."""
    from triton.runtime.jit import JITFunction

    return kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)


def _specialised(launch: Launch) -> tuple[tuple[str, _Argument], ...]:
    """Arguments by name, as Triton's own launcher tells kernels apart."""
    given = {**launch.arguments, **launch.config.tiles}
    constant = {p.name for p in _function(launch.kernel).params if p.is_constexpr}
    return tuple((name, _argument(value, name in constant)) for name, value in given.items())


def _argument(value: Any, is_constant: bool = False) -> _Argument:
    if is_constant or value is None or (type(value) is int and value == 1):
        return "constexpr", value, False
    if isinstance(value, tuple):
        return tuple(_argument(one) for one in value)
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], None, _is_aligned(value)
    if isinstance(value, bool):
        return "i1", None, False
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return "i64" if wide else "i32", None, value % 16 == 0
    return "fp32", None, False


def _is_several(argument: _Argument) -> bool:
    return all(isinstance(one, tuple) for one in argument)


def _signature(argument: _Argument) -> Any:
    """A type, or a tuple of them for a tuple of arguments."""
    if _is_several(argument):
        return tuple(_signature(one) for one in argument)
    return argument[0]


def _leaves(argument: _Argument, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(where Triton finds it, argument) of each that is no tuple of others."""
    if not _is_several(argument):
        yield path, argument
        return
    for index, one in enumerate(argument):
        yield from _leaves(one, (*path, index))


def _is_aligned(tensor: torch.Tensor) -> bool:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize % 16 == 0


@functools.lru_cache(maxsize=4096)
def _compiled(
    function: Any,
    arguments: tuple[tuple[str, _Argument], ...],
    options: tuple[tuple[str, int], ...],
    architecture_name: str,
) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from triton_kernels.architectures import named

    architecture = named(architecture_name)
    order = {name: index for index, name in enumerate(function.arg_names)}
    ordered = sorted(arguments, key=lambda argument: order[argument[0]])
    leaves = [leaf for name, found in ordered for leaf in _leaves(found, (order[name],))]
    source = ASTSource(
        fn=function,
        signature={name: _signature(found) for name, found in ordered},
        constexprs={path: value for path, (kind, value, _) in leaves if kind == "constexpr"},
        attrs={path: [["tt.divisibility", 16]] for path, (*_, aligned) in leaves if aligned},
    )
    target = GPUTarget(architecture.backend, architecture.target, architecture.lanes)
    result = triton.compile(source, target=target, options=dict(options))
    if architecture.backend == "cuda":
        text, code = result.asm["ptx"], result.asm["cubin"]
        registers, spills = _of_cubin(code)
    else:
        text, code = result.asm["amdgcn"], result.asm["hsaco"]
        registers, spills = _of_amd(text)
    return Binary(
        architecture,
        text,
        str(result.asm["ttir"]),
        code,
        int(result.metadata.num_warps),
        registers,
        spills,
        int(result.metadata.shared),
    )


def _of_cubin(code: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, by NVIDIA's own tool that Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        command = [_cuobjdump(), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, local = re.search(r"REG:(\d+)", text), re.search(r"LOCAL:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    spilled = max(int(found[1]) if found else 0 for found in (local, stack))
    return int(registers[1]) if registers else 0, spilled


def _cuobjdump() -> str:
    from triton import knobs

    tool: Any = knobs.nvidia.cuobjdump
    return str(getattr(tool, "path", tool))


def _of_amd(text: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch) of a lane, from the notes in the assembly."""
    found: Mapping[str, int] = {
        name: int(value)
        for name, value in re.findall(
            r"\.(vgpr_count|agpr_count|private_segment_fixed_size):\s+(\d+)", text
        )
    }
    return found.get("vgpr_count", 0), found.get("private_segment_fixed_size", 0)
