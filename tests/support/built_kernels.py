"""`python -m tests.support.built_kernels`: the C++ kernels, built where tests look for them.

Workers that start together on a fresh machine would each build them for themselves, and so would
every process that a test starts in the meantime. Without a compiler there is nothing to do.

The same goes for Inductor's question whether the compiler has the instruction sets that the CPU
names: with an empty cache each process would compile some files for it, which takes half of the
time of a small test. It is asked here, and where every answer was yes, tests need not ask again.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lowering import machine
from lowering.native import library

# Where pytest's `cache.mkdir` puts what `kernels_of_earlier_runs` names.
STORE = Path(__file__).parents[2] / ".pytest_cache" / "d" / "kernels"


# What says so, for this torch on this CPU, and the variable by which Inductor believes it.
ANSWER = STORE.parent / "instruction_sets"
BELIEVED = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}


def build() -> str:
    library.keep_in(STORE)
    found = library.probe()
    return f"kernels: {found.details.get('library', found.reason)}"


def ask_for_instruction_sets() -> str:
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with config.patch({"cpp.vec_isa_ok": None}):
        there = [str(one) for one in valid_vec_isa_list()]
    with config.patch({"cpp.vec_isa_ok": True}):
        named = [str(one) for one in valid_vec_isa_list()]
    ANSWER.unlink(missing_ok=True)
    if there == named:
        ANSWER.write_text(_here())
    return f"instruction sets: {', '.join(there)}" + ("" if there == named else f" of {named}")


def believed() -> dict[str, str]:
    """Variables for processes that are not to ask again; none where it was not asked here."""
    asked = ANSWER.read_text() if ANSWER.is_file() else ""
    return BELIEVED if asked == _here() else {}


def _here() -> str:
    return f"{torch.__version__} on {machine.cpu().model}"


if __name__ == "__main__":
    print(build())
    print(ask_for_instruction_sets())
