"""The libraries that this torch was built with, and the advice about threads."""

from __future__ import annotations

import pytest
import torch

from lowering import libraries
from lowering.providers import mkldnn

pytestmark = pytest.mark.quick


def test_libraries_agree_with_torch() -> None:
    found = {library.name: library for library in libraries.libraries()}
    assert found["oneDNN"].available == torch.backends.mkldnn.is_available()
    assert found["MKL"].available == torch.backends.mkl.is_available()
    assert torch.backends.cpu.get_cpu_capability() in found["torch"].detail
    if found["oneDNN"].available:
        assert f"v{found['oneDNN'].version}" in torch.__config__.show()


def test_the_mkldnn_provider_tells_the_version_of_onednn() -> None:
    found = mkldnn.probe()
    listed = next(library for library in libraries.libraries() if library.name == "oneDNN")
    assert found.version == (listed.version if found.available else "")
    assert found.version != torch.__version__


def test_an_absent_library_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    absent = next(library for library in libraries.libraries() if library.name == "oneDNN")
    assert (absent.available, absent.version) == (False, "")


def test_thread_advice() -> None:
    advice = libraries.thread_advice
    assert advice(4, 4, {}) == ""
    assert advice(4, 8, {}) == "", "torch takes physical cores only, which is no mistake"
    assert "oversubscribed" in advice(8, 2, {})
    assert "OMP_NUM_THREADS=2" in advice(8, 2, {})
    assert "container image" in advice(1, 8, {"OMP_NUM_THREADS": "1"})
    assert advice(1, 8, {}) == "", "one thread by the user's own call"


def test_thread_advice_shares_cores_between_local_ranks() -> None:
    four = {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    assert libraries.thread_advice(1, 4, four) == ""
    assert "4 local ranks" in libraries.thread_advice(4, 8, four)
