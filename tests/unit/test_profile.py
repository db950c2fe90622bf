"""Machine profiles and priors as data: what they rank, what is read back, what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lowering.prior import EXPECTATIONS, prior
from lowering.profile import (
    SCHEMA,
    SHAPES,
    Conditions,
    MachineProfile,
    RateKey,
    conv_shape,
    from_text,
    gemm_shape,
)
from tests.unit.toy_facts import CPU

pytestmark = pytest.mark.quick

CONDITIONS = Conditions(
    cpu="toy CPU", vendor="amd", isa=("avx2",), cores=2, threads=2, torch="2.13.0"
)
RATES = {
    RateKey("gemm", "mkl", "float32", "large"): 146.0,
    RateKey("gemm", "mkldnn", "float32", "large"): 209.0,
    RateKey("gemm", "eager", "float32", "large"): 100.0,
    RateKey("gemm", "mkl", "float32", "vector"): 18.0,
    RateKey("conv", "mkldnn", "float32", "spatial"): 210.0,
}
PROFILE = MachineProfile(
    CONDITIONS, RATES, 33.1, 31.5, 1.2, 0.01, 2.5, "2026-01-01T00:00:00+00:00", ("a note",)
)


def test_faster_first() -> None:
    assert PROFILE.faster("gemm", "float32", "large") == ["mkldnn", "mkl", "eager"]
    assert PROFILE.faster("gemm", "float32", "vector") == ["mkl"]
    assert PROFILE.faster("gemm", "bfloat16", "large") == []


def test_speedup() -> None:
    key = RateKey("gemm", "mkldnn", "float32", "large")
    assert PROFILE.speedup(key) == pytest.approx(2.09)
    assert PROFILE.speedup(key, over="mkl") == pytest.approx(209 / 146)
    assert PROFILE.speedup(key, over="nobody") is None
    assert PROFILE.speedup(key._replace(shape="vector")) is None


def test_a_profile_survives_its_file() -> None:
    text = json.dumps(PROFILE.as_dict())
    assert from_text(text) == (PROFILE, "")
    assert json.loads(text)["schema"] == SCHEMA


def changed(**parts: Any) -> str:
    return json.dumps({**PROFILE.as_dict(), **parts})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "must be integers"),
        ("{}", "'schema' is missing"),
        ("null", "not subscriptable"),
        ("[" * 100_000, "recursion"),
        (changed(schema=SCHEMA + 1), f"schema is {SCHEMA + 1}"),
        (changed(conditions={}), "'cpu' is missing"),
        (changed(conditions=None), "not subscriptable"),
        (changed(rates=[{"kind": "gemm"}]), "'provider' is missing"),
        (changed(rates=7), "not iterable"),
        (changed(read_gbs="fast"), "'fast' is not a number"),
        (changed(copy_gbs=True), "True is not a number"),
        (changed(call_us=float("nan")), "not a measured number"),
        (changed(seconds=-1), "not a measured number"),
        (changed(seconds=10**400), "too large"),
        (changed(date=1), "1 is not a text"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_reason(text: str, why: str) -> None:
    profile, said = from_text(text)
    assert profile is None
    assert "it is no machine profile" in said
    assert why in said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cpu", "other CPU", "on other CPU"),
        ("isa", (), "with another instruction set"),
        ("cores", 3, "on 3 cores"),
        ("threads", 1, "with 1 threads"),
        ("torch", "2.14.0", "with torch 2.14.0"),
        ("candidates", "new", "with other kernels"),
    ],
)
def test_each_condition_counts(name: str, value: Any, words: str) -> None:
    other = dataclasses.replace(CONDITIONS, **{name: value})
    assert other.fingerprint() != CONDITIONS.fingerprint()
    assert other.differences(CONDITIONS) == [words]
    assert CONDITIONS.differences(CONDITIONS) == []


def test_shape_classes() -> None:
    assert [gemm_shape(rows) for rows in (0, 1, 2, 8, 32, 33, 4096)] == (
        ["vector"] * 2 + ["small"] * 3 + ["large"] * 2
    )
    assert conv_shape((1, 1), 1, 64) == "pointwise"
    assert conv_shape((3, 3), 1, 64) == "spatial"
    assert conv_shape((1, 3), 1, 64) == "spatial"
    assert conv_shape((3, 3), 64, 64) == "depthwise"
    assert conv_shape((3, 3), 4, 64) == "spatial"
    assert conv_shape((1, 1), 1, 1) == "pointwise"


def test_a_disturbed_profile_says_so() -> None:
    assert not PROFILE.disturbed
    assert dataclasses.replace(PROFILE, busy=0.6).disturbed


# --- without a profile ----------------------------------------------------------------------------


def ranked(vendor: str, isa: str, dtype: str = "float32", shape: str = "large") -> list[str]:
    cpu = dataclasses.replace(CPU, vendor=vendor, isa=frozenset(isa.split()))
    return prior(cpu).faster("gemm", dtype, shape)


def test_priors_of_known_cpus() -> None:
    assert ranked("amd", "avx2 avx512f")[:2] == ["openmp", "mkldnn"]
    assert ranked("amd", "avx2 avx512f", shape="vector")[:2] == ["openmp", "mkldnn"]
    for level in (ranked("amd", "avx2"), ranked("intel", "avx2 avx512f")):
        assert [one for one in level if one != "openmp"] == ["mkl", "mkldnn", "eager"]
    assert ranked("arm", "neon") == ["mkldnn", "eager"]
    assert ranked("arm", "neon", dtype="bfloat16") == []
    assert ranked("arm", "neon bf16", dtype="bfloat16") == ["mkldnn", "eager"]
    with_tiles = "avx2 avx512f avx512_bf16 amx_bf16"
    assert ranked("intel", with_tiles, dtype="bfloat16") == ["openmp", "mkldnn", "eager"]
    assert ranked("", "") == []


def test_a_prior_answers_as_a_profile_does() -> None:
    cpu = dataclasses.replace(CPU, vendor="intel", isa=frozenset({"avx2"}))
    key = RateKey("gemm", "mkl", "float32", "large")
    known = prior(cpu)
    assert known.speedup(key) == 1.0
    assert known.speedup(key, over="mkldnn") == 1.0
    assert known.speedup(key._replace(provider="nobody")) is None
    assert known.speedup(key._replace(dtype="int8")) is None
    assert "Intel" in known.why("gemm", "float32", "large")
    assert known.why("gemm", "int8", "large") == ""
    assert known.faster("nothing", "float32", "large") == []


@pytest.mark.parametrize("one", EXPECTATIONS, ids=lambda one: f"{one.kind}-{one.dtype}")
def test_every_expectation_names_real_shapes_and_a_reason(one: Any) -> None:
    assert set(one.shapes) <= set(SHAPES[one.kind])
    assert one.why
    assert one.multiples
