"""The text of a family's shader as callable kernels, for the dtypes of one call.

On a Mac `torch.mps.compile_shader` compiles it. `compiled_by` puts another compiler in its place,
which may run the same text on any device: launchers know nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CompileShader = Callable[[str], Any]

# torch's dtype -> Metal's type. There is no float64, and no complex number.
TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.bool: "bool",
}
_injected: list[CompileShader] = []


@contextlib.contextmanager
def compiled_by(compile_shader: CompileShader) -> Iterator[None]:
    """Kernels are compiled by this function meanwhile, and launched whatever the device is."""
    _injected.append(compile_shader)
    try:
        yield
    finally:
        _injected.pop()


def launches_on(device: torch.device) -> bool:
    return device.type == "mps" or bool(_injected)


def library(family: str, **types: torch.dtype | str) -> Any:
    """The kernels of a family as attributes: `library("rope", NUMBER=torch.float16).rope(...)`.

    Each keyword is a name that the shader leaves open: a type, or a word that says which variant.
    """
    words = {name: word if isinstance(word, str) else TYPES[word] for name, word in types.items()}
    compiler = _injected[-1] if _injected else _by_torch
    return _compiled(compiler, family, tuple(sorted(words.items())))


@functools.cache
def _compiled(compiler: CompileShader, family: str, words: tuple[tuple[str, str], ...]) -> Any:
    return compiler(source(family, words))


def source(family: str, words: tuple[tuple[str, str], ...] = ()) -> str:
    """The shader as its compiler gets it."""
    text = (Path(__file__).parent / f"{family}.metal").read_text()
    return "".join(f"#define {name} {word}\n" for name, word in words) + text


def _by_torch(text: str) -> Any:
    return torch.mps.compile_shader(text)
