"""torch_tpu with a fake of it: who is asked, with what, and when. No TPU was seen by these tests.

The fake's device is the CPU, as this torch knows no device "tpu"; that tensors travel to another
device is shown with torch_xla in its lane.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Python

pytestmark = pytest.mark.slow

_PACKAGE = """
import types
import torch
from torch._dynamo import register_backend

COUNT = 1
calls = []

def compile_graph(module, inputs, **kwargs):
    assert all(type(x) is not torch.nn.Module for x in inputs) and not kwargs
    names = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    calls.append(names)
    return module.forward

register_backend(compiler_fn=compile_graph, name="tpu")
torch.tpu = types.SimpleNamespace(device_count=lambda: COUNT, manual_seed=torch.manual_seed)
"""

_HEAD = """
import sys, warnings
import torch, kernel_dispatch
from lowering.targets import xla

found = xla._found
xla._found = lambda provider, device, *rest: found(provider, "cpu", *rest)

def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if "Unified" in w.category.__name__]
"""


def _install(folder: Path, count: int = 1, version: str = "0.2.0") -> str:
    site = folder / "tpu_site"
    for name in (f"torch_tpu-{version}.dist-info", "torch_tpu"):
        (site / name).mkdir(parents=True)
    (site / f"torch_tpu-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch_tpu\nVersion: {version}\n\n"
    )
    (site / "torch_tpu" / "__init__.py").write_text(_PACKAGE.replace("= 1", f"= {count}"))
    return str(site)


def test_forward_and_backward(python: Python, tmp_path: Path) -> None:
    script = (
        _HEAD
        + """
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
c = torch.compile(model, backend="unified", options={"device": "tpu"})
assert "torch_tpu" not in sys.modules
x = torch.randn(5, 4)
for _ in range(2):
    torch.testing.assert_close(c(x), model(x))
c(x).sum().backward()
got = [p.grad.clone() for p in model.parameters()]
model.zero_grad(); model(x).sum().backward()
torch.testing.assert_close(got, [p.grad for p in model.parameters()])
(g,) = kernel_dispatch.report(c)
print(g.target, g.provider, g.runs_by_provider, g.fallbacks)
import torch_tpu
forward, backward = torch_tpu.calls
print("aten.tanh.default" in forward, any("mm" in name for name in backward))
"""
    )
    out = python(script, PYTHONPATH=_install(tmp_path)).stdout.splitlines()
    assert out == ["xla torch_tpu {'torch_tpu': 3} []", "True True"]


def test_float64_stays_at_home(python: Python, tmp_path: Path) -> None:
    script = (
        _HEAD
        + """
c = torch.compile(lambda x: x.sin() + 1, backend="unified", options={"device": "xla"})
x = torch.randn(3, dtype=torch.float64)
(message,) = said(lambda: torch.testing.assert_close(c(x), x.sin() + 1))
(g,) = kernel_dispatch.report(c)
print(g.target, "float64" in message)
"""
    )
    assert python(script, PYTHONPATH=_install(tmp_path)).stdout.strip() == "cpu True"


def test_without_a_tpu_the_reason_is_told(python: Python, tmp_path: Path) -> None:
    script = (
        _HEAD
        + """
c = torch.compile(lambda x: x.sin() + 1, backend="unified", options={"device": "xla"})
messages = said(lambda: c(torch.randn(3)))
(g,) = kernel_dispatch.report(c)
print(g.target, g.runs_by_provider, any("sees no TPU" in text for text in messages))
"""
    )
    out = python(script, PYTHONPATH=_install(tmp_path, count=0)).stdout.strip()
    assert out.endswith("True") and "torch_tpu" not in out
