"""A fixture that test files of Apple's GPUs share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowering import observing
from tests.support.mps_plans import Heard, Regions, on_shaders


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
