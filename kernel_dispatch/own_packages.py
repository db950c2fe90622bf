"""Is what Python finds as `lowering` and `triton_kernels` ours, and not a file beside a script?"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# What only ours hold. Where it lies proves nothing: a copy of ours that comes first is meant to.
_HOLDS = {"lowering": "region_pass.py", "triton_kernels": "families"}


def demand() -> None:
    """Raise an ImportError that names what hides one of our packages."""
    for name, holds in _HOLDS.items():
        found = _place(name)
        if found is None or (found / holds).exists():
            continue
        raise ImportError(
            f"kernel_dispatch needs its own package `{name}`, and Python finds {found} first. "
            f"Rename that, or take its folder off sys.path (a script's own folder comes first "
            f"there).",
            name=name,
            path=str(found),
        )


def _place(name: str) -> Path | None:
    """The folder of a package, the file of a module; None where Python does not tell."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        loaded = spec.origin if spec is not None else None
    if loaded is None:
        return None
    file = Path(loaded)
    return file.parent if file.name == "__init__.py" else file
