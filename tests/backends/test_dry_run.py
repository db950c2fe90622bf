"""Plans for GPUs that are not here: what is told, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_dispatch
from kernel_dispatch.cli import main
from kernel_dispatch.explaining import _can_isolate
from lowering.errors import SettingError
from tests.support import torches

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
SCRIPT = """
import torch
from torch.nn import functional

def step():
    query = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
    key = torch.randn(1, 2, 300, 64, dtype=torch.bfloat16)
    attend = functional.scaled_dot_product_attention
    return (lambda q, k: attend(q, k, k, enable_gqa=True)), (query, key)

def broken():
    raise ValueError("no such weights")
"""


OURS = {"provider": "triton"}  # for kernels that nobody else is asked for


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def step(keys: int = 300, device: str = "meta") -> tuple[Tensor, ...]:
    shapes = ((2, 8, 1, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    return tuple(torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)


@pytest.mark.parametrize(
    ("device", "instruction", "suffixes"),
    [
        ("cuda:sm80", "mma.sync", {".ptx", ".cubin"}),
        ("cuda:sm90", "mma", {".ptx", ".cubin"}),
        ("rocm:gfx942", "v_mfma", {".amdgcn", ".hsaco"}),
    ],
)
def test_the_kernels_and_their_code(
    device: str, instruction: str, suffixes: set[str], tmp_path: Path
) -> None:
    if device.startswith("rocm") and (why := torches.no_amd_linker()):
        pytest.skip(why)
    with torch.no_grad():
        told = kernel_dispatch.dry_run(attend, step(), device=device, options=OURS)
    (graph,) = told.graphs
    assert told.regions() == {("attention", "triton"): 1}
    assert len(graph.kernels) >= 1
    for kernel in graph.kernels:
        assert kernel.binary is not None, kernel.error
        assert kernel.binary.registers > 0
        assert kernel.binary.spills == 0
        assert 0 < kernel.binary.occupancy <= 1
        assert kernel.binary.shared_bytes <= graph.architecture.shared_bytes
    written = told.emit(tmp_path / "kernels")
    assert {path.suffix for path in written} == suffixes
    assert instruction in "".join(path.read_text() for path in written if path.suffix in _TEXT)


_TEXT = (".ptx", ".amdgcn")


def test_what_is_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        told = kernel_dispatch.dry_run(model, (torch.randn(1, 3, 8, 8),), device="nvidia:SM90")
    text = str(told)
    for part in (
        "cuda:sm90 at O2, which is not here (",
        "sm80+, sm89+",
        "convolution x1: cudnn",
        "because",
        "H100",
        "at least",
    ):
        assert part in text
    graph = json.loads(told.json())["graphs"][0]
    assert graph["plan"]["target"] == "cuda"
    assert graph["regions"][0]["why"]
    assert graph["least_seconds"] > 0
    elsewhere = [no for no in graph["plan"]["rejected"] if no["target"] == "cpu"]
    assert "cuda:sm90" in elsewhere[0]["reasons"][0]["text"]


def test_every_graph_between_breaks_is_planned() -> None:
    def broken_in_two(x: Tensor) -> Tensor:
        x = torch.relu(x @ x)
        torch._dynamo.graph_break()
        return torch.relu(x @ x)

    told = kernel_dispatch.dry_run(broken_in_two, (torch.randn(64, 64),), device="cuda:sm80")
    assert len(told.graphs) == 2


def test_the_backward_is_planned_with_the_forward() -> None:
    linear = nn.Linear(16, 1 << 16)
    x, target = torch.randn(4, 16), torch.randint(1 << 16, (4,))
    told = kernel_dispatch.dry_run(
        lambda x, t: functional.cross_entropy(linear(x), t), (x, target), device="cuda:sm90"
    )
    names = [kernel.launch.name for graph in told.graphs for kernel in graph.kernels]
    assert any("forward" in name for name in names)
    told_so = "the forward only" in str(told)
    assert told_so is bool(torches.no_backward_at_once())
    if told_so:
        return  # what this torch cannot do, the plan says
    assert any("backward" in name for name in names)


def test_changing_sizes_are_planned_by_what_they_were() -> None:
    q, k, v = step()
    torch._dynamo.mark_dynamic(k, 2)
    torch._dynamo.mark_dynamic(v, 2)
    with torch.no_grad():
        told = kernel_dispatch.dry_run(attend, (q, k, v), device="cuda:sm90", options=OURS)
    assert told.regions() == {("attention", "triton"): 1}
    assert told.graphs[0].kernels


def test_levels_and_providers_are_the_users() -> None:
    with torch.no_grad():
        low = kernel_dispatch.dry_run(attend, step(), device="cuda:sm90", options={"level": "O1"})
        less = kernel_dispatch.dry_run(
            attend, step(), device="cuda:sm90", options={"disable": "cudnn"}
        )
    assert low.regions() == {("attention", "cudnn"): 1}
    assert less.regions() == {("attention", "mha"): 1}
    with pytest.raises(SettingError, match="level"):
        kernel_dispatch.dry_run(attend, step(), device="cuda:sm90", options={"level": "O7"})


@pytest.mark.parametrize("device", ["cuda:sm91", "cuda", "cuda:0", "cpu:zen5", "sm90", ""])
def test_a_device_that_no_dry_run_knows(device: str) -> None:
    """A GPU is known by its architecture: its bare name says too little."""
    known = r"is none that a dry run knows: one of cuda:sm80, .*gfx1100, .*mps"
    with pytest.raises(SettingError, match=known):
        kernel_dispatch.dry_run(attend, step(), device=device)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_DISABLE", "cudnn,mha")  # so that a kernel of ours is in the plan
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    target, out = f"{script}:step", tmp_path / "out"
    with torch.no_grad():
        assert main(["explain", target, "--device", "cuda:sm90", "--emit", str(out)]) == 0
    text = capsys.readouterr().out
    assert "attention x1: triton" in text
    assert f"files written to {out}" in text
    assert list(out.glob("*.ptx"))
    if why := torches.no_amd_linker():
        pytest.skip(why)
    with torch.no_grad():
        assert main(["explain", target, "--device", "rocm:gfx942", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "rocm:gfx942"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["net.py:step", "--device", "cuda:sm91"], 2, "Did you mean 'cuda:sm90'?"),
        (["net.py", "--device", "cuda:sm90"], 2, "a dry run takes a function"),
        (["net.py:step", "--emit", "x"], 2, "--device cuda:sm90"),
        (["net.py:step", "--device", "cpu", "--emit", "x"], 2, "--device cuda:sm90"),
        (["net.py:step", "--device", "cuda:sm90", "--all"], 2, "--all"),
        (["net.py:broken", "--device", "cuda:sm90"], 1, "no such weights"),
    ],
)
def test_bad_commands(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *arguments]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# --- nothing is left behind, and nothing is left unsaid -------------------------------------------


@pytest.mark.skipif(not _can_isolate(), reason="this torch counts all compilations of a function")
def test_dry_runs_leave_no_trace_in_dynamo() -> None:
    """Dynamo gives up on a function after eight compilations; these must not count."""
    x = torch.randn(2, 4)
    planned = [
        len(
            kernel_dispatch.dry_run(nn.Sequential(nn.Linear(4, n)), (x,), device="cuda:sm90").graphs
        )
        for n in range(1, 12)
    ]
    assert planned == [1] * 11
    before = torch.get_rng_state()
    kernel_dispatch.dry_run(nn.Dropout(0.5), (x,), device="cuda:sm90")
    assert torch.equal(torch.get_rng_state(), before)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="unified")
    compiled(x)
    (graph,) = kernel_dispatch.report(compiled)
    assert not graph.recompile_reason


def test_no_grad_inside_of_the_function_is_inference() -> None:
    linear = nn.Linear(64, 64, dtype=torch.bfloat16, device="meta")

    @torch.no_grad()
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(linear(q), k, v)

    told = kernel_dispatch.dry_run(decode, step(), device="cuda:sm90", options=OURS)
    assert not told.graphs[0].facts.training
    assert told.regions()[("attention", "triton")] == 1


def test_no_graph_and_graph_breaks_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = kernel_dispatch.dry_run(lambda: 3, device="cuda:sm90")
    assert not nothing.complete
    assert "never called" in str(nothing)

    def talks(x: Tensor) -> Tensor:
        x = x @ x
        print("here")
        return x @ x

    told = kernel_dispatch.dry_run(talks, (torch.randn(8, 8),), device="cuda:sm90")
    assert len(told.graphs) == 2
    assert "graph break: " in str(told)


def test_each_region_has_the_words_of_the_row_that_took_it() -> None:
    if why := torches.no_amd_linker():
        pytest.skip(why)
    few, many = (torch.empty(n, 1024, dtype=torch.bfloat16, device="meta") for n in (1, 4096))
    layer = nn.Linear(1024, 4096, dtype=torch.bfloat16, device="meta")
    options = {"level": "O3", "tolerance": 0.05}
    for x, word in ((few, "int8"), (many, "8-bit floats")):
        torch._dynamo.reset()
        with torch.no_grad():
            told = kernel_dispatch.dry_run(layer, (x,), device="rocm:gfx942", options=options)
        (graph,) = told.graphs
        assert word in graph.regions[0].why
        assert graph.kernels
        assert told.complete, str(told)


def test_without_triton_the_plan_says_that_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton_kernels import _triton, registration

    for module in (_triton, registration):
        monkeypatch.setattr(module, "ABSENT", "triton does not import: gone")
    with torch.no_grad():
        told = kernel_dispatch.dry_run(attend, step(), device="cuda:sm90", options=OURS)
    assert told.graphs[0].kernels
    assert all("gone" in kernel.error for kernel in told.graphs[0].kernels)
    assert not told.complete


@pytest.mark.parametrize("bad", [(5, ()), (nn.Identity(), torch.ones(2))])
def test_what_is_no_call(bad: tuple) -> None:
    with pytest.raises(SettingError, match="a function and a tuple of its arguments"):
        kernel_dispatch.dry_run(*bad, device="cuda:sm90")


def test_a_folder_that_cannot_be_made_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    taken = str(tmp_path / "net.py")
    assert main(["explain", f"{taken}:step", "--device", "cuda:sm90", "--emit", taken]) == 2
    assert f"--emit {taken}" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda:sm90", "xpu:client"])
def test_an_architecture_as_a_forced_device_points_here(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("UNIFIED_DEVICE", device)
    with pytest.raises(SettingError, match="dry_run"):
        kernel_dispatch.explain(torch.relu, torch.ones(2))
