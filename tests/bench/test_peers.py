"""The peers: found or missing with a reason, run as themselves, and never silently something else.

Where a peer is installed it runs for real; on its own interpreter if it has one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers import PEERS, evidence, installation, openvino_backend
from benchmarks.peers import xla_backend as xla
from benchmarks.peers import zentorch_backend as zentorch
from benchmarks.peers.evidence import PartlyEager, PeerError, watched
from benchmarks.peers.installation import OwnInterpreter
from benchmarks.peers.onnx_runtime import Tree
from kernel_dispatch.bench import Case, Contender

CHECKOUT = Path(__file__).resolve().parents[2]
BY_NAME = {peer.name: peer for peer in PEERS}
OF_INDUCTOR = [peer for peer in PEERS if peer.name.startswith("inductor")]
OF_OTHERS = [peer for peer in PEERS if peer not in OF_INDUCTOR]
quick = pytest.mark.quick
slow = pytest.mark.slow


# --- who they are ---------------------------------------------------------------------------------


@quick
def test_names_are_unique_and_well_formed() -> None:
    assert len(BY_NAME) == len(PEERS)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*(-[a-z0-9]+)*", name) for name in BY_NAME)
    assert all(peer.summary for peer in PEERS)


@quick
def test_only_inductor_alone_can_train() -> None:
    assert [peer.name for peer in PEERS if peer.trains] == ["inductor-max-autotune"]


@quick
@pytest.mark.parametrize("peer", OF_OTHERS, ids=lambda peer: peer.name)
def test_a_missing_peer_says_how_to_get_it(
    peer: Contender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)  # which may have .venv-xla
    monkeypatch.setattr(installation, "installed", lambda distribution: "")
    monkeypatch.setattr(zentorch, "installed", lambda distribution: "")
    reason = peer.missing()
    assert "pip install" in reason
    assert "\n" not in reason


def test_asking_imports_no_peer_and_no_compiler(python: Callable[..., Any]) -> None:
    script = """
import json, sys
from benchmarks.peers import PEERS
reasons = {peer.name: [peer.missing(), peer.version(), peer.python()] for peer in PEERS}
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} | set(sys.modules))))
"""
    loaded = set(json.loads(python(script, PYTHONPATH=str(CHECKOUT)).stdout))
    heavy = "openvino onnxruntime onnx onnxscript zentorch torch_xla intel_extension_for_pytorch"
    assert not loaded & {*heavy.split(), "torch._dynamo", "torch._inductor"}


@quick
def test_install_commands_name_files_that_exist_and_pins_that_agree() -> None:
    for name in ("requirements", "requirements-ipex", "requirements-xla"):
        lines = (CHECKOUT / f"benchmarks/peers/{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert pins and all("==" in pin for pin in pins)
    everything = (CHECKOUT / "benchmarks/peers/requirements.txt").read_text()
    assert zentorch._INSTALL in everything


# --- interpreters ---------------------------------------------------------------------------------


def _interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OwnInterpreter:
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    monkeypatch.delenv("KERNEL_DISPATCH_PYTHON_IPEX", raising=False)
    return OwnInterpreter("ipex", "intel-extension-for-pytorch", "2.8")


def _executable(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o755)
    return str(path)


@quick
def test_the_environment_beats_the_folder_in_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = _interpreter(monkeypatch, tmp_path)
    assert own.python() == ""
    folder = _executable(tmp_path / ".venv-ipex/bin/python")
    assert own.python() == folder
    chosen = _executable(tmp_path / "elsewhere/bin/python")
    monkeypatch.setenv(own.variable, chosen)
    assert own.python() == chosen


@quick
def test_a_variable_that_names_no_interpreter_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = _interpreter(monkeypatch, tmp_path)
    monkeypatch.setenv(own.variable, str(tmp_path))
    assert own.python() == ""
    assert f"{own.variable}={tmp_path} is no interpreter" in own.missing()


@quick
def test_another_torch_is_a_reason_and_the_right_one_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = _interpreter(monkeypatch, tmp_path)
    versions = {"intel-extension-for-pytorch": "2.8.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(installation, "installed", lambda name: versions[name])
    assert "needs torch 2.8, and" in own.missing()
    assert "2.13.0+cpu" in own.missing()
    versions["torch"] = "2.8.0"
    assert own.missing() == ""


@quick
def test_another_interpreter_is_not_judged_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = _interpreter(monkeypatch, tmp_path)
    monkeypatch.setattr(installation, "installed", lambda name: "")
    monkeypatch.setenv(own.variable, _executable(tmp_path / "elsewhere/bin/python"))
    assert own.missing() == ""
    monkeypatch.setenv(own.variable, sys.executable)
    assert "in an interpreter of its own" in own.missing()


@quick
def test_zentorch_is_missing_where_it_would_be_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zentorch, "installed", lambda distribution: "2.13.0.2")
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    assert "needs AVX-512" in BY_NAME["zentorch"].missing()
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert BY_NAME["zentorch"].missing() == ""


# --- did it run? Fakes that quietly run eager -----------------------------------------------------


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


ONES = torch.ones(3)


@quick
def test_a_peer_that_dynamo_never_reached_is_refused() -> None:
    with pytest.raises(PeerError, match="captured no graph"):
        watched(_double, evidence.dynamo_graphs)(ONES)


@quick
def test_a_peer_with_a_graph_is_let_through() -> None:
    run = watched(torch.compile(_double, backend="eager"), evidence.dynamo_graphs)
    assert torch.equal(run(ONES), ONES * 2)


@quick
def test_an_inductor_that_runs_its_graph_eagerly_is_refused() -> None:
    with pytest.raises(PeerError, match="generated no code"):
        watched(torch.compile(_double, backend="eager"), evidence.inductor_code)(ONES)


@quick
def test_weights_that_stay_inputs_are_refused() -> None:
    with pytest.raises(PeerError, match="none of its 2 weights was frozen"):
        watched(_double, lambda: evidence.weights_frozen(2))(ONES)
    assert torch.equal(watched(_double, lambda: evidence.weights_frozen(0))(ONES), ONES * 2)


@quick
@pytest.mark.parametrize("name", ["inductor-freezing", "inductor-max-autotune-freezing"])
def test_freezing_without_its_variable_is_refused(name: str) -> None:
    assert BY_NAME[name].environment == {"TORCHINDUCTOR_FREEZING": "1"}
    with pytest.raises(PeerError, match="TORCHINDUCTOR_FREEZING=1 has to be set"):
        BY_NAME[name].prepare(Case(_double, (ONES,)))


class _Partition(nn.Module):
    """What OpenVINO's partitioner leaves in a graph, as far as the check looks."""

    def __init__(self, perm_fallback: bool) -> None:
        super().__init__()
        self.perm_fallback = perm_fallback

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _partitioned(*partitions: _Partition, outside: Any = None) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for place in range(len(partitions)):
        value = graph.call_module(f"fused_{place}", (value,))
    if outside is not None:
        value = graph.call_function(outside, (value,))
    graph.output(value)
    return torch.fx.GraphModule({f"fused_{i}": one for i, one in enumerate(partitions)}, graph)


@quick
def test_openvino_that_ran_everything_is_let_through() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        openvino_backend.judge([_partitioned(_Partition(False), _Partition(False))], [])


@quick
@pytest.mark.parametrize(
    ("graphs", "complaints", "reason"),
    [
        ([], [], "took no operator"),
        ([_partitioned(outside=torch.ops.aten.sin.default)], [], "took no operator"),
        ([_partitioned(_Partition(False), _Partition(True))], [], "a partition failed"),
        (
            [_partitioned(_Partition(False))],
            ["Failed in OpenVINO execution: no\nmore"],
            "on: no more$",
        ),
    ],
)
def test_openvino_that_ran_eagerly_is_refused(
    graphs: list[nn.Module], complaints: list[str], reason: str
) -> None:
    with pytest.raises(PeerError, match=reason):
        openvino_backend.judge(graphs, complaints)


@quick
def test_openvino_that_left_an_operator_to_eager_is_told() -> None:
    graph = _partitioned(_Partition(False), outside=torch.ops.aten.sin.default)
    with pytest.warns(PartlyEager, match=r"OpenVINO left .* eager: aten\.sin\.default"):
        openvino_backend.judge([graph], [])


@quick
def test_what_openvino_logs_about_a_fallback_is_heard_and_its_levels_come_back() -> None:
    logger = logging.getLogger("openvino.frontend.pytorch.torchdynamo.execute")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with openvino_backend._complaints() as complaints:
        logger.debug("OpenVINO graph execution successful")
        logger.debug("OpenVINO execution failed with bfloat16. Falling back to native PyTorch.")
    assert complaints == [
        "OpenVINO execution failed with bfloat16. Falling back to native PyTorch."
    ]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@quick
def test_zentorch_without_an_operator_of_its_own_is_refused() -> None:
    with pytest.raises(PeerError, match="ran as inductor-freezing"):
        zentorch.judge(["extern_kernels.addmm(a, b)", "cpp_fused_relu_0(a)"])
    zentorch.judge(["cpp_fused_relu_0(a)", "torch.ops.zentorch.zentorch_linear_unary(a, b)"])


@quick
def test_xla_without_a_graph_is_refused_and_a_fallback_is_told() -> None:
    with pytest.raises(PeerError, match="compiled no graph"):
        xla.judge(["CreateXlaTensor", "xla::addmm"], [])
    with pytest.warns(PartlyEager, match=r"XLA left .* eager: aten::_fft_r2c"):
        xla.judge(["DynamoExtractCompiledGraph"], ["aten::_fft_r2c", "aten::_fft_r2c"])


@quick
def test_only_the_first_call_is_watched() -> None:
    watches = []

    @contextlib.contextmanager
    def watch() -> Any:
        watches.append("watched")
        yield

    run = watched(_double, watch)
    for _ in range(3):
        run(ONES)
    assert watches == ["watched"]


@quick
def test_a_failure_becomes_the_line_that_started_it() -> None:
    def export(x: torch.Tensor) -> None:
        try:
            raise KeyError("aten.frob\nadvice")
        except KeyError as error:
            raise RuntimeError("Failed to export.\nPages of\nadvice") from error

    with pytest.raises(PeerError) as refused:
        watched(export, contextlib.nullcontext)(ONES)
    assert str(refused.value) == r"it raised KeyError: 'aten.frob\nadvice'"


# --- nested values for ONNX -----------------------------------------------------------------------


@quick
def test_a_tree_keeps_its_shape_and_its_python_values() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    tree = Tree({"a": first, "b": (None, [second, 3])})
    assert tree.rebuild([second, first]) == {"a": second, "b": (None, [first, 3])}


@quick
def test_a_tree_refuses_what_onnx_cannot_return() -> None:
    with pytest.raises(PeerError, match="cannot take or return Generator"):
        Tree([torch.ones(1), torch.Generator()])


@quick
def test_onnx_refuses_a_case_that_writes_into_its_inputs() -> None:
    def fill(cache: torch.Tensor) -> torch.Tensor:
        return cache.add_(1) * 2

    with pytest.raises(PeerError, match="writes into its inputs"):
        BY_NAME["onnxruntime"].prepare(Case(fill, (torch.ones(3),)))


# --- for real -------------------------------------------------------------------------------------

_INDUCTOR = """
import json, re, sys
import torch
from torch import nn
from benchmarks.peers import PEERS
from kernel_dispatch.bench import Case
from torch._inductor.codecache import PyCodeCache

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)
).eval()
x = torch.randn(2, 3, 12, 12)
peer = next(peer for peer in PEERS if peer.name == sys.argv[1])
run = peer.prepare(Case(model, (x,)))
answer = {}
with torch.set_grad_enabled(sys.argv[2] == "grad"):
    try:
        output = run(x).detach()
    except Exception as error:
        print(json.dumps({"refused": str(error)}))
        sys.exit()
expected = model.double()(x.double()).detach()
# The generated code unpacks its inputs in one line, `x, weight, ... = args`.
unpacked = [
    re.findall(r"^    (.*) = args$", open(module.__file__).read(), re.M)
    for module in PyCodeCache.modules
]
print(json.dumps({
    "error": float((output - expected).abs().max() / expected.abs().max()),
    "inputs": [len([name for name in line.split(",") if name.strip()])
               for lines in unpacked for line in lines],
}))
"""


def _inductor(python: Callable[..., Any], peer: Contender, grad: str = "no grad") -> dict[str, Any]:
    script = f"import sys\nsys.argv[1:] = [{peer.name!r}, {grad!r}]\n{_INDUCTOR}"
    done = python(script, timeout=500, PYTHONPATH=str(CHECKOUT), **peer.environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(2)
@slow
@pytest.mark.parametrize("peer", OF_INDUCTOR, ids=lambda peer: peer.name)
def test_inductor_is_right_and_freezing_leaves_no_weight_an_input(
    peer: Contender, python: Callable[..., Any]
) -> None:
    found = _inductor(python, peer)
    assert found["error"] < 1e-6
    weights = 0 if peer.environment else 4
    assert found["inputs"] == [1 + weights]


@slow
def test_freezing_with_gradients_is_refused(python: Callable[..., Any]) -> None:
    found = _inductor(python, BY_NAME["inductor-freezing"], "grad")
    assert "none of its 4 weights was frozen" in found["refused"]


_OTHERS = """
import json, sys
import torch
from torch import nn
from torch.utils import _pytree as pytree
from benchmarks.peers import PEERS
from kernel_dispatch.bench import Case

class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x):
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)

class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, *, scale):
        hidden = self.first(x).relu() * scale
        return {"hidden": hidden, "pair": (self.second(hidden), [hidden.sum(-1)]), "n": 3}

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, ids, mask):
        return self.head(self.table(ids) * mask.unsqueeze(-1)).softmax(-1)

class Conv(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )

hidden = torch._dynamo.disable(torch.sin)  # from Dynamo, which then has no graph
torch.manual_seed(0)
torch.set_num_threads(1)
CASES = {
    "mlp": Case(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval(),
                (torch.randn(8, 64),)),
    "block": Case(Block().eval(), (torch.randn(2, 16, 64),)),
    "conv": Case(Conv().eval(), (torch.randn(2, 3, 16, 16),)),
    "function": Case(lambda a, b: (a * b + a).relu().sum(-1), (torch.randn(32, 64),) * 2),
    "nested": Case(Nested().eval(), (torch.randn(5, 16),), {"scale": torch.rand(5, 16)}),
    "tokens": Case(Tokens().eval(), (torch.randint(0, 50, (4, 12)),
                                     torch.ones(4, 12, dtype=torch.bool))),
    "bfloat16": Case(nn.Linear(64, 64).eval().bfloat16(), (torch.randn(4, 64).bfloat16(),)),
    "eager": Case(lambda x: hidden(x), (torch.randn(4, 4),)),
}

def wide(leaf):
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if floating else leaf

def answer(peer, case):
    torch._dynamo.reset()  # or Dynamo takes shapes that differ between cases for dynamic ones
    eager = case.fn(*case.args, **case.kwargs)
    try:
        run = peer.prepare(case)
        for _ in range(2):
            output = run(*case.args, **case.kwargs)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    fn = case.fn.double() if isinstance(case.fn, nn.Module) else case.fn
    args, kwargs = pytree.tree_map(wide, (case.args, dict(case.kwargs)))
    expected = pytree.tree_leaves(fn(*args, **kwargs))
    leaves = pytree.tree_leaves(output)
    return {
        "same_tree": pytree.tree_structure(output) == pytree.tree_structure(eager),
        "error": max(float((a - b).abs().max() / b.abs().max())
                     for a, b in zip(leaves, expected) if isinstance(b, torch.Tensor)),
    }

peer = next(peer for peer in PEERS if peer.name == sys.argv[1])
found = {"missing": peer.missing()}
if not found["missing"]:
    with torch.no_grad():
        found.update((name, answer(peer, case)) for name, case in CASES.items())
print(json.dumps(found))
"""

# What the pinned versions do not take; everything else they have to take. OpenVINO's backend
# would run bfloat16 eagerly, since it hands tensors over as NumPy arrays.
_REFUSES = {
    "openvino": {"block", "conv", "bfloat16"},
    "openvino-aot": {"bfloat16"},
    "openvino-f32": {"bfloat16"},
    "onnxruntime": {"bfloat16"},
}


@slow
@pytest.mark.parametrize("peer", OF_OTHERS, ids=lambda peer: peer.name)
def test_an_installed_peer_is_right_and_refuses_in_one_line(
    peer: Contender, tmp_path: Path, shared_cache: Path
) -> None:
    if not peer.python() and (why := peer.missing()):
        pytest.skip(why)
    found = _run_others(peer, tmp_path, shared_cache)
    if found.pop("missing"):
        pytest.fail("its interpreter is there and it is not")
    eager = found.pop("eager")
    refused = {name: one["refused"] for name, one in found.items() if "refused" in one}
    assert set(refused) == _REFUSES.get(peer.name, set()), refused
    assert all(re.fullmatch(r"PeerError: .{10,400}", reason) for reason in refused.values())
    for name, one in found.items():
        if name not in refused:
            assert one["same_tree"], name
            limit = 1e-2 if name == "bfloat16" else peer.tolerance or 1e-6
            assert one["error"] < limit, (name, one)
    if peer.compiles_with_dynamo:
        assert "captured no graph" in eager["refused"]


def _run_others(peer: Contender, folder: Path, cache: Path) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(_OTHERS)
    environment = {
        **os.environ,
        **peer.environment,
        "PYTHONPATH": str(CHECKOUT),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / peer.name),
    }
    done = subprocess.run(
        [peer.python() or sys.executable, str(script), peer.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
