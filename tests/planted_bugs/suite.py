"""A family's tests, run over a copy of the package, in a process of their own.

Each process is forked from one that has imported what all of them need and nothing of ours: a
process that imports torch by itself takes most of its time for that.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

TESTS = "tests/kernels/triton"
_ROOT = Path(__file__).parents[2]
_LONGEST = 300  # seconds
_NEEDED = ["torch._dynamo", "triton", "triton.language", "numpy", "pytest"]


def run(copy: Path, family: str) -> tuple[int | None, str]:
    """pytest's exit status over the package in this folder, None if it took too long; its text."""
    said = copy / "said"
    process = _forks().Process(target=_run, args=(copy, family, said))
    process.start()
    process.join(_LONGEST)
    status = process.exitcode
    process.kill()
    return status, said.read_text() if said.exists() else ""


@functools.cache
def _forks() -> ForkServerContext:
    """Started with the variable set, for Triton reads it when it is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_NEEDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process = context.Process(target=os.getpid)
        process.start()
        process.join()
    return context


def _run(copy: Path, family: str, said: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.chdir(_ROOT)
    # The copy comes first, so that it is the one that the tests find.
    sys.path.insert(0, str(copy))
    with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import triton_kernels

        assert str(triton_kernels.__file__).startswith(str(copy))
        cache = f"cache_dir={copy}/cache"  # the fixtures of all tests need one
        status = pytest.main(["-x", "-q", "-o", cache, "--no-header", f"{TESTS}/test_{family}.py"])
    sys.exit(int(status))
