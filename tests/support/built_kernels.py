"""`python -m tests.support.built_kernels [CACHE]`: the C++ kernels, where tests look for them.

Workers that start together on a fresh machine would each build them for themselves, and so would
every process that a test starts in the meantime. Without a compiler there is nothing to do. What
`make demo` built into the user's cache is taken from there: its name says what it was built from.

The same goes for Inductor's question whether the compiler has the instruction sets that the CPU
names: with an empty cache each process would compile some files for it, which takes half of the
time of a small test. It is asked here, and where every answer was yes, tests need not ask again.

CACHE is pytest's `cache_dir` of the run that follows; another torch has one of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch

from kernel_dispatch.settings import default_cache_folder
from lowering import machine, toolchain
from lowering.native import library

CACHE = Path(__file__).parents[2] / ".pytest_cache"

# The variable by which Inductor believes that the compiler has what the CPU names.
BELIEVED = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}


def store_in(cache: Path) -> Path:
    """Where pytest's `cache.mkdir` puts what `kernels_of_earlier_runs` names."""
    return cache / "d" / "kernels"


def build(store: Path) -> str:
    library.keep_in(store)
    _take_from(default_cache_folder(), store)
    found = library.probe()
    return f"kernels: {found.details.get('library', found.reason)}"


def _take_from(folder: Path, store: Path) -> None:
    if not toolchain.probe().available:
        return
    built = folder / f"kernels_{library.fingerprint()}.so"
    if built.is_file():
        keep(built, store)


def keep(built: Path, store: Path) -> None:
    """In one step, for others may be reading; what the store has by this name is the same."""
    if not (store / built.name).exists():
        store.mkdir(parents=True, exist_ok=True)
        half = store / f"{built.name}.{os.getpid()}"
        shutil.copy(built, half)
        half.replace(store / built.name)


def ask_for_instruction_sets(store: Path) -> str:
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with config.patch({"cpp.vec_isa_ok": None}):
        there = [str(one) for one in valid_vec_isa_list()]
    with config.patch({"cpp.vec_isa_ok": True}):
        named = [str(one) for one in valid_vec_isa_list()]
    _answer(store).unlink(missing_ok=True)
    if there == named:
        _answer(store).write_text(_here())
    return f"instruction sets: {', '.join(there)}" + ("" if there == named else f" of {named}")


def believed(store: Path) -> dict[str, str]:
    """Variables for processes that are not to ask again; none where it was not asked here."""
    answer = _answer(store)
    asked = answer.read_text() if answer.is_file() else ""
    return BELIEVED if asked == _here() else {}


def _answer(store: Path) -> Path:
    """What says, beside the kernels, which torch on which CPU was asked."""
    return store.parent / "instruction_sets"


def _here() -> str:
    return f"{torch.__version__} on {machine.cpu().model}"


if __name__ == "__main__":
    here = store_in(Path(sys.argv[1]) if sys.argv[1:] else CACHE)
    print(build(here))
    print(ask_for_instruction_sets(here))
