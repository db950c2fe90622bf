"""Our C++ kernels as torch operators: built at first use (`building`), then loaded.

The library is built for the machine that runs it and kept in the folder that `keep_in` named, under
a name that changes with the sources, the compiler's command line, torch and the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lowering import cut_short, instruction_sets, machine, toolchain
from lowering.contract import Probe
from lowering.native import building

# (region, provider) in the order of counters.h
COUNTED = (
    ("linear", "openmp"),
    ("convolution", "openmp"),
    ("attention", "mha"),
    ("product", "openmp"),
    ("transposed_convolution", "openmp"),
    ("recurrent", "openmp"),
    ("random", "openmp"),
    ("batch_norm", "openmp"),
    ("softmax", "openmp"),
    ("group_norm", "openmp"),
    ("linear", "mkl"),
    ("training_convolution", "openmp"),
    ("weight_gradient", "openmp"),
    ("int8_linear", "openmp"),
    ("quantized_convolution", "openmp"),
    ("quantized_linear", "openmp"),
    ("grouped_linear", "openmp"),
    ("embedding_bag", "openmp"),
)

_COUNTS = struct.Struct(f"={len(COUNTED)}q")

_lock = threading.Lock()


class _Place:
    folder: Path | None = None
    failed: str = ""


def keep_in(folder: Path) -> None:
    """Where the built library is looked for and kept; until told, in torch's compile cache."""
    _Place.folder = folder


def has_place() -> bool:
    return _Place.folder is not None


@functools.cache
def probe() -> Probe:
    """Build (or find) and load the library; asked once per process."""
    compiler = toolchain.probe()
    if not compiler.available:
        return Probe.no(compiler.reason, compiler.fix)
    if sys.platform == "win32":
        return Probe.no("the kernels are written for GCC and Clang; there is no MSVC build")
    try:
        path = _load_or_build_anew()
    except Exception as error:  # noqa: BLE001  (whatever it is, there is another provider)
        _Place.failed = f"the C++ kernels could not be built or loaded: {_in_short(error)}"
        return Probe.no(_Place.failed)
    return Probe.yes(compiler.version, library=str(path))


def is_loaded() -> bool:
    """Without building it: are the operators there?"""
    return _Loaded.library is not None


def failure() -> str:
    """Why the kernels are missing on a machine that should have them; empty before `probe`."""
    return _Place.failed


def _in_short(error: Exception) -> str:
    """What the compiler said, without its command line of a thousand letters."""
    lines = str(error).partition("\nOutput:\n")[2] or str(error)
    return "\n".join(line[:300] for line in lines.strip().splitlines()[-8:])


def _load_or_build_anew() -> Path:
    """The path of what was loaded. A file that was damaged where it is kept is built once more."""
    path = built()
    try:
        if cut_short.is_cut_short(path):
            raise OSError(f"{path} has lost its end")
        _load(path)
    except OSError:
        if not _set_aside(path):
            raise
        path = built()
        _load(path)
    return path


def _set_aside(path: Path) -> bool:
    """Once for each name: what no build makes loadable must not be built by every process."""
    refused = Path(f"{path}.refused")
    if refused.exists():
        return False
    try:
        os.replace(path, refused)
    except OSError:  # a folder that cannot be written; the caller knows the better reason
        return False
    return True


def built() -> Path:
    """The library's path; builds it where it is not there yet."""
    from filelock import FileLock  # a dependency of torch

    folder = _Place.folder or _in_torchs_cache()
    folder.mkdir(parents=True, exist_ok=True)
    instruction_sets.ask(folder)
    target = folder / f"kernels_{fingerprint()}.so"
    if target.is_file():
        return target
    with FileLock(str(target) + ".lock"):
        if not target.is_file():  # another process may have been faster
            building.build(target)
    return target


def _in_torchs_cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "kernel_dispatch"


@functools.cache
def fingerprint() -> str:
    """Changes with everything that the binary depends on."""
    cpu = machine.cpu()
    facts = (torch.__version__, sys.version_info[:2], cpu.model, sorted(cpu.isa))
    digest = hashlib.sha256(repr(facts).encode())
    digest.update(building.options_text().encode())
    for source in building.files():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def compile_flags() -> list[str]:
    """What the C++ compiler is told, paths aside; the same for Inductor's code and for ours."""
    words = building.options_text().replace("-D ", "-D").split()
    return [word for word in words if word.startswith(_TELLING) and word != "-D"]


_TELLING = ("-O", "-f", "-m", "-std", "-D", "-shared")


# --- after loading: shapes for the compiler, and what Python reads from the library ---------------


class _Loaded:
    library: ctypes.CDLL | None = None
    with_python: ctypes.PyDLL | None = None  # the same, for what handles Python's objects


def _load(path: Path) -> None:
    with _lock:
        if _Loaded.library is not None:
            return
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        library.kernel_dispatch_counters.restype = ctypes.POINTER(ctypes.c_int64)
        library.kernel_dispatch_packed_bytes.restype = ctypes.c_int64
        library.kernel_dispatch_packed_count.restype = ctypes.c_int64
        library.kernel_dispatch_idle_bytes.restype = ctypes.c_int64
        library.kernel_dispatch_pool_depth.restype = ctypes.POINTER(ctypes.c_int64)
        library.kernel_dispatch_limit_memory.argtypes = (ctypes.c_int64,)
        library.kernel_dispatch_limit_memory.restype = ctypes.c_int64
        library.kernel_dispatch_keep_memory.argtypes = (ctypes.c_int64, ctypes.c_bool)
        library.kernel_dispatch_wake_threads.restype = ctypes.c_bool
        library.kernel_dispatch_multiplies_bfloat16.restype = ctypes.c_bool
        library.kernel_dispatch_multiplies_float16.restype = ctypes.c_bool
        library.kernel_dispatch_forget_watched.argtypes = (ctypes.c_int64,)
        with_python = ctypes.PyDLL(str(path))
        with_python.kernel_dispatch_pin_plan.argtypes = (ctypes.py_object,) * 3
        with_python.kernel_dispatch_pin_plan.restype = ctypes.py_object
        with_python.kernel_dispatch_straight.argtypes = (ctypes.py_object,) * 5
        with_python.kernel_dispatch_straight.restype = ctypes.py_object
        with_python.kernel_dispatch_straight_names.restype = ctypes.py_object
        _Loaded.with_python = with_python
        _call_straight()
        from lowering.native import shapes

        shapes.register()
        _Loaded.library = library


def _call_straight() -> None:
    """Has arguments of our operators read where a call has nothing special about it, instead of
    boxed. An operator's hash is that of the function it calls: nobody may have used it yet."""
    for name in straight_names():
        operator = getattr(torch.ops.kernel_dispatch, name).default
        operator._op = straight(operator, operator._op)


def straight_names() -> tuple[str, ...]:
    """The operators that are called so; () before loading."""
    names: tuple[str, ...] = ()
    if _Loaded.with_python is not None:
        names = _Loaded.with_python.kernel_dispatch_straight_names()
    return names


def straight(operator: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls one of them so, and leaves every call that is not plain to `function`."""
    assert _Loaded.with_python is not None
    name = operator._schema.name.rpartition("::")[2]
    arguments = operator._schema.arguments
    names = tuple(sys.intern(one.name) for one in arguments)
    defaults = tuple(one.default_value for one in arguments if one.has_default_value())
    positional = sum(not one.kwarg_only for one in arguments)
    made: Callable[..., Any] = _Loaded.with_python.kernel_dispatch_straight(
        name, function, names, defaults, positional
    )
    return made


def multiplies(dtype: torch.dtype) -> bool:
    """Do linear layers and convolutions of what was loaded multiply such halves as they are? That
    is AVX-512's products of bfloat16, and AMX's tiles of bfloat16 and of float16."""
    if _Loaded.library is None or dtype not in _HALVES:
        return False
    multiplied: bool = getattr(_Loaded.library, f"kernel_dispatch_multiplies_{_HALVES[dtype]}")()
    return multiplied


_HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _PerThread(threading.local):
    counts: memoryview | None = None
    pool_depth: ctypes.c_int64 | None = None


_per_thread = _PerThread()


def counts() -> tuple[int, ...]:
    """How often each of `COUNTED` ran on this thread, since it began; () before loading."""
    return _separate(snapshot()) if is_loaded() else ()


def snapshot() -> int:
    """All of them as one large number: calls of small graphs are short, and ask twice. What ran
    meanwhile is the difference; no part of it is below 0, so the others are not touched."""
    mine = _per_thread.counts
    if mine is None:
        if _Loaded.library is None:
            return 0
        pointer = _Loaded.library.kernel_dispatch_counters()
        array = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int64 * len(COUNTED))).contents
        _per_thread.counts = mine = memoryview(array).cast("B")
    return int.from_bytes(mine, sys.byteorder)


def _separate(counts: int) -> tuple[int, ...]:
    return _COUNTS.unpack(counts.to_bytes(_COUNTS.size, sys.byteorder))


def regions_of(ran: int) -> Iterator[tuple[tuple[str, str], int]]:
    """Region and provider, and how often, of what two snapshots differ by."""
    for counted, times in zip(COUNTED, _separate(ran), strict=True):
        if times:
            yield counted, times


def keep_memory(size: int, training: bool) -> None:
    """Keep up to `size` bytes of freed memory for later calls; in training, for backwards too.

    The largest size that was asked for holds.
    """
    if _Loaded.library is not None:
        _Loaded.library.kernel_dispatch_keep_memory(size, training)


def pool_depth() -> ctypes.c_int64:
    """While its value is above 0, big tensors that this thread makes come from kept memory."""
    mine = _per_thread.pool_depth
    if mine is None:
        if _Loaded.library is None:
            return ctypes.c_int64()
        mine = _Loaded.library.kernel_dispatch_pool_depth().contents
        _per_thread.pool_depth = mine
    return mine


@contextlib.contextmanager
def keeping_memory(size: int) -> Iterator[None]:
    """Inside, this thread makes big tensors as a compiled graph would, whatever was asked for."""
    if _Loaded.library is None:
        yield
        return
    limit_memory, depth = _Loaded.library.kernel_dispatch_limit_memory, pool_depth()
    before = limit_memory(size)
    depth.value += 1
    try:
        yield
    finally:
        depth.value -= 1
        limit_memory(before)


def waker() -> Callable[[], bool] | None:
    """What wakes OpenMP's threads of the calling thread if they may sleep, and says whether it did;
    None before loading."""
    return None if _Loaded.library is None else _Loaded.library.kernel_dispatch_wake_threads


Hold = Callable[[Mapping[str, Any]], bool]
MakePins = Callable[[Mapping[str, Any]], Hold | None]


def pin_plan(
    steps: list[tuple[int, Any, bool, type, int]], variables: Mapping[str, Any], others: list[str]
) -> MakePins | None:
    """Of native/pins.cpp: what pins objects as they are. Before loading, and with a Python that
    tells nothing of the changes of dictionaries, None."""
    if _Loaded.with_python is None:
        return None
    found: MakePins | None
    found = _Loaded.with_python.kernel_dispatch_pin_plan(steps, variables, others)
    return found


def idle_bytes() -> int:
    """Memory that is kept for later calls and that nobody uses now."""
    return _Loaded.library.kernel_dispatch_idle_bytes() if _Loaded.library is not None else 0


def forget() -> None:
    """Drop every packed weight and all idle memory; each is made again when it is needed."""
    if _Loaded.library is not None:
        _Loaded.library.kernel_dispatch_forget()


def forget_watched(number: int) -> None:
    """Of `torch.ops.kernel_dispatch.watch`."""
    if _Loaded.library is not None:
        _Loaded.library.kernel_dispatch_forget_watched(number)


def packed_bytes() -> int:
    """Memory that packed weights hold now."""
    return _Loaded.library.kernel_dispatch_packed_bytes() if _Loaded.library is not None else 0


def packed_count() -> int:
    """How often a weight was packed; for tests and reports."""
    return _Loaded.library.kernel_dispatch_packed_count() if _Loaded.library is not None else 0
