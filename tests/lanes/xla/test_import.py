"""torch_xla replaces parts of torch; where nobody but us wanted it, torch keeps its own."""

from __future__ import annotations

from tests.conftest import Python

_ASKED = """
import torch, kernel_dispatch
torch.compile(lambda x: x.sin() + 1, backend="unified", options={"device": "xla"})(torch.ones(3))
print(*kernel_dispatch.report()[0].runs_by_provider)
"""
_USED = """
layer, x = torch.nn.GRU(3, 4), torch.randn(5, 2, 3)
print(type(layer).__module__)
if type(layer).__module__ == "torch.nn.modules.rnn":
    layer(x)[0].sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=True)
"""


def test_layers_on_the_cpu_stay_torchs(python: Python) -> None:
    told = python(_ASKED + _USED, PJRT_DEVICE="CPU").stdout.split()
    assert told == ["torch_xla", "torch.nn.modules.rnn"]


def test_who_imported_it_keeps_what_it_put_there(python: Python) -> None:
    told = python("import torch_xla" + _ASKED + _USED, PJRT_DEVICE="CPU").stdout.split()
    assert told == ["torch_xla", "torch_xla.experimental.gru"]
