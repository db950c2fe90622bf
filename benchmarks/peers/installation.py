"""Is a peer here, in which version, and in which interpreter? Asks metadata; imports no peer."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
_REQUIREMENTS = "benchmarks/peers"


def installed(distribution: str) -> str:
    """Its version; empty if it is not installed in this interpreter."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def absent(*distributions: str) -> str:
    """Which of these are missing here, and how to get them."""
    missing = [name for name in distributions if not installed(name)]
    if not missing:
        return ""
    return f"needs {', '.join(missing)}: pip install -r {_REQUIREMENTS}/requirements.txt"


def versions(*distributions: str) -> str:
    return ", ".join(f"{name} {installed(name)}" for name in distributions)


class OwnInterpreter:
    """For a peer that exists for one torch only: a virtual environment beside the usual one."""

    def __init__(self, name: str, distribution: str, torch_minor: str) -> None:
        self.variable = f"KERNEL_DISPATCH_PYTHON_{name.upper()}"
        self.folder = f".venv-{name}"
        self.requirements = f"{_REQUIREMENTS}/requirements-{name}.txt"
        self.distribution = distribution
        self.torch_minor = torch_minor

    def python(self) -> str:
        """Its interpreter; empty, which stands for the running one, if there is none."""
        chosen = Path(os.environ.get(self.variable) or CHECKOUT / self.folder / "bin" / "python")
        return str(chosen) if os.access(chosen, os.X_OK) and not chosen.is_dir() else ""

    def missing(self) -> str:
        """Why this interpreter is not the one; empty if it is, or if there is another one."""
        chosen, own = os.environ.get(self.variable, ""), self.python()
        if chosen and not own:
            return f"{self.variable}={chosen} is no interpreter; unset it or {self._install()}"
        if own and os.path.abspath(own) != sys.executable:
            return ""  # the worker that runs there asks again
        if not installed(self.distribution):
            return f"needs {self.distribution} in an interpreter of its own: {self._install()}"
        found = installed("torch")
        if not found.startswith(f"{self.torch_minor}."):
            return (
                f"{self.distribution} needs torch {self.torch_minor}, and {sys.executable} has "
                f"{found}: {self._install()}"
            )
        return ""

    def _install(self) -> str:
        return (
            f"python3 -m venv {self.folder} && {self.folder}/bin/pip install -r {self.requirements}"
        )
