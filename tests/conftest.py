"""Every test starts from a fresh Dynamo, a fixed seed and the environment as it was."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True, scope="session")
def never_calibrated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test times the machine by surprise, and none sees the profile that a developer keeps."""
    os.environ.update(_uncalibrated(tmp_path_factory.mktemp("profiles")))


def _uncalibrated(folder: Path) -> dict[str, str]:
    return {"UNIFIED_CALIBRATION": "off", "UNIFIED_CACHE_DIR": str(folder)}


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    environment = dict(os.environ)
    random.seed(0)
    torch.manual_seed(0)
    _forget_compiled_graphs()
    yield
    _forget_compiled_graphs()
    os.environ.clear()
    os.environ.update(environment)


def _forget_compiled_graphs() -> None:
    """Only where something was compiled: the quick tests do not pay for importing the compiler."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "kernel_dispatch.backend" in sys.modules:
        sys.modules["kernel_dispatch.backend"].reset()


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's cache for all second processes of one test run: the header is compiled once."""
    return tmp_path_factory.mktemp("inductor-cache")


@pytest.fixture(scope="session")
def native_library() -> Path | None:
    """The built C++ kernels, so that a second process with an empty cache need not build them."""
    from lowering.native import library

    try:
        return library.built()
    except Exception:  # noqa: BLE001  (without a compiler there is nothing to share)
        return None


def share_library(built: Path | None, cache: Path) -> None:
    """Make `built` what a process with this cache folder finds there."""
    if built is not None:
        link = cache / built.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(built)


@pytest.fixture
def python(tmp_path: Path, shared_cache: Path, native_library: Path | None) -> Python:
    """Run a script in a process of its own, in an empty folder, without UNIFIED_* variables except
    those of `never_calibrated`. Its cache has the C++ kernels, unless `kernels=False`."""

    def run(
        script: str,
        *,
        check: bool = True,
        timeout: float = 180,
        kernels: bool = True,
        **env: str | None,
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("UNIFIED_", "TORCH"))}
        clean["TORCHINDUCTOR_CACHE_DIR"] = str(shared_cache)
        clean |= _uncalibrated(tmp_path / "profiles")
        for name, value in env.items():
            if value is None:
                clean.pop(name, None)
            else:
                clean[name] = value
        if kernels:
            share_library(native_library, Path(clean["UNIFIED_CACHE_DIR"]))
        file = tmp_path / "script.py"
        file.write_text(script)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
        return done

    return run
