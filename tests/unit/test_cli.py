"""The command line: what it prints where, and with which exit code. `explain` has its own file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_dispatch import __version__, devices, diagnosis
from kernel_dispatch.options import OPTIONS
from lowering import targets, toolchain
from lowering.contract import Probe
from lowering.levels import CONTRACTS
from tests.unit.conftest import Run

pytestmark = pytest.mark.usefixtures("clean_environment")
quick = pytest.mark.quick
slow = pytest.mark.slow


# --- help and usage -------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("command", [[], ["doctor"], ["devices"], ["explain"], ["levels"]])
def test_help(run: Run, command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.code == 0
    assert done.out.startswith("usage: kernel-dispatch")
    assert done.err == ""


@quick
def test_help_has_examples_and_tells_the_exit_codes(run: Run) -> None:
    for arguments in (["--help"], ["explain", "--help"]):
        out = run(*arguments).out
        assert "examples:" in out
        assert "exit code: 0 fine, 1 " in out
    assert "example_inputs" in run("explain", "--help").out


@quick
def test_version(run: Run) -> None:
    assert run("--version") == (0, f"{__version__}\n", "")


@quick
@pytest.mark.parametrize(
    "arguments", [[], ["doctr"], ["doctor", "--jsn"], ["explain"], ["levels", "extra"]]
)
def test_wrong_usage(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "usage:" in done.err


# --- levels, options, devices ---------------------------------------------------------------------


@quick
def test_levels(run: Run) -> None:
    code, text, _ = run("levels")
    records = json.loads(run("levels", "--json").out)
    assert code == 0
    assert [one["level"] for one in records] == [str(one.level) for one in CONTRACTS]
    assert [one["level"] for one in records if one["default"]] == ["O2"]
    for one in CONTRACTS:
        for part in (one.alias, one.may_do, one.numerics, one.compile_time):
            assert part in text
    assert records[1]["numerics"] == CONTRACTS[1].numerics


@quick
def test_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "O9")  # the table tells defaults, whatever is set
    code, text, _ = run("options")
    records = {one["name"]: one for one in json.loads(run("options", "--json").out)}
    assert code == 0
    assert list(records) == [option.name for option in OPTIONS]
    for option in OPTIONS:
        assert records[option.name]["env"] == option.env
        assert option.summary in text
        assert option.accepted in text
    assert records["level"]["default"] == "O2"
    assert records["device"]["default"] == "auto"
    assert records["strict"]["default"] is False


@quick
def test_devices(run: Run) -> None:
    code, text, _ = run("devices")
    records = {one["name"]: one for one in json.loads(run("devices", "--json").out)}
    assert code == 0
    assert list(records) == [target.name for target in targets.known()]
    assert records["cpu"]["available"] is True
    assert "effective_cores" in records["cpu"]["details"]
    for target in targets.known():
        record = records[target.name]
        assert record["available"] or record["reason"]
        assert record["priority"] == target.priority
        assert record["aliases"] == list(target.aliases)
        assert record["proven_on"] == target.proven_on
        assert target.proven_on in text
    assert "\x1b" not in text


@quick
def test_devices_of_another_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"name": "H200", "arch": "sm90", "memory_bytes": 139 << 30}] * 2
    answers = {"cuda": Probe.yes("13.0", device_count=2, devices=cards, features=["sm90"])}
    otherwise = Probe.no("not on this machine", "buy one")
    monkeypatch.setattr(devices, "probe", lambda one: answers.get(one.name, otherwise))
    text = run("devices").out
    assert "cuda  here: 13.0, 2 devices" in text
    card = "name H200, arch sm90, memory_bytes 139.0 GiB"
    assert f"{card}; {card}" in text
    assert "rocm  absent: not on this machine" in text
    assert "buy one" in text


# --- doctor ---------------------------------------------------------------------------------------


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, with a C++ compiler; whether it has one is not the question here."""
    monkeypatch.setattr(toolchain, "probe_deep", lambda: Probe.yes("g++ 1"))


@quick
@pytest.mark.usefixtures("healthy")
def test_doctor(run: Run) -> None:
    done = run("doctor")
    assert done.code == 0, done.out
    assert done.err == ""
    assert "No problems" in done.out
    for name in ("MKL", "oneDNN", "effective", *(one.name for one in targets.known())):
        assert name in done.out


@quick
@pytest.mark.usefixtures("healthy")
def test_doctor_json(run: Run) -> None:
    done = run("doctor", "--json")
    told = json.loads(done.out)
    assert (done.code, told["exit_code"]) == (0, 0)
    sections = {row["section"] for row in told["rows"]}
    assert sections == set(diagnosis._SECTIONS)


@quick
@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("UNIFIED_LEVEL", "O9", "unknown level 'O9' (from UNIFIED_LEVEL)"),
        ("UNIFIED_DEVICE", "neuron", "was forced (from UNIFIED_DEVICE) and is not here"),
        ("UNIFIED_DEVICE", "gpux", "unknown device 'gpux'"),
        ("UNIFIED_THREADS", "many", "threads='many'"),
    ],
)
def test_doctor_fails_for_what_was_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    done = run("doctor")
    assert done.code == 1
    assert said in done.out
    assert f"unset {name}" in done.out
    assert json.loads(run("doctor", "--json").out)["exit_code"] == 1


@quick
@pytest.mark.usefixtures("healthy")
def test_colour_of_the_doctor_follows_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in run("doctor").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in run("doctor").out
    assert "\x1b" not in run("doctor", "--json").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("doctor").out


# --- processes of their own -----------------------------------------------------------------------


def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel_dispatch", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,  # a machine that does something else besides
    )


@quick
def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from kernel_dispatch import cli; "
        "code = cli.main(['levels', '--json']) or cli.main(['explain', '--help']); "
        "sys.exit(code or int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@slow
def test_doctor_on_this_machine_for_real() -> None:
    """Everything is asked, the compiler compiles; what is true of every machine that runs tests."""
    done = process("doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"]
    rows = {row["name"]: row for row in told["rows"]}
    assert not [row for row in told["rows"] if row["section"] == "Not answered"]
    for name in ("model", "ISA", "cores", "memory", "MKL", "oneDNN", "OpenMP", "NNPACK", "ipex"):
        assert rows[name]["text"]
    assert rows["cores"]["details"]["effective"] >= 1
    for one in targets.ours():
        assert rows[one.name]["text"].startswith(("here", "absent: "))
    assert (rows["torch"]["status"], rows['backend="unified"']["status"]) == ("ok", "ok")


@slow
def test_doctor_without_a_compiler() -> None:
    done = process("doctor", CXX="/nonexistent")
    assert done.returncode == 1
    assert "O2 on the CPU generates C++, and cannot here" in done.stdout
    assert "CXX=/nonexistent" in done.stdout
    assert process("doctor", CXX="/nonexistent", UNIFIED_LEVEL="O1").returncode == 0


@slow
def test_doctor_in_an_ascii_terminal_and_into_a_closed_pipe() -> None:
    done = process("doctor", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    assert "+ kernel-dispatch" in done.stdout
    shell = f"{sys.executable} -m kernel_dispatch doctor | head -1"
    piped = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    assert piped.stdout == "Versions\n"
    assert piped.stderr == ""


@slow
@pytest.mark.parametrize("message", ["No module named 'torch'", "libcudart.so.13: missing"])
def test_a_torch_that_does_not_import(tmp_path: Path, message: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise ImportError({message!r})\n")
    done = process("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kernel-dispatch: torch does not import; to repair it: pip")
    assert message in done.stderr
