"""Triton is an extra: without it every kernel computes its plain meaning, and plans still work."""

from __future__ import annotations

import pytest

from tests.conftest import Python

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it raises
import torch, triton_kernels, kernel_dispatch
for name in triton_kernels.__all__:
    assert callable(getattr(triton_kernels, name))
x = torch.randn(4, 8, requires_grad=True)
triton_kernels.rms_norm(x, torch.ones(8)).sum().backward()
assert x.grad.shape == x.shape
assert torch.ops.triton_kernels.rms_norm_forward(x.detach(), None, None, 1e-5)[0].shape == x.shape
run = kernel_dispatch.dry_run(torch.nn.Linear(4, 4), (torch.randn(2, 4),), device="cuda:sm90")
assert run.regions() == {("linear", "inductor"): 1}
print("all of it")
"""


def test_without_triton(python: Python) -> None:
    done = python(_SCRIPT)
    assert "all of it" in done.stdout, done.stderr
