"""Kernels that are built before the suite are those that its workers look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowering.contract import Probe
from tests.support import built_kernels
from tests.support.built_kernels import CACHE, believed, store_in


def test_they_lie_where_every_worker_looks(
    kernels_of_earlier_runs: Path, pytestconfig: pytest.Config
) -> None:
    own = pytestconfig.getini("cache_dir")
    assert kernels_of_earlier_runs == store_in(CACHE if own == ".pytest_cache" else Path(own))


def test_what_was_built_from_the_same_is_taken_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_kernels.toolchain, "probe", lambda: Probe.yes("any"))
    monkeypatch.setattr(built_kernels.library, "fingerprint", lambda: "same")
    cache, store = tmp_path / "cache", tmp_path / "store"
    cache.mkdir()
    (cache / "kernels_other.so").write_text("another")
    built_kernels._take_from(cache, store)
    assert not store.exists()
    (cache / "kernels_same.so").write_text("this")
    built_kernels._take_from(cache, store)
    assert {file.name: file.read_text() for file in store.iterdir()} == {"kernels_same.so": "this"}


def test_only_an_answer_of_this_machine_is_believed(tmp_path: Path) -> None:
    store, answer = tmp_path / "kernels", tmp_path / "instruction_sets"
    assert believed(store) == {}
    answer.write_text(built_kernels._here())
    assert believed(store) == {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
    answer.write_text("1.0 on another CPU")
    assert believed(store) == {}
