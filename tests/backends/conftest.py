"""Fixtures that test files share: of our C++ kernels, and of Apple's GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowering import observing
from tests.support.mps_plans import Heard, Regions, on_shaders
from tests.support.regions import kernels


@pytest.fixture
def our_kernels() -> None:
    """They are there. To ask for them while tests are collected would build them once more, in a
    cache that no run of tests has."""
    kernels()


@pytest.fixture(params=["meaning", "shaders"])
def on_metal(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Call something; with shaders, hold that all regions of ours really ran, once each."""
    shades = on_shaders(request.config) if request.param == "shaders" else contextlib.nullcontext()

    def call(compiled: Any, planned: Regions, *args: Any, **kwargs: Any) -> Any:
        heard = Heard(1e-2)
        result = observing.listened(heard, functools.partial(compiled, **kwargs), args)
        ours = {key: n for key, n in planned.items() if key[1] == "metal"}
        assert heard.ran == (ours if request.param == "shaders" else {})
        assert not heard.demoted
        return result

    with shades:
        yield call
