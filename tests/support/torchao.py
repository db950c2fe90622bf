"""torchao, from where the Makefile puts it; made for the torch of this version only."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of its modules, for one test; skips the test where there is none."""
    folder = Path(sys.prefix) / "torchao"
    if not folder.is_dir():
        pytest.skip(f"no torchao in {folder}")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("it is made for torch 2.13")
    monkeypatch.syspath_prepend(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torchao.{name}")
