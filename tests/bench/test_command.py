"""The command line of bench: what it takes, and one clear line for what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_dispatch.bench import storing
from kernel_dispatch.bench.views import drawing
from kernel_dispatch.cli import main
from tests.bench.made_up import refused, row, run

MODEL = """
import os
import signal

import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()).eval()
    return model, (torch.randn(4, 16),)

def broken():
    raise ValueError("planted")

def interrupts():
    os.kill(os.getppid(), signal.SIGINT)
    return make()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is the user's own, with a model in it."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name a TARGET, module:function or a built-in workload (--list)"),
        (["text-encodr"], "unknown workload 'text-encodr'. Did you mean 'text-encoder'?"),
        (["cnn", "--backends", "inductr"], "unknown backend 'inductr' (from --backends). Did you"),
        (["cnn", "--levels", "O4"], "unknown level 'O4' (from --levels). Did you mean 'O3'?"),
        (["cnn", "--dtype", "float31"], "unknown dtype 'float31' (from --dtype). Did you mean"),
        (["cnn", "--devices", "cpu:7"], "there is no device 'cpu:7' here (from --devices). Here: "),
        (["cnn", "--devices", "quantum"], "unknown device 'quantum' (from --devices)"),
        (["cnn", "--threads", "0"], "'0' is not a number of threads"),
        (["cnn", "--seconds", "0"], "--seconds and --timeout want a number above 0"),
        (["cnn", "--json", "nowhere/x.json"], "cannot write 'nowhere/x.json': No such"),
        (["cnn", "--csv", "examples"], "cannot write 'examples': Is a directory"),
        (
            ["cnn", "--plots", "examples/my_model.py"],
            "cannot make the folder 'examples/my_model.py'",
        ),
        (["cnn", "--timeout", "inf"], "--seconds and --timeout want a number above 0, up to"),
        (["cnn", "--fail-on", "5%"], "unrecognized arguments: --fail-on 5%"),
    ],
)
def test_bad_arguments(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert text in shown.err and shown.out == ""
    assert "Traceback" not in shown.err


@pytest.mark.quick
def test_without_a_checkout_core_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kernel_dispatch.bench.catalogue._CHECKOUT", tmp_path)
    for target in ("core", "text-encoder"):
        assert main(["bench", target]) == 2
        shown = capsys.readouterr().err
        assert "the project's checkout" in shown and "module:function" in shown


@pytest.mark.quick
def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("text-encoder (core)", "hf-bert", "five-ops", "unified-O3", "onnxruntime"):
        assert f" {name}: " in shown


@pytest.mark.quick
def test_show_writes_every_form(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(row(contender="eager", ms=20), row(), refused("net", "zen", "missing", "no zen"))
    Path("a.json").write_text(storing.to_json(result))
    outputs = ["--csv", "a.csv", "--html", "a.html", "--plots", "plots"]
    assert main(["bench", "show", "a.json", *outputs]) == 0
    shown = capsys.readouterr().out
    assert "unified-O2  10.0 ms" in shown and "zen: no zen" in shown
    assert "net,unified-O2,ok" in Path("a.csv").read_text()
    assert "no zen" in Path("a.html").read_text()
    assert "<svg" in Path("plots/speedup.svg").read_text()
    assert Path("plots/roofline.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "show", "a.json", "--markdown"]) == 0
    assert "| net | 20 (1.00x) | 10 (2.00x) | - |" in capsys.readouterr().out

    def no_png(svg: str) -> bytes:
        raise drawing.DrawingError("planted: no resvg")

    monkeypatch.setattr(drawing, "png", no_png)
    assert main(["bench", "show", "a.json", "--plots", "others"]) == 0
    assert "only SVG was written: planted: no resvg" in capsys.readouterr().err
    assert sorted(p.name for p in Path("others").iterdir()) == ["roofline.svg", "speedup.svg"]


# What a shell starts in the background is told to ignore interruptions, and tells its children.
HEEDING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kernel_dispatch.cli import main
sys.exit(main())
"""


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEEDING, "bench", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


@pytest.mark.slow
def test_a_model_in_the_users_own_file(folder: Path) -> None:
    options = ["--backends", "eager,unified", "--levels", "O0,O1", "--seconds", "0.01"]
    done = bench(folder, "examples.my_model:make", *options, "--json", "a.json", "--threads", "1")
    assert done.returncode == 0, done.stderr
    for name in ("eager", "unified-O0", "unified-O1"):
        assert f"\n{name} " in done.stdout
    loaded = storing.load(str(folder / "a.json"))
    assert [one.status for one in loaded.rows] == ["ok"] * 3
    assert loaded.settings["threads"] == loaded.machine["threads"] == 1
    assert "examples.my_model:make" in done.stderr, "it tells what it is doing"
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_mistakes_in_the_users_own_file(folder: Path) -> None:
    # The mistake is in the second target: it is told before the first one is measured.
    wrong_name = bench(folder, "examples.my_model:make", "examples.my_model:mak")
    assert wrong_name.returncode == 2 and wrong_name.stdout == ""
    last = wrong_name.stderr.strip().splitlines()[-1]
    assert "examples.my_model has no 'mak'. Did you mean 'make'?" in last
    broken = bench(folder, "examples.my_model:broken", "--backends", "eager")
    assert broken.returncode == 1
    assert "ValueError: planted" in broken.stdout


@pytest.mark.slow
def test_what_was_measured_before_an_interruption_is_not_lost(folder: Path) -> None:
    options = ["--backends", "eager", "--seconds", "0.01", "--threads", "1", "--json", "a.json"]
    names = ("make", "interrupts", "broken")
    stopped = bench(folder, *(f"examples.my_model:{name}" for name in names), *options)
    assert stopped.returncode == 130
    last = stopped.stderr.strip().splitlines()[-1]
    left = "examples.my_model:interrupts, examples.my_model:broken"
    assert last == f"kernel-dispatch: interrupted; not measured: {left}"
    loaded = storing.load(str(folder / "a.json"))
    assert [(one.workload, one.status) for one in loaded.rows] == [("examples.my_model:make", "ok")]
    assert loaded.settings["left_out"] == left.split(", ")
    assert "examples.my_model:make" in stopped.stdout
    nothing = bench(folder, "examples.my_model:interrupts", *options)
    assert nothing.returncode == 130 and nothing.stdout == ""
    assert nothing.stderr.strip().splitlines()[-1] == "kernel-dispatch: interrupted"
