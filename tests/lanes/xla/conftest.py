"""Forced onto XLA's device from the CPU, unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def forced_onto_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("UNIFIED_DEVICE", "xla")
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
