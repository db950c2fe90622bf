"""AWS Neuron with a fake torch_neuronx: what is handed over, when, and what is refused.

No Neuron device was ever seen by these tests: they prove our side of the interface that AWS
documents.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Python
from tests.support import fake_neuron

pytestmark = pytest.mark.slow

# One device, as /dev shows it on an instance.
_ON_AN_INSTANCE = """
import sys, warnings
import torch
import kernel_dispatch
from lowering.targets import neuron
neuron._devices = lambda: ["/dev/neuron0", "/dev/neuron1"]
warnings.simplefilter("error", kernel_dispatch.UnifiedWarning)

def compiled(fn, **options):
    return torch.compile(fn, backend="unified", options={"device": "neuron", **options})

def calls(*names):
    import torch_neuronx
    found = [call for call in torch_neuronx.calls if not names or call[0] in names]
    torch_neuronx.calls.clear()
    return found
"""

_INFERENCE = """
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
).eval()
model[2].running_mean.normal_()
c = compiled(model)
assert "torch_neuronx" not in sys.modules, "nothing was meant for it yet"
x = torch.randn(3, 4)

def check(x):
    with torch.no_grad():
        got = c(x)
        torch.testing.assert_close(got, model(x))
    assert got.device.type == "cpu"
    return calls()

print("FIRST", check(x))
print("SECOND", check(x))
with torch.no_grad():
    model[0].weight.mul_(2)
print("UPDATED", check(x))
model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
print("LOADED", [name for name, *_ in check(x)])
model[3].weight.data.mul_(3)
print("DATA", [name for name, *_ in check(x)])
print("THEN", check(x))
(g,) = kernel_dispatch.report(c)
print(g.target, g.provider, g.runs_by_provider, g.fallbacks, g.transfers)
torch._dynamo.config.automatic_dynamic_shapes = False
print("OTHER SIZE", [name for name, *_ in check(torch.randn(5, 4))])
print([(g.target, g.provider, g.runs) for g in kernel_dispatch.report(c)])
"""


def test_inference(python: Python, tmp_path: Path) -> None:
    site = fake_neuron.install(tmp_path)
    out = python(_ON_AN_INSTANCE + _INFERENCE, PYTHONPATH=site).stdout.splitlines()
    full = "('--auto-cast', 'none')"
    assert out == [
        f"FIRST [('trace', 1, 8, {full}), ('move', 0)]",
        "SECOND []",
        "UPDATED [('replace_weights', 8), ('move', 0)]",
        "LOADED ['replace_weights', 'move']",
        "DATA ['replace_weights', 'move']",
        "THEN []",
        # weights four times, an input and an output in each of six calls
        "neuron nki {'nki': 6} [] 44",
        "OTHER SIZE ['trace', 'move']",
        "[('neuron', 'nki', 6), ('neuron', 'nki', 1)]",
    ]


_EQUAL_LAYERS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x))

blocks = [Block().eval() for _ in range(3)]
together = [compiled(block) for block in blocks]
x = torch.randn(2, 4)
for _ in range(2):
    with torch.no_grad():
        for block, c in zip(blocks, together):
            torch.testing.assert_close(c(x), block(x))
    print([name for name, *_ in calls()])
with torch.no_grad():
    blocks[1].layer.bias.add_(1)
    for block, c in zip(blocks, together):
        torch.testing.assert_close(c(x), block(x))
print([name for name, *_ in calls()])

made = compiled(lambda x: x + torch.arange(4, device=x.device))
torch.testing.assert_close(made(x), x + torch.arange(4))
alone = calls("trace")
print("CONSTANT", alone)
view = compiled(lambda x: (x.t(), x * 2))
y = view(x)[0]
assert y.data_ptr() == x.data_ptr(), "views are views"
calls()
written = torch.zeros(4)
torch.testing.assert_close(compiled(lambda x: x.add_(1) * 2)(written), torch.full((4,), 2.0))
assert written.tolist() == [1] * 4 and calls("trace"), "written by what the artifact gave back"
second = torch.compile(torch.relu, backend="unified", options={"device": "neuron:1"})
second(x)
print("CORE", calls("move"))
"""


def test_equal_layers_share_an_artifact_and_have_weights_of_their_own(
    python: Python, tmp_path: Path
) -> None:
    site = fake_neuron.install(tmp_path)
    out = python(_ON_AN_INSTANCE + _EQUAL_LAYERS, PYTHONPATH=site).stdout.splitlines()
    copies = ["replace_weights", "move"] * 2
    assert out[0] in (str(["trace", "move", *copies]), str(["trace", "move"] * 3))
    assert out[1] == "[]", "nothing is loaded twice"
    assert out[2] == "['replace_weights', 'move']", "only the layer that changed"
    assert out[3] == "CONSTANT [('trace', 1, 1, ('--auto-cast', 'none'))]"
    assert out[4] == "CORE [('move', 1)]"


_REFUSED = """
def run(fn, *args, grad=False, **options):
    torch.compiler.reset()
    c = compiled(fn, **options)
    with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        torch.testing.assert_close(c(*args), fn(*args))
    (g,) = kernel_dispatch.report(c)
    ours = [w for w in said if issubclass(w.category, kernel_dispatch.UnifiedWarning)]
    told = [f"{f.reason.code}: {f.reason.text}" for f in g.fallbacks]
    print(g.target, *told, len(ours), sep=", ")

double = lambda x: x * 2 + 1
run(torch.nn.Linear(4, 4), torch.randn(2, 4), grad=True)
run(double, torch.randn(4, dtype=torch.float64))
run(double, torch.randn(4, dtype=torch.complex64))
run(double, torch.randn(4), disable="nki")
x = torch.randn(6, 4)
torch._dynamo.mark_dynamic(x, 0)
run(double, x)
c = compiled(lambda x: torch.rand_like(x) * x)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    c(torch.ones(4))
(g,) = kernel_dispatch.report(c)
print("RANDOM", g.provider, [f.reason.text for f in g.fallbacks])
assert "torch_neuronx" not in sys.modules or not calls(), "nothing of all this was traced"
try:
    compiled(torch.nn.Linear(4, 4), strict=True)(torch.randn(2, 4))
except RuntimeError as error:
    print(type(error).__name__, "PyTorch/XLA" in str(error))
"""


def test_what_is_refused_runs_at_home_and_says_why(python: Python, tmp_path: Path) -> None:
    site = fake_neuron.install(tmp_path)
    out = python(_ON_AN_INSTANCE + _REFUSED, PYTHONPATH=site).stdout.splitlines()
    assert out[0].startswith("cpu, training-unsupported: nki takes inference only: AWS dropped ")
    assert "Neuron 2.30" in out[0]
    assert "dtype-unsupported: nki does not take float64" in out[1]
    assert "dtype-unsupported: nki does not take complex64" in out[2]
    assert "provider-disabled" in out[3]
    assert "dynamic-unsupported: nki takes static shapes only" in out[4]
    assert all(line.startswith("cpu, ") and line.endswith(", 1") for line in out[:5])
    assert out[5] == "RANDOM eager ['torch_neuronx.trace would freeze the random numbers']"
    assert out[6] == "StrictModeError True"


_NATIVE = """
import torch_neuronx
neuron.DEVICE = "cpu"  # the fake's device is the CPU
model = torch.nn.Linear(4, 2).eval()
c = compiled(model)
x = torch.randn(3, 4)
with torch.no_grad():
    for _ in range(2):
        torch.testing.assert_close(c(x), model(x))
    model.weight.mul_(2)
    torch.testing.assert_close(c(x), model(x))
(g,) = kernel_dispatch.report(c)
print(g.target, g.provider, g.runs_by_provider, g.fallbacks)
print(calls())
"""


def test_the_native_package_is_called_by_the_name_that_it_registers(
    python: Python, tmp_path: Path
) -> None:
    site = fake_neuron.install(tmp_path, native=True)
    out = python(_ON_AN_INSTANCE + _NATIVE, PYTHONPATH=site).stdout.splitlines()
    assert out[0] == "neuron nki {'nki': 3} []"
    told = "(3, {'fallback_execution': False})"
    assert out[1] == f"['autoloaded', {told}, 'ran', 'ran', 'ran']"


_ABSENT = """
import torch, kernel_dispatch
try:
    torch.compile(torch.relu, backend="unified", options={"device": "neuron"})(torch.ones(3))
except kernel_dispatch.BackendNotAvailableError as error:
    print(error)
import sys
assert "torch_neuronx" not in sys.modules
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, r"torch_neuronx is not installed\. Available: .*cpu\. To get it: pip install"),
        (
            "",
            r"no device /dev/neuron\* is seen\. Available: .*cpu\. To get it: Install aws-neuronx",
        ),
        ("1.13.1.1", r"torch_neuronx 1\.13\.1\.1 is ignored: it needs torch 1\.13 exactly, not"),
    ],
)
def test_absent(python: Python, tmp_path: Path, version: str | None, said: str) -> None:
    site = "" if version is None else fake_neuron.install(tmp_path, version)
    out = python(_ABSENT, PYTHONPATH=site).stdout
    assert "'neuron' was forced" in out
    assert re.search(said, out), out
