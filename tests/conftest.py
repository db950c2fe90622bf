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

from tests.support.built_kernels import believed, keep
from tests.support.tiers import leave_to_the_wide_tier

Python = Callable[..., subprocess.CompletedProcess[str]]
KERNELS = "kernels_*.so"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_the_wide_tier(items)


@pytest.fixture(autouse=True, scope="session")
def never_calibrated(
    tmp_path_factory: pytest.TempPathFactory, kernels_of_earlier_runs: Path
) -> Iterator[None]:
    """No test times the machine by surprise, and none sees the profile that a developer keeps."""
    folder = tmp_path_factory.mktemp("profiles")
    lend_kernels(kernels_of_earlier_runs, folder)
    os.environ.update(_uncalibrated(folder, kernels_of_earlier_runs))
    yield
    keep_kernels(kernels_of_earlier_runs, folder)


def _uncalibrated(folder: Path, kernels: Path) -> dict[str, str]:
    return {"UNIFIED_CALIBRATION": "off", "UNIFIED_CACHE_DIR": str(folder), **believed(kernels)}


@pytest.fixture(scope="session")
def kernels_of_earlier_runs(pytestconfig: pytest.Config) -> Path:
    """C++ kernels that tests have built, by a name that changes with all that they depend on."""
    return pytestconfig.cache.mkdir("kernels")


def lend_kernels(store: Path, folder: Path) -> None:
    """A process that keeps its cache in this folder finds there what the store has."""
    folder.mkdir(parents=True, exist_ok=True)
    for built in store.glob(KERNELS):
        link = folder / built.name
        if not link.exists():
            link.symlink_to(built)


def keep_kernels(store: Path, folder: Path) -> None:
    """What was built in this folder is there for the next process, and for the next run."""
    for built in folder.glob(KERNELS):
        if not built.is_symlink():
            keep(built, store)
    for old in sorted(store.glob(KERNELS), key=lambda file: -file.stat().st_mtime)[5:]:
        old.unlink(missing_ok=True)


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
    if "kernel_dispatch.pipeline" in sys.modules:
        sys.modules["kernel_dispatch.pipeline"].forget()


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's cache for all second processes of one test run: the header is compiled once."""
    return tmp_path_factory.mktemp("inductor-cache")


@pytest.fixture
def python(tmp_path: Path, shared_cache: Path, kernels_of_earlier_runs: Path) -> Python:
    """Run a script in a process of its own, in an empty folder, without UNIFIED_* variables except
    those of `never_calibrated`. It finds the C++ kernels built, unless `kernels=False`."""

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
        clean |= _uncalibrated(tmp_path / "profiles", kernels_of_earlier_runs)
        for name, value in env.items():
            if value is None:
                clean.pop(name, None)
            else:
                clean[name] = value
        file = tmp_path / "script.py"
        file.write_text(script)
        folder = Path(clean["UNIFIED_CACHE_DIR"])
        if kernels:
            keep_kernels(kernels_of_earlier_runs, Path(os.environ["UNIFIED_CACHE_DIR"]))
            lend_kernels(kernels_of_earlier_runs, folder)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if kernels:
            keep_kernels(kernels_of_earlier_runs, folder)
        if check:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
        return done

    return run
