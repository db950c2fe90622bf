"""Doctor: every status from injected facts, the exit code, the JSON. This machine: see test_cli."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_dispatch import devices, doctor
from kernel_dispatch.doctor import BACKEND, Facts, Row, Setting, collect, diagnose, exit_code
from kernel_dispatch.settings import OPTIONS
from kernel_dispatch.terminal import Style
from lowering import machine, targets
from lowering.contract import Probe, Provider, Target
from triton_kernels.availability import TritonStatus

pytestmark = pytest.mark.quick

OURS = f"{BACKEND} from kernel-dispatch 0.1.0"
CPU = machine.CpuFacts(
    vendor="amd",
    model="AMD EPYC 9654",
    isa=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    logical_cores=96,
    affinity_cores=16,
    cgroup_cores=2.5,
    effective_cores=2,
    memory_bytes=64 << 30,
    memory_limit_bytes=8 << 30,
)


def target(name: str, found: Probe, priority: int = 10) -> tuple[Target, Probe]:
    return Target(name, f"toy {name}", (name,), lambda: found, (), priority=priority), found


def provider(name: str, found: Probe) -> tuple[Provider, Probe]:
    return Provider(name, f"toy {name}", lambda: found), found


def setting(name: str, value: Any, source: str = "default", error: str = "") -> Setting:
    env = next(option.env for option in OPTIONS if option.name == name)
    return Setting(name, env, value, source, error)


HEALTHY = Facts(
    python="3.11.7",
    torch="2.13.0+cpu",
    window=((2, 8), (2, 16)),
    entry_points=(OURS,),
    cpu=CPU,
    threads=2,
    libraries=(
        machine.Library("torch", "2.13.0", "CPU kernels: AVX512"),
        machine.Library("MKL", "2024.2", "BLAS of this build: mkl"),
        machine.Library("NNPACK", "", "not in this build of torch", available=False),
    ),
    compiler=Probe.yes("g++ 12.2.0", compiler="/usr/bin/g++"),
    triton=TritonStatus(False, "", False, False, "", "triton does not import"),
    targets=(
        target("cuda", Probe.no("this torch is a CPU build", "pip install CUDA")),
        target("cpu", Probe.yes("AMD EPYC")),
    ),
    providers=(
        provider("eager", Probe.yes("2.13.0")),
        provider("mkldnn", Probe.no("built without")),
    ),
    ipex=Probe.no("IPEX is not installed, and nothing is missing"),
    settings=(
        setting("level", "O2"),
        setting("device", "auto"),
        setting("strict", False),
        setting("disable", []),
        setting("threads", None),
    ),
)


def with_setting(name: str, value: Any, source: str = "env", error: str = "", **more: Any) -> Facts:
    kept = tuple(one for one in HEALTHY.settings if one.name != name)
    changed = (*kept, setting(name, value, source, error))
    return dataclasses.replace(HEALTHY, settings=changed, **more)


def replaced(**more: Any) -> Facts:
    return dataclasses.replace(HEALTHY, **more)


def rows_of(facts: Facts) -> dict[str, Row]:
    return {row.name: row for row in diagnose(facts)}


def row_of(facts: Facts, name: str) -> Row:
    return rows_of(facts)[name]


NO_COMPILER = Probe.no("no working C++ compiler (CXX=/nonexistent)", "apt-get install -y g++")


# --- what is a problem, and what is not -----------------------------------------------------------


def test_a_healthy_machine_without_a_gpu_has_no_problem_and_no_warning() -> None:
    rows = diagnose(HEALTHY)
    assert {row.status for row in rows} == {"ok", "info"}
    assert exit_code(rows) == 0
    gpu = row_of(HEALTHY, "cuda")
    assert (gpu.status, gpu.text) == ("info", "absent: this torch is a CPU build")
    assert gpu.fix == "pip install CUDA"


@pytest.mark.parametrize(
    ("facts", "name", "said", "fix"),
    [
        (replaced(torch="2.7.1"), "torch", "outside", 'pip install "torch>=2.8,<2.16"'),
        (replaced(torch="2.16.0"), "torch", "outside", 'pip install "torch>=2.8,<2.16"'),
        (replaced(torch="3.0.0"), "torch", "outside", 'pip install "torch>=2.8,<2.16"'),
        (replaced(torch="parrot"), "torch", "outside", 'pip install "torch>=2.8,<2.16"'),
        (replaced(entry_points=()), 'backend="unified"', "not registered", "pip install"),
        (
            replaced(entry_points=(OURS, "them:unified from other-pkg 2.0")),
            'backend="unified"',
            "registered 2 times",
            "pip uninstall -y other-pkg",
        ),
        (
            replaced(entry_points=("them:unified from other-pkg 2.0",)),
            'backend="unified"',
            "somebody else",
            "pip uninstall -y other-pkg",
        ),
        (replaced(compiler=NO_COMPILER), "C++ compiler", "CXX=/nonexistent", "apt-get"),
        (with_setting("level", "O3", compiler=NO_COMPILER), "C++ compiler", "O3 on the CPU", "apt"),
        (
            with_setting("device", "cpu", compiler=NO_COMPILER),
            "C++ compiler",
            "generates C++",
            "apt-get",
        ),
        (
            with_setting("device", "cuda", "UNIFIED_DEVICE"),
            "device",
            "forced (from UNIFIED_DEVICE) and is not here: this torch is a CPU build. "
            "Available: cpu.",
            "unset UNIFIED_DEVICE, or: pip install CUDA",
        ),
        (with_setting("device", "cpu:1", "UNIFIED_DEVICE"), "device", "has 1 device(s)", "unset"),
        (
            with_setting("level", "O9", "UNIFIED_LEVEL", "unknown level 'O9'"),
            "level",
            "unknown level 'O9'",
            "unset UNIFIED_LEVEL",
        ),
    ],
)
def test_problems(facts: Facts, name: str, said: str, fix: str) -> None:
    row = row_of(facts, name)
    assert row.status == "problem"
    assert said in row.text
    assert fix in row.fix
    rows = diagnose(facts)
    assert [one.name for one in rows if one.status == "problem"] == [name]
    assert exit_code(rows) == 1


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0a0+git1", "2.15.9+cu130", "2.9.1"])
def test_torch_within_the_window(version: str) -> None:
    assert row_of(replaced(torch=version), "torch").status == "ok"


@pytest.mark.parametrize(
    ("facts", "name", "said"),
    [
        (with_setting("level", "O1", compiler=NO_COMPILER), "C++ compiler", "no working"),
        (with_setting("disable", ["inductor"], compiler=NO_COMPILER), "C++ compiler", "no working"),
        (replaced(window=None), "torch", "in no package metadata"),
        (replaced(thread_advice="torch uses 8 threads"), "torch threads", "torch uses 8 threads"),
        (replaced(broken_targets={"fpga": ("ImportError: x", "bad")}), "fpga", "ImportError: x"),
        (replaced(unknown_variables={"UNIFIED_LEVLE": "UNIFIED_LEVEL"}), "UNIFIED_LEVLE", "mean U"),
        (replaced(unknown_variables={"UNIFIED_ZZ": ""}), "UNIFIED_ZZ", "accepted: UNIFIED_LEVEL"),
        (replaced(failed={"libraries": "OSError: x"}), "libraries", "not be asked: OSError: x"),
        (
            replaced(ipex=Probe.no("IPEX 2.8.0 is ignored", "pip uninstall", version="2.8.0")),
            "ipex",
            "IPEX 2.8.0 is ignored",
        ),
        (
            replaced(targets=(target("xla", Probe.no("torch_xla 2.9 no", torch_xla="2.9.0")),)),
            "xla",
            "torch_xla 2.9 no",
        ),
        (
            replaced(targets=(target("cuda", Probe.yes("13.0", notes=["two tritons"])),)),
            "cuda",
            "two tritons",
        ),
        (
            replaced(
                triton=TritonStatus(True, "3.6", True, False, "other-kernels", ""),
            ),
            "triton_kernels",
            "other-kernels provides",
        ),
    ],
)
def test_warnings_do_not_fail(facts: Facts, name: str, said: str) -> None:
    rows = diagnose(facts)
    row = next(row for row in rows if row.name == name)
    assert row.status == "warn"
    assert said in row.text
    assert exit_code(rows) == 0


def test_ipex_fix_and_foreign_kernels_fix_are_commands() -> None:
    ipex = Probe(False, "ignored", version="2.8.0", fix="pip uninstall -y ipex")
    foreign = TritonStatus(True, "3.6", True, False, "other-a, other-b", "")
    rows = rows_of(replaced(ipex=ipex, triton=foreign))
    assert (rows["ipex"].status, rows["ipex"].fix) == ("warn", "pip uninstall -y ipex")
    assert rows["triton_kernels"].fix.startswith("pip uninstall -y other-a other-b && pip install")


def test_no_compiler_is_no_problem_where_an_accelerator_takes_the_graphs() -> None:
    gpu = target("cuda", Probe.yes("13.0", device_count=2), priority=60)
    facts = replaced(targets=(gpu, *HEALTHY.targets[1:]), compiler=NO_COMPILER)
    assert facts.target == "cuda"
    assert row_of(facts, "C++ compiler").status == "warn"
    assert row_of(facts, "cuda").text == "here: 13.0, 2 devices"
    assert row_of(facts, "Triton").status == "warn"  # a GPU without Triton
    assert row_of(HEALTHY, "Triton").status == "info"  # no GPU: nobody needs it


def test_a_forced_index_beyond_the_devices() -> None:
    gpu = target("cuda", Probe.yes("13.0", device_count=2), priority=60)
    beyond = with_setting("device", "cuda:2", "UNIFIED_DEVICE", targets=(gpu,))
    within = with_setting("device", "cuda:1", "UNIFIED_DEVICE", targets=(gpu,))
    assert "cuda has 2 device(s), numbered from 0" in row_of(beyond, "device").text
    assert row_of(beyond, "device").status == "problem"
    assert row_of(within, "device").status == "ok"


def test_a_bad_level_does_not_hide_the_compiler() -> None:
    facts = with_setting("level", "O9", "UNIFIED_LEVEL", "unknown level", compiler=NO_COMPILER)
    problems = {row.name for row in diagnose(facts) if row.status == "problem"}
    assert problems == {"level", "C++ compiler"}


# --- what the rows tell ---------------------------------------------------------------------------


def test_cpu_rows() -> None:
    rows = rows_of(HEALTHY)
    assert rows["model"].text == "AMD EPYC 9654 (amd)"
    assert rows["ISA"].text == "avx2 avx512_bf16 avx512f"
    assert rows["cores"].text == (
        "2 effective (96 logical, 16 by affinity, cgroup quota 2.5 cores)"
    )
    assert rows["memory"].text == "64.0 GiB, cgroup limit 8.0 GiB"
    assert rows["CPU kernels"].text == "AVX512"
    assert rows["MKL"].text == "2024.2 (BLAS of this build: mkl)"
    assert rows["NNPACK"].status == "info"


@pytest.mark.parametrize(
    ("isa", "bf16", "fp16"),
    [
        ({"avx2"}, "info", "info"),
        ({"avx512_bf16"}, "ok", "info"),
        ({"amx_bf16", "avx512_fp16"}, "ok", "ok"),
        ({"amx_fp16"}, "info", "ok"),
        ({"neon", "bf16", "asimdhp"}, "ok", "ok"),
        ({"neon"}, "info", "info"),
    ],
)
def test_reduced_precision_is_native_or_emulated(isa: set[str], bf16: str, fp16: str) -> None:
    rows = rows_of(replaced(cpu=dataclasses.replace(CPU, isa=frozenset(isa))))
    assert (rows["bfloat16"].status, rows["float16"].status) == (bf16, fp16)
    for row in (rows["bfloat16"], rows["float16"]):
        assert ("native" if row.status == "ok" else "emulated") in row.text
    if "neon" in isa and bf16 == "info":
        assert "avx512" not in rows["bfloat16"].text


def test_disabled_provider_is_named() -> None:
    row = row_of(with_setting("disable", ["eager"], "UNIFIED_DISABLE"), "eager")
    assert row.status == "info"
    assert row.text.startswith("disabled by you")


def test_settings_tell_their_source_and_one_is_not_true() -> None:
    facts = with_setting("threads", 1, "UNIFIED_THREADS")
    assert row_of(facts, "threads").text == "1 (from UNIFIED_THREADS)"
    assert row_of(facts, "strict").text == "false (from default)"


# --- nothing stops it -----------------------------------------------------------------------------


def test_facts_of_an_unexpected_shape_cost_their_section_only() -> None:
    odd = target("cuda", Probe.yes("13.0", notes=7))
    rows = diagnose(replaced(targets=(odd,)))
    assert any(row.section == "Targets" and "could not be shown" in row.text for row in rows)
    assert any(row.section == "Settings" for row in rows)
    assert exit_code(rows) == 0


def test_no_facts_at_all() -> None:
    rows = diagnose(Facts())
    assert doctor.render(rows, Style())
    assert json.loads(doctor.as_json(rows))["exit_code"] == 1  # nothing is registered


@pytest.mark.parametrize(
    ("place", "name", "what"),
    [
        (machine, "cpu", "CPU"),
        (machine, "libraries", "libraries"),
        (machine, "toolchain_deep", "C++ compiler"),
        (machine, "thread_advice", "thread advice"),
        (doctor, "triton_status", "triton"),
        (doctor, "ipex_status", "ipex"),
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
    """Really compiling takes a second; one test does it."""
    monkeypatch.setattr(machine, "toolchain_deep", lambda: Probe.yes("g++ 1"))


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
