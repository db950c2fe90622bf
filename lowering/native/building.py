"""How the C++ kernels are built: a file each, side by side, with torch's own builder.

Half of the time went into reading torch's headers, the same ones in most files. They are read once,
into a precompiled header, while the files that would gain little are compiled already.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lowering import machine

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SHARED = "shared_headers.h"
# Begun first, without the shared headers: they read others that take longer, or none of torch's.
_APART = ("from_python", "pins", "tiles")


def files() -> list[Path]:
    """All that the library is made of."""
    return sorted(_FOLDER.glob("*.h")) + _sources()


def options_text() -> str:
    return str(_linker(_sources(), "").get_command_line())


def build(target: Path) -> None:
    # On the same file system, so that the finished file moves into its place in one step. Who
    # holds the lock builds alone: what else has this name was left by a process that was killed.
    name = f"build_{target.stem}_"
    for left in target.parent.glob(f"{name}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = tempfile.mkdtemp(prefix=name, dir=target.parent)
    try:
        linker = _linker(_compiled(work), work)
        linker.build()
        os.replace(linker.get_target_file_path(), target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compiled(folder: str) -> list[Path]:
    """The objects of all sources."""
    with ThreadPoolExecutor(min(len(_sources()), machine.cpu().effective_cores)) as pool:
        header = pool.submit(_precompiled, folder)
        first = sorted(_sources(), key=lambda source: source.stem not in _APART)
        # The first that fails ends it: those that were not begun are not.
        return list(pool.map(lambda source: _compile(source, folder, header), first))


def _compile(source: Path, folder: str, header: Future[str | None]) -> Path:
    shared = None if source.stem in _APART else header.result()
    step = _compiler(source, folder, shared)
    step.build()
    return Path(step.get_target_file_path())


def _precompiled(folder: str) -> str | None:
    """The header, beside what was made of it; None where it can't be made."""
    header = shutil.copy(_FOLDER / _SHARED, folder)
    try:
        _builder(_SHARED, [Path(header)], folder, precompiling=True).build()
    except Exception:  # a full disk, an older torch: then each file reads them
        log.info("the headers of the C++ kernels are not precompiled", exc_info=True)
        for left in Path(folder).glob(f"{_SHARED}.*"):
            left.unlink(missing_ok=True)
        return None
    return str(header)


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.cpp"))


def _compiler(source: Path, folder: str, header: str | None = None) -> Any:
    return _builder(source.stem, [source], folder, header=header, compile_only=True)


def _linker(parts: Sequence[Path], folder: str) -> Any:
    return _builder("kernels", parts, folder)


def _builder(
    name: str, parts: Sequence[Path], folder: str, *, header: str | None = None, **kind: Any
) -> Any:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False, **kind)
    if header is not None:
        options.precompiled_header = header
    return CppBuilder(name, [str(part) for part in parts], options, output_dir=folder)
