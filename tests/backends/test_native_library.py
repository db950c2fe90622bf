"""The C++ kernels as a file: built once, found again, and done without where they cannot be had."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder

import kernel_dispatch
from kernel_dispatch import profiling
from lowering.contract import Probe
from lowering.native import building, library
from lowering.targets import cpu
from tests.conftest import Python
from tests.support.compiling import compile_at, every_row_applies
from tests.support.regions import hold, kernels, region_rows
from tests.support.reports import fallbacks_of


@pytest.fixture
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for libraries."""
    before = library._Place.folder, library._Place.failed
    library.keep_in(tmp_path / "cache")
    library.fingerprint.cache_clear()  # a test may change what it is made of
    yield tmp_path / "cache"
    library._Place.folder, library._Place.failed = before
    library.fingerprint.cache_clear()


def asked_anew() -> Probe:
    """The probe's answer without the one that is remembered."""
    return library.probe.__wrapped__()


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16)).eval()


def reasons(compiled: Any, provider: str) -> set[str]:
    return {
        reason["text"]
        for graph in kernel_dispatch.report(compiled)
        for rejection in graph.as_dict()["rejected"]
        if rejection["provider"] == provider
        for reason in rejection["reasons"]
    }


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("disabled", [[], ["mkldnn"]], ids=["mkldnn", "nobody else"])
def test_without_kernels_others_take_over(
    monkeypatch: pytest.MonkeyPatch, disabled: list[str]
) -> None:
    """Without a warning: it costs speed only. The report has the reason."""
    monkeypatch.setattr(library, "probe", lambda: Probe.no("no kernels today"))
    model, x = network(), torch.randn(2, 3, 8, 8)
    compiled = compile_at("O2", model, options={"disable": disabled})
    hold(compiled, model, x)
    assert not fallbacks_of(compiled)
    takers = {row[1] for row in region_rows(compiled)}
    assert not takers & {"openmp", "mha"}
    assert ("mkldnn" in takers) == (not disabled)
    for provider in ("openmp", "mha"):
        assert reasons(compiled, provider) == {f"{provider}: no kernels today"}
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.provider == "inductor"


def test_a_folder_that_cannot_be_written(elsewhere: Path) -> None:
    elsewhere.write_text("a file where a folder should be")
    found = asked_anew()
    assert not found.available
    assert "could not be built or loaded" in found.reason
    assert str(elsewhere) in found.reason


def test_a_build_that_fails(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    """The end of what the compiler said is the reason; nothing is left in the folder."""

    class Failing:
        def build(self) -> None:
            said = "\n".join(f"line {number}" for number in range(50))
            raise RuntimeError(f"C++ compile error\n\nCommand:\nc++ -O3\n\nOutput:\n{said}")

        def get_command_line(self) -> str:
            return "c++"

    monkeypatch.setattr(building, "_builder", lambda *_, **__: Failing())
    found = asked_anew()
    assert not found.available
    assert found.reason.endswith("line 49")
    assert library.failure() == found.reason
    assert "-O3" not in found.reason
    assert "line 30" not in found.reason
    left = {file.name.partition("_")[0] + file.suffix for file in elsewhere.iterdir()}
    assert left <= {"kernels.lock", "instruction.json"}


def test_what_a_killed_build_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    """Of the same library: another one may be in the making."""
    elsewhere.mkdir(parents=True)
    name = f"build_kernels_{library.fingerprint()}_x"
    for folder in (name, "build_kernels_another_y"):
        (elsewhere / folder).mkdir()
        (elsewhere / folder / "linear.o").write_text("half an object")
    monkeypatch.setattr(building, "_compiled", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        building.build(elsewhere / f"kernels_{library.fingerprint()}.so")
    assert [folder.name for folder in elsewhere.glob("build_*")] == ["build_kernels_another_y"]


class Recorded:
    """In place of torch's builder: what it was asked to make, and with which header."""

    made: list[tuple[str, str | None]]
    refuses: bool

    def __init__(self, name: str, parts: Any, folder: str, *, header: Any = None, **kind: Any):
        self.name, self.folder, self.header, self.kind = name, folder, header, kind

    def get_target_file_path(self) -> str:
        end = ".gch" if self.kind.get("precompiling") else ".o"
        return str(Path(self.folder) / f"{self.name}{end}")

    def build(self) -> None:
        if Recorded.refuses and self.kind.get("precompiling"):
            Path(self.get_target_file_path()).write_text("half of it")
            raise RuntimeError("no space left on device")
        Path(self.get_target_file_path()).write_text("")
        Recorded.made.append((self.name, self.header))


@pytest.mark.parametrize("refuses", [False, True])
def test_headers_of_torch_are_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refuses: bool
) -> None:
    """Where they can't be precompiled, each file reads them, and nothing of a half one is there."""
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    monkeypatch.setattr(Recorded, "refuses", refuses, raising=False)
    monkeypatch.setattr(building, "_builder", Recorded)
    objects = building._compiled(str(tmp_path))
    made = dict(Recorded.made)
    sources = {file.stem for file in building.files() if file.suffix == ".cpp"}
    assert {file.stem for file in objects} == sources
    assert all(file.is_file() for file in objects)
    header = tmp_path / "shared_headers.h"
    shared = {name for name in sources if made[name] == str(header)}
    assert shared == (set() if refuses else sources - set(building._APART))
    assert set(building._APART) < sources
    assert (tmp_path / "shared_headers.h.gch").exists() != refuses


def test_the_first_that_fails_ends_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is wrong with one file is wrong with most: nobody waits for all of them."""

    class Failing(Recorded):
        def build(self) -> None:
            super().build()
            time.sleep(0.2)  # a compiler is slower than who cancels what comes behind
            raise RuntimeError("an option that this compiler lacks")

    monkeypatch.setattr(Recorded, "made", [], raising=False)
    monkeypatch.setattr(Recorded, "refuses", False, raising=False)
    monkeypatch.setattr(building, "_builder", Failing)
    monkeypatch.setattr(building, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    with pytest.raises(RuntimeError, match="an option"):
        building._compiled(str(tmp_path))
    assert len(Recorded.made) < len(building._sources())


@pytest.mark.slow
def test_a_precompiled_header_is_taken(tmp_path: Path) -> None:
    """By the compiler that is here: it would read the text instead without a word."""
    kernels()
    if not cpp_builder.is_gcc():
        pytest.skip("Clang refuses a header that was changed since, which is as good")
    header = building._precompiled(str(tmp_path))
    assert header is not None
    Path(header).write_text("#error read once more")
    source = tmp_path / "one.cpp"
    source.write_text("at::Tensor one(int64_t size) { return at::empty({size}); }")
    building._compiler(source, str(tmp_path), header).build()
    assert (tmp_path / "one.o").stat().st_size


_WITH_A_DAMAGED_FILE = """
import os, pathlib, shutil
import torch
from lowering.native import library

good, folder = pathlib.Path({good!r}), pathlib.Path("damaged")
folder.mkdir()
(folder / good.name).write_bytes(good.read_bytes()[:5000])
library.keep_in(folder)
library.building.build = lambda target: shutil.copy(good, target)
found = library.probe()
assert found.available, found.reason
assert library.counts() == (0,) * len(library.COUNTED)
print(sorted(file.name.removeprefix(good.name) for file in folder.glob("kernels_*")))
"""


def test_a_damaged_file_is_built_anew(python: Python) -> None:
    """It killed the process; kernels must not stay away for ever either."""
    good = library.probe().details["library"]
    done = python(_WITH_A_DAMAGED_FILE.format(good=good))
    assert done.stdout.split() == ["['',", "'.lock',", "'.refused']"]


def test_what_no_build_makes_loadable_is_built_anew_once(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    builds = []

    def build(target: Path) -> None:
        builds.append(target)
        target.write_bytes(b"no library")

    def load(path: Path) -> None:
        raise OSError(f"{path}: a symbol is missing")

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(library, "_load", load)
    for _ in range(3):  # as three processes would ask
        found = asked_anew()
        assert not found.available
        assert "a symbol is missing" in found.reason
    assert len(builds) == 2


def test_the_name_changes_with_all_that_matters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = library.fingerprint.__wrapped__
    found = {plain()}
    assert found == {plain()}
    monkeypatch.setattr(torch, "__version__", "9.9")
    found.add(plain())
    monkeypatch.setattr(building, "options_text", lambda: "c++ -O0")
    found.add(plain())
    for source in building.files():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(building, "_FOLDER", tmp_path)
    assert plain() in found
    for name in ("gemm.h", "linear.cpp"):
        (tmp_path / name).write_text("// another\n")
        found.add(plain())
    assert len(found) == 5


_AT_ONCE = """
import shutil, sys, time
from pathlib import Path
from lowering.native import library
from lowering.targets import cpu

built, folder, log = sys.argv[1:]

def build(target):
    with open(log, "a") as file:
        file.write("built\\n")
    time.sleep(2)
    half = Path(str(target) + ".half")
    shutil.copy(built, half)
    half.replace(target)

library.building.build = build
library.keep_in(Path(folder))
found = library.probe()
assert found.available, found.reason
assert Path(found.details["library"]).parent == Path(folder)
"""


@pytest.mark.slow
def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    kernels()
    built, folder, log = library.built(), tmp_path / "cache", tmp_path / "log"
    script = tmp_path / "script.py"
    script.write_text(_AT_ONCE)
    command = [sys.executable, str(script), str(built), str(folder), str(log)]
    together = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        for _ in range(3)
    ]
    for process in together:
        _, error = process.communicate(timeout=180)
        assert process.returncode == 0, error
    assert log.read_text().count("built") == 1
    assert [file.name for file in folder.glob("*.so")] == [built.name]


_BROKEN = """
import os, warnings
from pathlib import Path
import torch
import kernel_dispatch
from kernel_dispatch import profiling
from lowering.native import library
from lowering.targets import cpu

folder = Path(os.environ["UNIFIED_CACHE_DIR"])
if "CXX" not in os.environ:
    folder.mkdir(parents=True, exist_ok=True)
    for end in ("", ".refused"):  # it was built anew before
        (folder / f"kernels_{library.fingerprint()}.so{end}").write_bytes(b"no library at all")
model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.ReLU()).eval()
x = torch.randn(1, 64, 34, 34)
with warnings.catch_warnings(record=True) as seen, torch.no_grad():
    warnings.simplefilter("always")
    compiled = torch.compile(model, backend="unified")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
(graph,) = kernel_dispatch.report(compiled)
found = graph.as_dict()
print("PROVIDER", graph.provider)
print("WARNED", sum(issubclass(w.category, kernel_dispatch.UnifiedWarning) for w in seen))
print("REGIONS", [(r["region"], r["provider"], r["runs"]) for r in found["regions"]])
print("OPENMP", [r["reasons"][0] for r in found["rejected"] if r["provider"] == "openmp"][0])
"""


@pytest.mark.slow
def test_without_a_compiler(python: Python, tmp_path: Path) -> None:
    """Nothing can be generated either, so the one warning is Inductor's; oneDNN is there."""
    out = python(_BROKEN, CXX="/nonexistent", UNIFIED_CACHE_DIR=str(tmp_path / "c")).stdout
    assert "PROVIDER eager" in out
    assert "WARNED 1" in out
    assert "('convolution', 'mkldnn', 2)" in out
    assert "provider-absent" in out
    assert "/nonexistent" in out.split("OPENMP")[1]


@pytest.mark.slow
def test_a_file_that_is_no_library(python: Python, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    out = python(_BROKEN, CXX=None, UNIFIED_CACHE_DIR=folder, kernels=False).stdout
    assert "PROVIDER inductor" in out
    assert "WARNED 1" in out
    assert "('convolution', 'mkldnn', 2)" in out
    assert "could not be built or loaded" in out


def test_a_profile_knows_every_operator() -> None:
    """Under the names of the rows, whatever the operator itself is called."""
    kernels()
    known = {(row.provider, row.region) for row in cpu.TARGET.rows}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, plain = name.partition("::")
        owners = ("openmp_", "mha_", "mkl_", "mkldnn_")
        if namespace == "kernel_dispatch" and plain.startswith(owners):
            kind, *owner = profiling._operator(namespace, plain)
            assert kind == profiling.REGION and tuple(owner) in known, name
