"""Torch's functions are torch's own again, whoever of several threads is the last to compile."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from lowering.replacing import replaced

pytestmark = pytest.mark.quick


def doubled(function: Any) -> Any:
    return lambda: 2 * function()


def test_inside_and_after() -> None:
    torchs = SimpleNamespace(function=lambda: 1)
    before = torchs.function
    with pytest.raises(KeyError), replaced(torchs, "function", doubled):
        assert torchs.function() == 2
        raise KeyError
    assert torchs.function is before


def test_who_began_first_may_end_first() -> None:
    torchs = SimpleNamespace(function=lambda: 1)
    before = torchs.function
    with contextlib.ExitStack() as second:
        with replaced(torchs, "function", doubled):
            second.enter_context(replaced(torchs, "function", doubled))
            assert torchs.function() == 2  # once, not twice
        assert torchs.function() == 2
    assert torchs.function is before


def test_what_torch_lacks() -> None:
    torchs = SimpleNamespace()
    with replaced(torchs, "function", doubled), replaced(None, "function", doubled):
        assert not hasattr(torchs, "function")
    assert not hasattr(torchs, "function")
