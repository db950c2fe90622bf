"""Every status from facts that are handed in, and what the rows tell."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_dispatch.diagnosis import Facts, diagnose, exit_code
from lowering.contract import Probe
from tests.unit.toy_facts import (
    CPU,
    HEALTHY,
    NO_COMPILER,
    OURS,
    provider,
    replaced,
    row_of,
    rows_of,
    target,
    with_setting,
)
from triton_kernels.availability import TritonStatus

pytestmark = pytest.mark.quick


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
            replaced(
                providers=(provider("ipex", Probe.no("IPEX 2.8.0 is ignored", installed="2.8.0")),)
            ),
            "ipex",
            "IPEX 2.8.0 is ignored",
        ),
        (
            replaced(targets=(target("xla", Probe.no("torch_xla 2.9 no", installed="2.9.0")),)),
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
    ipex = provider("ipex", Probe.no("ignored", "pip uninstall -y ipex", installed="2.8.0"))
    foreign = TritonStatus(True, "3.6", True, False, "other-a, other-b", "")
    rows = rows_of(replaced(providers=(ipex,), triton=foreign))
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
