"""The instruction sets that Inductor may generate code for: asked of the compiler once per machine.

Inductor asks in every process. For each set that the CPU names it has a child process load a small
library, a second in all before the first graph runs. What it was told depends on torch, the
compiler and the CPU only, and is kept here; what was refused is asked again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowering import machine, toolchain
from lowering.replacing import replaced


def ask(folder: Path) -> None:
    """Have Inductor know, by what earlier processes were told or else by the compiler."""
    from torch._inductor import cpu_vec_isa

    file = folder / f"instruction_sets_{_here()}.json"
    known = _read(file)
    told = set(known)

    def making(original: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
        def check_build(self: Any, code: str) -> bool:
            question = _digest(self.build_arch_flags(), code)
            if question not in told and original(self, code):
                told.add(question)
            return question in told

        return check_build

    with replaced(cpu_vec_isa.VecISA, "check_build", making):
        cpu_vec_isa.valid_vec_isa_list()  # which it remembers for as long as the process lives
    if told != known:
        _write(file, sorted(told))


@functools.cache
def _here() -> str:
    cpu = machine.cpu()
    compiler = toolchain.probe()
    facts = (torch.__version__, compiler.version, compiler.details.get("compiler"), cpu.model)
    return _digest(*facts, *sorted(cpu.isa))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _read(file: Path) -> set[str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return set(found) if isinstance(found, list) else set()
    except (OSError, ValueError, TypeError):  # not there, or damaged: it is asked and written anew
        return set()


def _write(file: Path, told: list[str]) -> None:
    """Beside it first: a reader sees the old file or the new one. Where it cannot be written, the
    next process asks again."""
    draft = file.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        draft.write_text(json.dumps(told), encoding="utf-8")
        draft.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
