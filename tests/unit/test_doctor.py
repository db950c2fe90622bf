"""Doctor: what it collects, the text, the JSON. This machine: see test_cli."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_dispatch import devices, doctor
from kernel_dispatch.diagnosis import Facts, Row, diagnose, exit_code
from kernel_dispatch.doctor import collect
from kernel_dispatch.options import OPTIONS
from kernel_dispatch.terminal import Style
from lowering import libraries, machine, targets, toolchain
from lowering.contract import Probe
from lowering.native import library
from tests.unit.toy_facts import NO_COMPILER, replaced, row_of, with_setting

pytestmark = pytest.mark.quick


# --- nothing stops it -----------------------------------------------------------------------------


def test_no_facts_at_all() -> None:
    rows = diagnose(Facts())
    assert doctor.render(rows, Style())
    assert json.loads(doctor.as_json(rows))["exit_code"] == 1  # nothing is registered


@pytest.mark.parametrize(
    ("place", "name", "what"),
    [
        (machine, "cpu", "CPU"),
        (libraries, "libraries", "libraries"),
        (toolchain, "probe_deep", "C++ compiler"),
        (libraries, "thread_advice", "thread advice"),
        (doctor, "triton_status", "triton"),
        (doctor, "torch_window", "torch window"),
        (targets, "known", "targets"),
    ],
)
def test_a_broken_probe_is_a_row(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, what: str
) -> None:
    def broken() -> Any:
        raise OSError("the driver is on fire")

    _without_the_compiler(monkeypatch)
    monkeypatch.setattr(place, name, broken)
    facts = collect({})
    assert facts.failed[what] == "OSError: the driver is on fire"
    rows = diagnose(facts)
    row = next(row for row in rows if row.section == "Not answered" and row.name == what)
    assert "the driver is on fire" in row.text
    assert any(row.section == "Settings" for row in rows)


def test_a_probe_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_the_compiler(monkeypatch)
    monkeypatch.setattr(devices, "probe", lambda target: None)
    found = {one.name: answer for one, answer in collect({}).targets}
    assert not found["cpu"].available
    assert found["cpu"].reason == "its probe gave None, not a lowering.contract.Probe"


# --- collecting -----------------------------------------------------------------------------------


def _without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Really compiling takes a second; one test does it. And what the kernels' own probe made of a
    broken machine would be remembered."""
    monkeypatch.setattr(toolchain, "probe_deep", lambda: Probe.yes("g++ 1"))
    monkeypatch.setattr(library, "probe", lambda: Probe.no("not asked"))


@pytest.fixture(autouse=True)
def fresh_probes() -> Iterator[None]:
    """What a sabotaged machine answered must not be remembered."""
    devices.forget()
    yield
    devices.forget()


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _without_the_compiler(monkeypatch)
    yield


@pytest.mark.usefixtures("quick_probes")
def test_environment_is_read_one_variable_at_a_time() -> None:
    environ = {
        "UNIFIED_LEVEL": "O9",
        "UNIFIED_DISABLE": "inductr",
        "UNIFIED_STRICT": "yes",
        "UNIFIED_LEVLE": "O1",
        "UNIFIED_DEVICE": " ",
    }
    facts = collect(environ)
    by_name = {one.name: one for one in facts.settings}
    assert list(by_name) == [option.name for option in OPTIONS]
    assert "unknown level 'O9' (from UNIFIED_LEVEL)" in by_name["level"].error
    assert "'inductor'" in by_name["disable"].error
    assert (by_name["strict"].value, by_name["strict"].source) == (True, "UNIFIED_STRICT")
    assert (by_name["device"].value, by_name["device"].source) == ("auto", "default")
    assert facts.unknown_variables == {"UNIFIED_LEVLE": "UNIFIED_LEVEL"}
    assert exit_code(diagnose(facts)) == 1


@pytest.mark.usefixtures("quick_probes")
def test_alias_of_a_device_is_resolved() -> None:
    facts = collect({"UNIFIED_DEVICE": "host"})
    assert facts.target == "cpu"
    assert row_of(facts, "device").text == "cpu (from UNIFIED_DEVICE)"


def test_the_window_is_the_one_in_pyproject() -> None:
    assert doctor.torch_window() == ((2, 8), (2, 16))


@pytest.mark.parametrize(
    ("requires", "window"),
    [
        (["torch<2.16,>=2.8"], ((2, 8), (2, 16))),
        (["torch_xla<2.10,>=2.9", "torch (>=2.8,<3.0)"], ((2, 8), (3, 0))),
        (["torch-tpu<2,>=1"], None),
        (['torch<2.9,>=2.8; extra == "ipex"', "torch<2.16,>=2.8"], ((2, 8), (2, 16))),
        (["torch"], None),
        (None, None),
    ],
)
def test_the_window_in_metadata(
    monkeypatch: pytest.MonkeyPatch, requires: list[str] | None, window: Any
) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires)
    assert doctor.torch_window() == window


def test_broken_plugin_and_its_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A plug-in that does not import, as it lies on a user's disk."""
    _without_the_compiler(monkeypatch)
    record = tmp_path / "bad_plugin-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[kernel_dispatch.targets]\nfpga = nosuch:TARGET\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(targets, "broken", {})
    targets.known.cache_clear()
    try:
        row = row_of(collect({}), "fpga")
    finally:
        targets.known.cache_clear()
    assert row.status == "warn"
    assert "ModuleNotFoundError" in row.text
    assert row.fix == "pip install --upgrade bad-plugin, or: pip uninstall -y bad-plugin"


# --- telling --------------------------------------------------------------------------------------


def test_json_is_complete() -> None:
    facts = with_setting("device", "cuda", "UNIFIED_DEVICE")
    rows = diagnose(facts)
    told = json.loads(doctor.as_json(rows))
    assert told["exit_code"] == 1
    assert told["counts"]["problem"] == 1
    assert sum(told["counts"].values()) == len(told["rows"]) == len(rows)
    for row in told["rows"]:
        assert set(row) == {"section", "name", "status", "text", "fix", "details"}
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name["cores"]["details"]["effective"] == 2
    assert by_name["memory"]["details"]["limit_bytes"] == 8 << 30
    assert by_name["cuda"]["details"]["available"] is False
    assert by_name["MKL"]["details"] == {"version": "2024.2", "available": True}
    assert by_name["device"]["details"]["source"] == "UNIFIED_DEVICE"


def test_text_has_every_row_and_every_fix() -> None:
    rows = diagnose(replaced(compiler=NO_COMPILER))
    text = doctor.render(rows, Style())
    for row in rows:
        assert row.text in text
        assert row.fix in text
    assert "fix: apt-get install -y g++" in text
    assert "to get it: pip install CUDA" in text
    assert "1 problem." in text
    assert "\x1b" not in text


def test_text_is_ascii_where_it_must_be() -> None:
    text = doctor.render(diagnose(replaced(compiler=NO_COMPILER)), Style(unicode=False))
    assert text.isascii()
    assert "  x C++ compiler" in text


def test_lines_are_wrapped_on_a_terminal_but_never_a_fix() -> None:
    fix = "pip install " + "some-long-package-name " * 8
    row = Row("Targets", "cuda", "info", "a word-with-hyphens " * 12, fix.strip())
    lines = doctor.render([row], Style(width=60)).splitlines()
    told = [line for line in lines if "hyphens" in line]
    assert len(told) > 2
    assert max(map(len, told)) <= 60
    assert not any(line.endswith("-") for line in told)
    assert any(line.endswith(f"to get it: {fix.strip()}") for line in lines)


def test_many_lines_of_a_compiler_stay_one_row() -> None:
    row = Row("Code generators", "C++ compiler", "problem", "cc1plus:\n  error\n  stop")
    assert "cc1plus: error stop" in doctor.render([row], Style())
