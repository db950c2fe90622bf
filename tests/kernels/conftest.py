"""What tests of the C++ kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.regions import kernels


@pytest.fixture
def cpu_kernels() -> Iterator[None]:
    """The library is built and loaded; a test may set the number of threads."""
    kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
