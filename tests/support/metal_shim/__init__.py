"""Metal shaders on this machine's CPU, called as `torch.mps.compile_shader` has them called.

    library = compile_shader(text)
    library.kernel(tensor, 3, 0.5, [1, 2], threads=[64, 2], group_size=[32, 1])

Arguments go as torch passes them: a tensor as the address of its first number, an int as 64 bits, a
float as 32, a sequence as numbers side by side. What torch or Metal refuses is refused; what they
would misread (a float for a long, a tensor of another dtype) is an error here as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.metal_shim.translate import ShaderError, Signature, cpp, signatures

_HERE = Path(__file__).parent
_FLAGS = (
    *("-std=c++14", "-O1", "-shared", "-fPIC", "-fsingle-precision-constant"),
    *("-Wall", "-Wextra", "-Werror", "-Wdouble-promotion", "-Wno-attributes"),
    *("-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-sign-compare"),
)
ORDERS = ("forward", "backward", "shuffled")
_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat": torch.bfloat16,
    "bool": torch.bool,
    "char4": torch.int8,
}
launched: list[str] = []  # the kernels that ran, for tests
_order = [0]


@contextlib.contextmanager
def threads_run(order: str) -> Iterator[None]:
    """In which order the threads of a threadgroup take their turns meanwhile."""
    _order.append(ORDERS.index(order))
    try:
        yield
    finally:
        _order.pop()


def compile_shader(source: str) -> Library:
    return Library(source)


class Library:
    """Kernels as attributes."""

    def __init__(self, source: str) -> None:
        self._signatures = signatures(source)
        self._library = ctypes.CDLL(str(_built(cpp(source, "shader.metal"))))

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._signatures:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        return Kernel(self._signatures[name], getattr(self._library, f"launch_{name}"))

    def __dir__(self) -> list[str]:
        return sorted(self._signatures)


class Kernel:
    def __init__(self, signature: Signature, function: Any) -> None:
        self._signature = signature
        self._function = function
        self._function.restype = ctypes.c_char_p

    @property
    def max_threads_per_threadgroup(self) -> int:
        return self._signature.most_threads

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: Any = None,
    ) -> None:
        if arg_casts is not None:
            raise NotImplementedError("no kernel of this project casts its arguments")
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if threads is None and first is not None:
            threads = first.numel()
        grid, size = self._sizes(threads, group_size)
        keep, given = self._arguments(args)
        fault = self._function(given, _sizes_of(grid), _sizes_of(size), _order[-1])
        del keep
        if fault:
            raise ShaderError(f"{self._signature.name}: {fault.decode()}")
        launched.append(self._signature.name)

    def _sizes(self, threads: Any, group_size: Any) -> tuple[list[int], list[int]]:
        if threads is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        grid = [threads] if isinstance(threads, int) else list(threads)
        most = self._signature.most_threads
        default = [min(grid[0], most), *[1] * (len(grid) - 1)]
        size = [group_size] if isinstance(group_size, int) else list(group_size or default)
        if not 0 < len(grid) < 4 or len(grid) != len(size):
            raise RuntimeError(f"threads and group_size have one to three numbers: {grid}, {size}")
        if any(not isinstance(one, int) or one < 1 for one in (*grid, *size)):
            raise ShaderError(f"threads and group_size are positive: {grid}, {size}")
        count = size[0] * (size[1] if len(size) > 1 else 1) * (size[2] if len(size) > 2 else 1)
        if count > most:
            raise ValueError(f"Threadgroup size exceeds {most} limit")
        rest = [1] * (3 - len(grid))
        return grid + rest, size + rest

    def _arguments(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        name, wanted = self._signature.name, self._signature.given
        if len(args) != len(wanted):
            raise ShaderError(f"{name} has {len(wanted)} buffers, not {len(args)}")
        if len(args) > 31:
            raise ShaderError(f"{name}: Metal has 31 buffers")
        keep: list[Any] = []
        addresses = (ctypes.c_void_p * (3 * len(args)))()
        for index, (arg, parameter) in enumerate(zip(args, wanted, strict=True)):
            where = f"{name}: argument {index} ({parameter.name})"
            if isinstance(arg, torch.Tensor):
                _demand(parameter.kind == "buffer", f"{where} is a {parameter.kind}, not a tensor")
                _demand_dtype(where, arg, parameter.type)
                if parameter.written and arg.is_floating_point():
                    arg.untyped_storage().copy_(_garbage(arg))
                storage = arg.untyped_storage()
                begin = storage.data_ptr()
                address = (arg.data_ptr(), begin, begin + storage.nbytes())
            else:
                memory = _memory(arg, where, parameter.kind, parameter.type)
                keep.append(memory)
                begin = ctypes.addressof(memory)
                address = (begin, begin, begin + ctypes.sizeof(memory))
            addresses[3 * index : 3 * index + 3] = address
        return keep, addresses


def _garbage(tensor: torch.Tensor) -> Any:
    """NaN in all of its storage: what a kernel does not write shows."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.full((count,), float("nan"), dtype=tensor.dtype).untyped_storage()


def _memory(arg: Any, where: str, kind: str, type_: str) -> Any:
    many = isinstance(arg, (tuple, list))
    values = list(arg) if many else [arg]
    if not values:
        raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
    if all(isinstance(value, int) for value in values):
        found, element = "long", ctypes.c_int64
    elif all(isinstance(value, float) for value in values):
        found, element = "float", ctypes.c_float
    else:
        raise RuntimeError(f"Unsupported argument type ({where}: {arg!r})")
    _demand(kind == ("values" if many else "value"), f"{where} is a {kind}, not {arg!r}")
    _demand(type_ == found, f"{where} is read as {type_}, and torch passes {arg!r} as {found}")
    return (element * len(values))(*values)


def _demand_dtype(where: str, tensor: torch.Tensor, type_: str) -> None:
    wanted = _DTYPES.get(type_)
    _demand(tensor.dtype is wanted, f"{where} is read as {type_}, not as {tensor.dtype}")


def _demand(holds: bool, text: str) -> None:
    if not holds:
        raise ShaderError(text)


def _sizes_of(sizes: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * 3)(*sizes)


_KEPT = 300  # built shaders; a run of the tests builds some 150
_kept_in: list[Path] = []


def keep_in(folder: Path) -> None:
    """Where built shaders are looked for, by all that they are made of; else they are temporary."""
    _kept_in[:] = [folder]
    for old in sorted(folder.glob("*.so"), key=lambda file: -file.stat().st_mtime)[_KEPT:]:
        old.unlink(missing_ok=True)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="metal_shim_")  # removed when Python ends


@functools.cache
def _built(text: str) -> Path:
    """A shared library of this C++."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler, standard = get_cpp_compiler(), (_HERE / "metal_stdlib").read_text()
    name = hashlib.sha256(repr((text, standard, compiler, _FLAGS)).encode()).hexdigest()[:24]
    output = (_kept_in[0] if _kept_in else Path(_temporary().name)) / f"{name}.so"
    if output.exists():
        return output
    half = output.with_suffix(f".{os.getpid()}")
    command = [compiler, *_FLAGS, f"-I{_HERE}", "-x", "c++", "-", "-o", str(half)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SyntaxError(f"the shader does not compile:\n{done.stderr[:4000]}")
    half.replace(output)  # in one step: others may be reading
    return output
