"""The CPU libraries that torch was built with, and whether its thread count fits the cores.

Everything is read on demand and nothing is changed: no thread count, no environment variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowering import machine

_ONEDNN = r"MKL-DNN v(\S+)"  # torch still uses its old name
_MKL = r"Math Kernel Library Version ([\d.]+)"


@dataclass(frozen=True)
class Library:
    """A CPU library that torch was built with (or not)."""

    name: str
    version: str
    detail: str
    available: bool = True


def libraries() -> tuple[Library, ...]:
    """The CPU libraries that this torch was built with, and the ISA that its own kernels use."""
    shown, parallel = torch.__config__.show(), torch.__config__.parallel_info()
    text = f"{shown}\n{parallel}"
    backends: Any = torch.backends
    return (
        Library("torch", torch.__version__, f"CPU kernels: {backends.cpu.get_cpu_capability()}"),
        _library("MKL", backends.mkl, text, _MKL, _setting("BLAS")),
        _library("oneDNN", backends.mkldnn, text, _ONEDNN, "torch.backends.mkldnn"),
        _library(
            "OpenMP",
            backends.openmp,
            text,
            r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)",
            f"ATen parallel backend: {_found(r'ATen parallel backend: (.+)', parallel)}",
        ),
        _library("NNPACK", backends.nnpack, text, "", "float32 convolutions"),
    )


def onednn_version() -> str:
    """The version of oneDNN in this torch; empty where torch does not tell."""
    return _found(_ONEDNN, torch.__config__.show())


def mkl_version() -> str:
    """The version of MKL in this torch; empty where torch does not tell."""
    return _found(_MKL, torch.__config__.show())


def _library(name: str, backend: Any, text: str, pattern: str, detail: str) -> Library:
    if not backend.is_available():
        return Library(name, "", "not in this build of torch", available=False)
    return Library(name, _found(pattern, text) if pattern else "", detail)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""


def _setting(name: str) -> str:
    value = _found(rf"{name}_INFO=(\w+)", torch.__config__.show())
    return f"{name} of this build: {value}" if value else ""


def thread_advice(
    threads: int | None = None,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """One sentence when torch's thread count does not fit the cores that we may use, else empty."""
    threads = torch.get_num_threads() if threads is None else threads
    cores = machine.cpu().effective_cores if cores is None else cores
    ranks = _ranks(environ)
    share = max(1, cores // ranks)
    each = f" for each of {ranks} local ranks" if ranks > 1 else ""
    todo = f'pass options={{"threads": {share}}}, or set OMP_NUM_THREADS={share} before starting'
    if threads > share:
        return (
            f"torch uses {threads} threads and this process may use {share} core(s){each}: "
            f"oversubscribed threads wait for each other; {todo}."
        )
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if threads == 1 and share > 1 and environ.get(name, "").strip() == "1":
            return (
                f"{name}=1, often left over from a container image, holds torch to one thread "
                f"while this process may use {share} cores{each}; {todo}."
            )
    return ""


def _ranks(environ: Mapping[str, str]) -> int:
    """Ranks on this machine: torchrun sets OMP_NUM_THREADS=1 on purpose where they share cores."""
    value = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdigit() else 1
