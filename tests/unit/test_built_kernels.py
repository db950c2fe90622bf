"""Kernels that are built before the suite are those that its workers look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import built_kernels
from tests.support.built_kernels import STORE


def test_they_lie_where_every_worker_looks(
    kernels_of_earlier_runs: Path, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getini("cache_dir") != ".pytest_cache":
        pytest.skip("this run keeps its cache elsewhere")
    assert kernels_of_earlier_runs == STORE


def test_only_an_answer_of_this_machine_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_kernels, "ANSWER", tmp_path / "answer")
    assert built_kernels.believed() == {}
    built_kernels.ANSWER.write_text(built_kernels._here())
    assert built_kernels.believed() == {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
    built_kernels.ANSWER.write_text("1.0 on another CPU")
    assert built_kernels.believed() == {}
