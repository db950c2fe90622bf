"""A target of somebody else: an installed distribution with an entry point, our code untouched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import Python

pytestmark = pytest.mark.slow

_TOY = """
import torch
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Compiled, Probe, Provider, Target
from lowering.levels import Level

to_toy, from_toy, compiled = [], [], []

def send(tensor):
    to_toy.append(tuple(tensor.shape))
    return tensor.clone()

def fetch(tensor, home):
    from_toy.append(tuple(tensor.shape))
    return tensor.to(home)

def compile(request):
    compiled.append(request)
    return Compiled(run=request.graph.forward, notes=["toy was here"])

TARGET = Target(
    name="toy",
    summary="A toy",
    device_types=DEVICES,
    probe=lambda: Probe.yes("1.0"),
    aliases=("plaything",),
    priority=PRIORITY,
    providers=(Provider("toycc", "the toy's compiler", lambda: Probe.yes("0.1"), compile),),
    rows=(
        CapabilityRow(
            "toy", "toycc", GRAPH, Level.O1, priority=9,
            refused_dtypes=frozenset({"complex64"}), refused_ops=frozenset({"cumsum"}),
            mutation=MUTATION,
        ),
    ),
    to_target=SEND,
    from_target=FETCH,
)
"""


def install(
    folder: Path,
    name: str = "toy",
    *,
    source: str = _TOY,
    devices: str = '("cpu",)',
    priority: int = 99,
    moves: bool = False,
    mutation: bool = True,
    value: str | None = None,
) -> str:
    """The distribution as pip would leave it; returns what belongs on PYTHONPATH."""
    module = f"{name}_target"
    filled = source
    for word, text in {
        "DEVICES": devices,
        "PRIORITY": str(priority),
        "SEND": "send" if moves else "None",
        "FETCH": "fetch" if moves else "None",
        "MUTATION": str(mutation),
    }.items():
        filled = filled.replace(word, text)
    site = folder / "site"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(filled)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text(
        f"[kernel_dispatch.targets]\n{name} = {value or module + ':TARGET'}\n"
    )
    return str(site)


def test_chosen_by_priority_and_refused_per_graph(python: Python, tmp_path: Path) -> None:
    script = """
import torch, kernel_dispatch
print(kernel_dispatch.available_targets())

def fn(x):
    y = x.sin() * 2 + 1
    torch._dynamo.graph_break()
    return y.cumsum(0) * y

x = torch.randn(5)
c = torch.compile(fn, backend="unified")
for _ in range(3):
    torch.testing.assert_close(c(x), fn(x))
for g in kernel_dispatch.report(c):
    print(g.target, g.provider, g.runs_by_provider, g.notes, g.transfers, g.fallbacks)
toy = next(r for r in kernel_dispatch.report(c)[1].plan.rejected if r.target == "toy")
print("NO", [(r.code, r.text) for r in toy.reasons])

def z(x): return x * 2 + 1
d = torch.compile(z, backend="unified")
torch.testing.assert_close(d(x.to(torch.complex64)), z(x.to(torch.complex64)))
(g,) = kernel_dispatch.report(d)
toy = next(r for r in g.plan.rejected if r.target == "toy")
print("COMPLEX", g.target, [r.code for r in toy.reasons])

e = torch.compile(z, backend="unified", options={"level": "O0"})
e(x)
(g,) = kernel_dispatch.report(e)
toy = next(r for r in g.plan.rejected if r.target == "toy")
print("O0", g.target, [r.code for r in toy.reasons])

f = torch.compile(z, backend="unified", options={"disable": "toycc"})
f(x)
(g,) = kernel_dispatch.report(f)
print("DISABLED", g.target, g.provider)

m = torch.nn.Linear(5, 5)
t = torch.compile(m, backend="unified")
t(x).sum().backward()
got = m.weight.grad.clone(); m.zero_grad(); m(x).sum().backward()
torch.testing.assert_close(got, m.weight.grad)
print("TRAINED", [g.target for g in kernel_dispatch.report(t)])
try:
    torch.compile(z, backend="unified", options={"device": "playthin"})(x)
except ValueError as error:
    print("NEAREST", "plaything" in str(error) and "toy" in str(error))
"""
    out = python(script, PYTHONPATH=install(tmp_path)).stdout.splitlines()
    assert out[0] == "['toy', 'cpu']"
    assert out[1] == "toy toycc {'toycc': 3} ['toy was here'] 0 []"
    assert out[2].startswith("cpu inductor {'inductor': 3}")
    assert out[3] == "NO [('op-unsupported', 'toycc does not take cumsum')]"
    assert out[4].startswith("COMPLEX cpu ['dtype-unsupported']")
    assert out[5].startswith("O0 cpu ['level-too-low']")
    assert out[6] == "DISABLED cpu inductor"
    assert out[7] == "TRAINED ['toy']"
    assert out[8] == "NEAREST True"


def test_a_low_priority_is_told(python: Python, tmp_path: Path) -> None:
    script = """
import torch, kernel_dispatch
c = torch.compile(lambda x: x.sin() + 1, backend="unified")
c(torch.randn(5))
(g,) = kernel_dispatch.report(c)
toy = next(r for r in g.plan.rejected if r.target == "toy")
print(g.target, [r.code for r in toy.reasons])
"""
    out = python(script, PYTHONPATH=install(tmp_path, priority=1)).stdout
    assert out.strip() == "cpu ['lower-priority']"


def test_a_failing_toy_is_a_fallback(python: Python, tmp_path: Path) -> None:
    site = install(
        tmp_path, source=_TOY.replace("compiled.append(request)", "raise OSError('toy broke')")
    )
    script = """
import warnings, torch, kernel_dispatch
c = torch.compile(lambda x: x.sin() + 1, backend="unified")
x = torch.randn(5)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        torch.testing.assert_close(c(x), x.sin() + 1)
(g,) = kernel_dispatch.report(c)
print([w.category.__name__ for w in said if "Unified" in w.category.__name__])
print([(f.stage, f.provider, f.taken_by, f.error) for f in g.fallbacks], g.runs_by_provider)
"""
    out = python(script, PYTHONPATH=site).stdout.splitlines()
    assert out[0] == "['UnifiedWarning']"
    assert out[1] == "[('compile', 'toycc', 'eager', 'OSError')] {'eager': 2}"


BAD_NAME = _TOY.replace('name="toy"', 'name="Toy!"').replace('"toy", "toycc"', '"Toy!", "toycc"')
BROKEN = {
    "alpha": ("raise ImportError('no toy today')", None, "no toy today"),
    "beta": ("TARGET = 5", None, "not a lowering.contract.Target"),
    "gamma": (BAD_NAME, None, "Toy!"),
    "delta": (_TOY.replace('"plaything"', '"nvidia"'), None, "nvidia"),
    "epsilon": (_TOY, "epsilon_target:NOTHING", "NOTHING"),
}


def test_broken_plugins_are_left_out(python: Python, tmp_path: Path) -> None:
    """Each in its own way, each with one warning, and the sound one beside them works."""
    script = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x = torch.randn(5)
    for level in ("O0", "O1"):
        c = torch.compile(lambda x: x.sin() + 1, backend="unified", options={"level": level})
        torch.testing.assert_close(c(x), x.sin() + 1)
import kernel_dispatch
ours = [str(w.message) for w in said if "Unified" in w.category.__name__]
print(json.dumps([kernel_dispatch.available_targets(), ours]))
"""
    paths = [
        install(tmp_path / name, name, source=source, value=value)
        for name, (source, value, _) in BROKEN.items()
    ]
    paths.append(install(tmp_path / "toy"))
    found, said = json.loads(python(script, PYTHONPATH=os.pathsep.join(paths)).stdout)
    assert found == ["toy", "cpu"]
    assert len(said) == len(BROKEN)
    for name, (_, _, told) in BROKEN.items():
        (message,) = (one for one in said if repr(name) in one)
        assert told in message


def test_a_probe_that_raises_is_a_reason(python: Python, tmp_path: Path) -> None:
    source = _TOY.replace('probe=lambda: Probe.yes("1.0")', "probe=lambda: 1 / 0")
    script = """
import torch, kernel_dispatch
c = torch.compile(lambda x: x.sin() + 1, backend="unified", options={"level": "O1"})
c(torch.randn(5))
(g,) = kernel_dispatch.report(c)
toy = next(r for r in g.plan.rejected if r.target == "toy")
print(g.target, [(r.code, r.text) for r in toy.reasons])
"""
    out = python(script, PYTHONPATH=install(tmp_path, source=source)).stdout
    assert out.startswith("cpu [('target-absent'")
    assert "ZeroDivisionError" in out


_FORCED = """
import warnings
import torch, kernel_dispatch
import toy_target as toy
warnings.simplefilter("error")

model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
c = torch.compile(model, backend="unified", options={"device": "toy"})
x = torch.randn(5, 4)

def call():
    before = len(toy.to_toy), len(toy.from_toy)
    with torch.no_grad():
        got = c(x)
        torch.testing.assert_close(got, model(x))
    assert got.device.type == "cpu"
    return len(toy.to_toy) - before[0], len(toy.from_toy) - before[1]

print("FIRST", call())
print("SECOND", call())
with torch.no_grad():
    model[0].weight.mul_(2)
print("UPDATED", call())
model[0].bias.data = torch.randn(3)
print("REPLACED", call())
print("LAST", call())
(g,) = kernel_dispatch.report(c)
moved = len(toy.to_toy) + len(toy.from_toy)
print(g.target, g.provider, g.runs_by_provider, moved == g.transfers, len(toy.compiled))
print("moved" in g.text(), g.settings.as_dict()["device"])
"""


def test_a_forced_toy_moves_parameters_once(python: Python, tmp_path: Path) -> None:
    site = install(tmp_path, devices='("toydevice",)', moves=True, priority=1)
    out = python(_FORCED, PYTHONPATH=site).stdout.splitlines()
    assert out == [
        "FIRST (3, 1)",  # weight, bias, input
        "SECOND (1, 1)",
        "UPDATED (2, 1)",
        "REPLACED (2, 1)",
        "LAST (1, 1)",
        "toy toycc {'toycc': 5} True 1",
        "True {'value': 'toy', 'source': 'options='}",
    ]


_REFUSED = """
import warnings
import torch, kernel_dispatch
import toy_target as toy

def run(fn, *args, grad=False):
    c = torch.compile(fn, backend="unified", options={"device": "toy"})
    with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        own = [a.clone() for a in args]
        torch.testing.assert_close(c(*args), fn(*own))
        torch.testing.assert_close(list(args), own)
    (g,) = kernel_dispatch.report(c)
    ours = [w for w in said if "Unified" in w.category.__name__]
    print(g.target, [f.reason.code for f in g.fallbacks], len(ours), len(toy.to_toy))

run(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4), grad=True)
run(lambda x: x.add_(1) * 2, torch.randn(4))
run(lambda x: x.cumsum(0) * 2, torch.randn(4))
run(lambda x: x * 2 + 1, torch.randn(4).to(torch.complex64))
try:
    torch.compile(lambda x: x.add_(1) * 2, backend="unified",
                  options={"device": "toy", "strict": True})(torch.randn(4))
except RuntimeError as error:
    print(type(error).__name__, "placement-refused" in str(error))
"""


def test_a_forced_toy_refuses_with_a_reason(python: Python, tmp_path: Path) -> None:
    """What was refused runs where its tensors are, and the report says that target."""
    site = install(tmp_path, devices='("toydevice",)', moves=True, priority=1)
    out = python(_REFUSED, PYTHONPATH=site).stdout.splitlines()
    assert out == [
        "cpu ['placement-refused'] 1 0",
        "cpu ['placement-refused'] 1 0",
        "cpu ['op-unsupported'] 1 0",
        "cpu ['dtype-unsupported'] 1 0",
        "StrictModeError True",
    ]
