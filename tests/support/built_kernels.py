"""`python -m tests.support.built_kernels [CACHE]`: the C++ kernels, where tests look for them.

Workers that start together on a fresh machine would each build them for themselves, and so would
every process that a test starts in the meantime. Without a compiler there is nothing to do.

The same goes for Inductor's question whether the compiler has the instruction sets that the CPU
names: with an empty cache each process would compile some files for it, which takes half of the
time of a small test. It is asked here, and where every answer was yes, tests need not ask again.

CACHE is pytest's `cache_dir` of the run that follows; another torch has one of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lowering import machine
from lowering.native import library

CACHE = Path(__file__).parents[2] / ".pytest_cache"

# The variable by which Inductor believes that the compiler has what the CPU names.
BELIEVED = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}


def store_in(cache: Path) -> Path:
    """Where pytest's `cache.mkdir` puts what `kernels_of_earlier_runs` names."""
    return cache / "d" / "kernels"


def build(store: Path) -> str:
    library.keep_in(store)
    found = library.probe()
    return f"kernels: {found.details.get('library', found.reason)}"


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
