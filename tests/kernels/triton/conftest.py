"""Kernels run on a GPU, or in Triton's interpreter, which has to be on before they are defined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.triton_kernels import DEVICE
from triton_kernels.availability import interpreting

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if interpreting() or DEVICE == "cuda":
        return
    skip = pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1: `make test-triton`")
    for item in items:
        if _HERE in item.path.parents and "plain" not in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield
