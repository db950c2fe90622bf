"""Files that have lost their end, as a full disk, a power failure or a killed process leaves them.

Inductor takes whatever lies in its cache under the right name: half a library kills the process,
half a source fails in every process from then on. Here such files are removed before Inductor
looks, and made anew.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowering.replacing import replaced

_ELF_OF_64_BITS = b"\x7fELF\x02"
_LITTLE_ENDIAN = b"\x01"


def is_cut_short(path: Path) -> bool:
    """Empty, or an ELF file (a library, an object) shorter than its header says."""
    with path.open("rb") as file:
        header = file.read(64)
    if not header.startswith(_ELF_OF_64_BITS):  # anything else its reader refuses by itself
        return not header
    order = "<" if header[5:6] == _LITTLE_ENDIAN else ">"
    try:
        (sections,) = struct.unpack_from(order + "Q", header, 0x28)
        size, count = struct.unpack_from(order + "HH", header, 0x3A)
    except struct.error:
        return True
    return bool(path.stat().st_size < sections + size * count)


@contextlib.contextmanager
def made_anew() -> Iterator[None]:
    """For the time in which Inductor looks into its cache and writes what it lacks there."""
    from torch._inductor import codecache, output_code

    graph = output_code.CompiledFxGraph
    with (
        replaced(codecache, "write", _writing),
        replaced(graph, "write_to_disk", _writing_a_graph),
        replaced(codecache, "_worker_compile_cpp", _building),
    ):
        yield


def _writing(write: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    def write_whole(content: str | bytes, *args: Any, **kwargs: Any) -> tuple[str, str]:
        name, path = write(content, *args, **kwargs)
        if _remove_shorter(Path(path), content):
            name, path = write(content, *args, **kwargs)
        return name, path

    return write_whole


def _writing_a_graph(write_to_disk: Callable[[Any], str]) -> Callable[[Any], str]:
    def write_whole(graph: Any) -> str:
        path = write_to_disk(graph)
        return write_to_disk(graph) if _remove_shorter(Path(path), graph.source_code) else path

    return write_whole


def _building(build: Callable[..., None]) -> Callable[..., None]:
    def build_what_is_not_whole(lock: str, builders: Sequence[Any]) -> None:
        _remove([Path(builder.get_target_file_path()) for builder in builders], lock)
        build(lock, builders)

    return build_what_is_not_whole


def _remove_shorter(path: Path, content: str | bytes) -> bool:
    size = len(content.encode() if isinstance(content, str) else content)
    with contextlib.suppress(OSError):
        if path.stat().st_size < size:
            path.unlink()
            return True
    return False


def _remove(files: Sequence[Path], lock: str) -> None:
    from filelock import FileLock  # a dependency of torch

    def damaged() -> list[Path]:
        return [file for file in files if file.is_file() and is_cut_short(file)]

    with contextlib.suppress(OSError):  # what cannot be read or removed, Inductor tells of
        if damaged():
            with FileLock(lock):  # whoever holds it may be writing one of them right now
                for file in damaged():
                    file.unlink(missing_ok=True)
