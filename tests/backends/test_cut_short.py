"""Files in the caches that have lost their end are made anew, and no process dies of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowering import cut_short
from lowering.native import library
from tests.conftest import Python
from tests.support.regions import kernels

_SCRIPT = """
import json
import torch
import kernel_dispatch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
compiled = torch.compile(model, backend="unified")
x = torch.randn(4, 16)
compiled(x).square().sum().backward()
graphs = kernel_dispatch.report(compiled)
close = torch.allclose(compiled(x), model(x), atol=1e-6)
print(json.dumps([close, [len(g.fallbacks) for g in graphs], [g.provider for g in graphs]]))
"""


@pytest.fixture
def library_file(tmp_path: Path) -> Path:
    kernels()
    whole = Path(library.probe().details["library"]).read_bytes()
    if not whole.startswith(b"\x7fELF"):
        pytest.skip("libraries are ELF files on Linux only")
    file = tmp_path / "kernels.so"
    file.write_bytes(whole)
    return file


@pytest.mark.parametrize("kept", [0, 20, 5000, -1], ids=["nothing", "magic", "header", "most"])
def test_a_library_that_was_cut_short_is_told(library_file: Path, kept: int) -> None:
    assert not cut_short.is_cut_short(library_file)
    library_file.write_bytes(library_file.read_bytes()[:kept])
    assert cut_short.is_cut_short(library_file)


def test_other_files_are_short_where_they_are_empty(tmp_path: Path) -> None:
    file = tmp_path / "header.gch"
    file.write_text("x")
    assert not cut_short.is_cut_short(file)
    file.write_text("")
    assert cut_short.is_cut_short(file)


@pytest.mark.wide
@pytest.mark.slow
def test_what_inductor_keeps(python: Python, tmp_path: Path) -> None:
    """Libraries and sources; what it pickles, it mends by itself."""
    cache = tmp_path / "inductor"
    right = [True, [0], ["inductor"]]
    assert told(python, cache) == right
    libraries, sources = ([*cache.rglob(f"*.{kind}")] for kind in ("so", "py"))
    assert libraries
    assert sources
    for kept in (1000, 0):
        for file in libraries:
            file.write_bytes(file.read_bytes()[:kept])
        assert told(python, cache) == right
        for file in sources:
            file.write_bytes(file.read_bytes()[: kept // 2])
        assert told(python, cache) == right
    for file in cache.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert told(python, cache) == right


def told(python: Python, cache: Path) -> object:
    return json.loads(python(_SCRIPT, TORCHINDUCTOR_CACHE_DIR=str(cache)).stdout)
