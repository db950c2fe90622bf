"""`kernel-dispatch profile`: what a region took, and what none takes yet, by time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_dispatch import cli
from kernel_dispatch.profiling import read
from kernel_dispatch.reporting import Report
from tests.support.compiling import size_limits_lifted

SHOP = """
import torch

def build():
    model = torch.nn.Conv2d(16, 16, 3).eval().requires_grad_(False)
    return (lambda x: torch.sort(model(x)).values), (torch.randn(1, 16, 18, 18),)

def boom():
    raise ValueError("bad stock")

def nothing():
    return 3
"""
SCRIPT = """
import torch
import kd_profiled

fn, args = kd_profiled.build()
compiled = torch.compile(fn, backend="unified")
for _ in range(3):
    compiled(*args)
torch.randn(64, 64).cumsum(0)
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    (tmp_path / "kd_profiled.py").write_text(SHOP)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str) -> tuple[int, str, str]:
        with size_limits_lifted():
            code = cli.main(["profile", *arguments])
        return code, *capfd.readouterr()

    return run


def _names(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def test_s003_20_profile_lists_what_no_region_takes(run: Any) -> None:
    """`profile` runs a model under torch's profiler and lists, by time, the regions with their
    providers and the operators that no region took."""
    code, out, _ = run("kd_profiled:build", "--level", "O1", "--calls", "4", "--json")
    told = json.loads(out)
    assert (code, told["calls"], told["clock"]) == (0, 4, "cpu")
    region = _names(told["region"])["convolution"]
    assert (region["provider"], region["runs"]) == ("mkldnn", 4)
    outside = _names(told["outside"])
    assert outside["aten::sort"]["runs"] == 4
    assert "aten::convolution" not in outside
    times = [row["microseconds"] for row in told["outside"]]
    assert times == sorted(times, reverse=True)
    assert sum(told["shares"].values()) == pytest.approx(1.0)
    code, out, _ = run("kd_profiled:build", "--level", "O1", "--top", "1", "--calls", "2")
    assert code == 0
    assert "convolution by mkldnn" in out
    assert "operators outside of any region" in out


def test_s003_20_profile_of_a_script(run: Any) -> None:
    code, out, _ = run("script.py", "--level", "O1", "--json")
    told = json.loads(out)
    assert (code, told["calls"]) == (0, None)
    assert _names(told["region"])["convolution"]["runs"] == 3
    assert "aten::cumsum" not in _names(told["outside"]), "it ran outside of compiled code"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["kd_profiled:bild"], 2, "Did you mean 'build'"),
        (["kd_profiled:build", "--top", "0"], 2, "--top '0'"),
        (["kd_profiled:build", "--level", "O7"], 2, "unknown level 'O7'"),
        (["kd_profiled:build", "--device", "cuda"], 2, "cuda"),
        (["kd_profiled:build", "--all"], 2, "--all is for scripts"),
        (["kd_profiled:boom"], 1, "bad stock"),
        (["kd_profiled:nothing"], 1, "never-called"),
    ],
)
def test_s003_20_errors_and_exit_codes(
    run: Any, arguments: list[str], code: int, text: str
) -> None:
    found, out, err = run(*arguments)
    assert found == code
    assert text in out + err


class Event:
    """As torch's profiler gives them."""

    device_type: Any = None

    def __init__(self, name: str, cpu: float, device: float = 0.0, parent: Any = None) -> None:
        import torch

        self.name, self.cpu_parent = name, parent
        self.self_cpu_time_total, self.self_device_time_total = cpu, device
        self.device_type = torch._C._autograd.DeviceType.CPU


@pytest.mark.quick
@pytest.mark.status(
    "met, not run on hardware: attribution of GPU time was tested on made-up events"
)
def test_s003_20_time_of_a_gpu() -> None:
    graph = Event("## Call CompiledFxGraph abc", 50.0, 30.0)
    ours = Event("triton_kernels::attention", 5.0, 20.0, graph)
    events = [
        Event("Torch-Compiled Region: 0/0", 100.0),
        graph,
        ours,
        Event("aten::empty", 3.0, 0.0, ours),
        Event("aten::mm", 9.0, 40.0, graph),
        Event("kernel_dispatch::row_major", 9.0, 10.0, graph),
    ]
    found = read(events, Report(), 1)
    assert found.microseconds == 100.0
    told = {(row.kind, row.name): (row.provider, row.microseconds) for row in found.rows}
    assert told["region", "attention"] == ("triton", 20.0)
    assert told["generated", "kernels of a graph"] == ("inductor", 30.0)
    assert told["outside", "aten::mm"] == ("", 40.0)
    assert told["outside", "kernel_dispatch::row_major"] == ("", 10.0)
