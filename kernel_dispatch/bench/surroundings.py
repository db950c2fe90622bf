"""Where a run took place: machine, libraries, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from kernel_dispatch._version import __version__
from lowering import libraries
from lowering import machine as machines


def machine(threads: int | None) -> dict[str, Any]:
    cpu = machines.cpu()
    return {
        "cpu": cpu.model,
        "isa": sorted(cpu.isa),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": cpu.effective_cores,
        "threads": threads or torch.get_num_threads(),
        "memory_bytes": cpu.memory_bytes,
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel_dispatch": __version__,
        "libraries": {
            one.name: one.version for one in libraries.libraries() if one.available and one.version
        },
        "accelerators": _accelerators(),
    }


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def commit() -> dict[str, Any]:
    """Of this project's checkout; empty for an installed package."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "HEAD")
    if not (root / "pyproject.toml").is_file() or not head:
        return {}
    return {
        "id": head,
        "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "branch": _git(root, "rev-parse", "--abbrev-ref", "HEAD"),
        "time": _git(root, "log", "-1", "--format=%cI"),
    }


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
