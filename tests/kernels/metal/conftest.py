"""Every test here runs shaders on the CPU, compiled by the C++ compiler that Inductor takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowering import toolchain
from lowering.metal import registration, shaders
from tests.support import metal_shim


@pytest.fixture(autouse=True)
def shaders_on_the_cpu(pytestconfig: pytest.Config) -> Iterator[None]:
    metal_shim.keep_in(pytestconfig.cache.mkdir("metal"))
    found = toolchain.probe()
    if not found.available:
        pytest.skip(found.reason)
    metal_shim.launched.clear()
    registration.forget()
    with shaders.compiled_by(metal_shim.compile_shader):
        yield
    registration.forget()
